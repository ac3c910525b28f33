"""Which requests come when, for each workload of the matrix; the same for every system. Reads the trace's file."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.matrix.cells import Cell
from bench.serving.errors import BadScenario
from bench.serving.trace import AZURE_CONV, NUM_RESERVED_IDS
from bench.serving_gpu import draw_lengths
from elasticmoe.runtime.simulator.workload import read_trace

MEAN_IN, MEAN_OUT = 168, 205
CLOSED_LIMIT = 2048
"""Tokens that a request of a closed batch holds at most."""
LIGHT_REQUESTS = 8
CALM_RATE = 2.0
"""Requests a second after a burst."""
MOST_OUT = 1024
TRACE_START_S = 300.0
"""Where in the trace the open loop starts: its first minutes are a ramp."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run may scale down."""

    requests: int = 256
    """Of a closed batch and of a burst."""
    seconds: float = 20.0
    """How long requests of the open loop, and those after a burst, keep coming."""
    max_model_len: int = 8192
    seed: int = 0

    @property
    def most_in(self) -> int:
        """Return the longest prompt."""
        return self.max_model_len // 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, prompt tokens, tokens to generate."""

    at_s: float
    num_in: int
    num_out: int
    is_after_burst: bool = False
    """`at_s` counts from the end of those that aren't."""


def plan_arrivals(cell: Cell, sizes: Sizes, trace: Path = AZURE_CONV) -> tuple[Arrival, ...]:
    """Return the cell's requests in order of arrival."""
    if cell.workload == "open":
        assert cell.rate is not None, "a cell of the open loop has a rate"
        return _trace_arrivals(trace, cell.rate, sizes)
    limit = min(CLOSED_LIMIT, sizes.max_model_len)
    if cell.workload == "light":
        half = limit // 2 - 1
        return (Arrival(0.0, min(MEAN_IN, half), min(MEAN_OUT, half)),) * LIGHT_REQUESTS
    num_calm = round(sizes.seconds * CALM_RATE) if cell.workload == "burst" else 0
    lengths = draw_lengths(sizes.requests + num_calm, MEAN_IN, MEAN_OUT, limit, sizes.seed)
    burst = tuple(Arrival(0.0, num_in, num_out) for num_in, num_out in lengths[: sizes.requests])
    calm = enumerate(lengths[sizes.requests :])
    return burst + tuple(Arrival(n / CALM_RATE, num_in, num_out, True) for n, (num_in, num_out) in calm)


def _trace_arrivals(trace: Path, rate: float, sizes: Sizes) -> tuple[Arrival, ...]:
    due = [((one.at_s - TRACE_START_S) / rate, one.prompt_tokens, one.output_tokens) for one in read_trace(trace)]
    arrivals = tuple(
        Arrival(at_s, num_in, min(num_out, MOST_OUT, sizes.max_model_len - num_in))
        for at_s, num_in, num_out in due
        if 0 <= at_s < sizes.seconds and num_in <= sizes.most_in
    )
    if not arrivals:
        raise BadScenario(
            f"{trace.name} has no prompt of at most {sizes.most_in} tokens then: allow longer ones, or more time"
        )
    return arrivals


def make_prompts(arrivals: Sequence[Arrival], vocab: int, seed: int) -> list[list[int]]:
    """Return random token ids of each request's prompt."""
    rng = random.Random(seed + 1)
    return [[rng.randrange(min(NUM_RESERVED_IDS, vocab - 1), vocab) for _ in range(one.num_in)] for one in arrivals]
