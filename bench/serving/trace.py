"""Request lengths drawn from the Azure 2023 conversation trace, scaled down to a small model's context.

Pure but for reading the CSV file. Called by the demo and the benches; sends nothing.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.serving.errors import BadScenario

AZURE_CONV = Path(__file__).resolve().parent.parent / "data" / "azure-2023-conv.csv"
NUM_RESERVED_IDS = 16  # special tokens hold the lowest ids


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens a request brings and how many it generates."""

    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of KV that the request holds when it ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors on a trace's lengths, and the bounds that the scaled lengths are clamped to."""

    prompt: float
    output: float
    max_model_len: int
    min_tokens: int = 4


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how many tokens to generate after it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int


def read_trace(path: Path = AZURE_CONV) -> tuple[Lengths, ...]:
    """Every request of the trace, in order of arrival."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(Lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file))


def scale(lengths: Lengths, scaling: Scaling) -> Lengths:
    """The lengths times their factors; the output gives way last, and both fit the context."""
    low, limit = scaling.min_tokens, scaling.max_model_len
    output = min(max(round(lengths.output_tokens * scaling.output), low), limit - low)
    prompt = min(max(round(lengths.prompt_tokens * scaling.prompt), low), limit - output)
    return Lengths(prompt, output)


def draw_lengths(trace: Sequence[Lengths], count: int, seed: int, scaling: Scaling) -> tuple[Lengths, ...]:
    """`count` requests of the trace without replacement, scaled; the same for the same seed."""
    if count > len(trace):
        raise BadScenario(f"wanted {count} requests, the trace has {len(trace)}: ask for fewer")
    if scaling.max_model_len < 2 * scaling.min_tokens:
        raise BadScenario(
            f"wanted {scaling.min_tokens} tokens each way, the context holds {scaling.max_model_len}: use a longer one"
        )
    return tuple(scale(lengths, scaling) for lengths in random.Random(seed).sample(trace, count))


def make_requests(lengths: Sequence[Lengths], vocab_size: int, seed: int) -> tuple[Request, ...]:
    """One request of random token ids per length, special tokens left out; the same for the same seed."""
    rng = random.Random(seed)
    return tuple(
        Request(tuple(rng.randrange(NUM_RESERVED_IDS, vocab_size) for _ in range(one.prompt_tokens)), one.output_tokens)
        for one in lengths
    )


def mean_lengths(lengths: Sequence[Lengths]) -> tuple[float, float]:
    """Mean prompt and output tokens."""
    return (
        sum(one.prompt_tokens for one in lengths) / len(lengths),
        sum(one.output_tokens for one in lengths) / len(lengths),
    )
