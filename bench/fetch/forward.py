"""A synthetic decode step of Qwen3-30B-A3B's shape in one CUDA graph, with fetches on forked streams.

A layer is what the model has at a batch's size but for the attention itself: the projections before and after it, the
residual adds, and the paged MoE. Its routing is given. A layer's own fetch starts at its gate, on a side stream.
Looking ahead, a second side stream is also given, at the gate of layer l, what layer l + ahead will route to, as from a
perfect predictor; a layer's own fetch then finds nothing to do, but both are launched. Shapes: T tokens, N experts,
K top-k, S slots, d hidden.

The two fetches of a gate don't wait for each other; layer l's own waits for the one that was ahead for l, which wrote
what l holds and its slots. Between a gate and its join, then, buffers of layers l to l + ahead are written or yet to
be read: ahead + 1. Another is not needed, as layer l - 1, whose buffer the fetch for l + ahead takes over, has been
joined by its own fetch and read by its late experts before gate l, which that fetch waits for.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from bench.fetch.carveout import prefer_shared
from bench.fetch.setup import SHAPE, Experts, route_layer
from bench.kernel.timing import capture, interleaved_us
from elasticmoe.kernels.fetch import NUM_TOTALS, Counts, Tuning, fetch_needed, stamp
from elasticmoe.kernels.launch import Late, paged_moe

NUM_LAYERS = 48
QKV, HEADS = 5120, 4096
"""Columns of the projection before the attention (32 heads of 128, 4 each of keys and values), rows of the other."""
REPEATS = 5
STEPS = 3
"""Calls that are watched for syncs."""
WATCHED = "elasticmoe watched"
Join = Literal["late", "arrived", "first"]
"""When a layer waits for fetches. `late`: before the experts that aren't resident, which come behind the others.
`arrived`: likewise, but first for the one ahead, whose experts are then computed with the residents. `first`: for all,
before any expert, so that none is late."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row's conditions."""

    batch: int
    routing: str
    """`skewed` or `flat`."""
    ahead: int
    """Layers; 0: each layer's fetch starts at its own gate."""
    num_offloaded: int
    """Experts of each layer, and slots of each buffer."""
    join: Join = "late"


@dataclass(frozen=True, slots=True)
class Launch:
    """How fetches are launched."""

    tuning: Tuning
    shared_percent: int = -1
    """Of a multiprocessor's cache, as `prefer_shared` takes it."""
    priority: int = -1
    """Of the side streams, as PyTorch has it; the computing stream's is 0. Its graphs keep each kernel's."""


class Step:
    """One decode step, with fetches or with every expert resident; all tensors keep their addresses."""

    def __init__(self, experts: Experts, case: Case) -> None:
        """Route all layers and make the projections."""
        gen = torch.Generator("cuda").manual_seed(case.batch)
        self._experts, self._case = experts, case
        skewed = case.routing == "skewed"
        self.routed = [route_layer(case.batch, layer, case.num_offloaded, skewed=skewed) for layer in range(NUM_LAYERS)]
        self._hidden = torch.randn((case.batch, SHAPE.d), generator=gen, device="cuda").bfloat16()
        self._qkv = torch.randn((len(experts.tables), SHAPE.d, QKV), generator=gen, device="cuda").bfloat16() * 0.005
        self._out = torch.randn((len(experts.tables), HEADS, SHAPE.d), generator=gen, device="cuda").bfloat16() * 0.005
        self._streams = {priority: [torch.cuda.Stream(priority=priority) for _ in range(2)] for priority in (-1, 0)}
        self.output = self._hidden
        """[T, d], of the last forward."""
        self._held = torch.zeros((NUM_LAYERS, SHAPE.num_experts), dtype=torch.bool, device="cuda")
        sizes = SHAPE.num_experts, NUM_TOTALS, 2
        self._counts = Counts(*(torch.zeros(size, dtype=torch.int64, device="cuda") for size in sizes))
        self._rows = [self._with_slots(layer) for layer in range(NUM_LAYERS)]

    def resident(self) -> None:
        """Compute the step with every expert in its own pages."""
        hidden = self._hidden
        for layer in range(NUM_LAYERS):
            hidden = self._experts_of(layer, self._attend(layer, hidden), self._table(layer), None)
        self.output = hidden

    def fetching(self, launch: Launch) -> None:
        """Compute the same, fetching on the side streams."""
        hidden, main = self._hidden, torch.cuda.current_stream()
        side, early = self._streams[launch.priority]
        arrived: dict[int, torch.cuda.Event] = {}
        for layer in range(NUM_LAYERS):
            hidden = self._attend(layer, hidden)
            gate = main.record_event()
            with torch.cuda.stream(side):
                side.wait_event(gate)
                if layer in arrived:
                    side.wait_event(arrived[layer])
                self._fetch(layer, launch.tuning)
                done = side.record_event()
            with torch.cuda.stream(early):
                for later in layers_ahead(layer, self._case.ahead):
                    early.wait_event(gate)
                    self._fetch(later, launch.tuning, is_ahead=True)
                    arrived[later] = early.record_event()
            hidden = self._experts_of(layer, hidden, self._rows[layer], self._late(layer, done, arrived.get(layer)))
        self.output = hidden

    def fetches(self, tuning: Tuning) -> None:
        """Fetch for all layers, and nothing else."""
        self._held.zero_()
        for layer in range(NUM_LAYERS):
            self._fetch(layer, tuning)

    def _fetch(self, layer: int, tuning: Tuning, *, is_ahead: bool = False) -> None:
        experts, routed = self._experts, self.routed[layer]
        fetch_needed(
            routed.topk_ids, self._rows[layer], routed.resident, experts.masters(layer), experts.storage,
            experts.pool.layout.matrix_bytes, held=self._held[layer], is_ahead=is_ahead,
            counts=None if is_ahead else self._counts, tuning=tuning,
        )  # fmt: skip

    def _late(self, layer: int, done: torch.cuda.Event, arrived: torch.cuda.Event | None) -> Late | None:
        """What the layer computes behind its join, if anything; waits on the computing stream for what comes first."""
        resident = self.routed[layer].resident
        if self._case.join == "first":
            self._join(done)
            return None
        if self._case.join == "arrived" and arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
            resident = resident | self._held[layer]
        return Late(resident, partial(self._join, done))

    def _join(self, done: torch.cuda.Event) -> None:
        stamp(self._counts)
        torch.cuda.current_stream().wait_event(done)

    def _with_slots(self, layer: int) -> torch.Tensor:
        """The layer's table with its offloaded experts in the slots of its loading buffer."""
        rows, away = self._table(layer).clone(), ~self.routed[layer].resident
        rows[away] = self._experts.buffers[buffer_of(layer, self._case.ahead)][: int(away.sum())]
        return rows

    def _table(self, layer: int) -> torch.Tensor:
        return self._experts.tables[layer % len(self._experts.tables)]

    def _attend(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        kind = layer % len(self._qkv)
        return hidden + (hidden @ self._qkv[kind])[:, :HEADS] @ self._out[kind]

    def _experts_of(self, layer: int, hidden: torch.Tensor, table: torch.Tensor, late: Late | None) -> torch.Tensor:
        routed, views = self.routed[layer], self._experts.views
        return hidden + paged_moe(hidden, routed.topk_weights, routed.topk_ids, *views, table, late=late)


def layers_ahead(layer: int, ahead: int) -> range:
    """The layers whose fetches start ahead at this one's gate: one, but at the first gate all up to it."""
    return range(layer + ahead if layer else 1, min(layer + ahead + 1, NUM_LAYERS)) if ahead else range(0)


def buffer_of(layer: int, ahead: int) -> int:
    """The loading buffer that the layer's experts are fetched to."""
    return layer % (ahead + 1)


def time_case(
    experts: Experts, case: Case, launches: Sequence[Launch], *, is_watched: bool = False
) -> list[dict[str, Any]]:
    """Rows of one case, one by each launch; `is_watched` has syncs counted, which takes a while."""
    step = Step(experts, case)
    step.resident()
    want = step.output.clone()
    base = capture([step.resident])
    rows = []
    for launch in launches:
        step.fetching(launch)
        prefer_shared(launch.shared_percent)
        graph = capture([partial(step.fetching, launch)])
        _empty(experts)
        graph.replay()
        assert torch.equal(step.output, want), f"fetched experts gave other bits: {case} {launch}"
        alone = capture([partial(step.fetches, launch.tuning)])
        times = [statistics.median(runs) for runs in interleaved_us((base, graph, alone), 1, REPEATS)]
        num_needed = sum(routed.num_needed for routed in step.routed)
        syncs = syncs_per_call(graph.replay) if is_watched else None
        rows.append(row_of(case, launch, num_needed, times) | {"syncs_per_step": syncs})
    return rows


def row_of(case: Case, launch: Launch, num_needed: int, times_us: Sequence[float]) -> dict[str, Any]:
    """Of the times of a step without fetches, with them, and of the fetches alone.

    `hidden_share` is the share of the fetches' time by which the step didn't get longer, `hideable_share` the most that
    it can be, with the bus busy for the whole step; None if nothing was fetched.
    """
    base_us, step_us, alone_us = times_us
    num_bytes = num_needed * 3 * SHAPE.f * SHAPE.d * 2
    hidden, hideable = 1 - (step_us - base_us) / alone_us, min(1.0, base_us / alone_us)
    shares = {"hidden_share": hidden, "hideable_share": hideable, "hidden_of_hideable": hidden / hideable}
    tuning = launch.tuning
    return {
        "batch": case.batch, "routing": case.routing, "blocks": tuning.num_blocks, "ahead": case.ahead,
        "offloaded": case.num_offloaded, "join": case.join, "chunk_bytes": tuning.chunk_bytes,
        "num_warps": tuning.num_warps, "num_stages": tuning.num_stages, "shared_percent": launch.shared_percent,
        "priority": launch.priority,
        "fetched_per_layer": round(num_needed / NUM_LAYERS, 2), "base_ms": round(base_us / 1e3, 3),
        "step_ms": round(step_us / 1e3, 3), "fetch_ms": round(alone_us / 1e3, 3),
        "fetch_gb_s": round(num_bytes / alone_us / 1e3, 2) if num_needed else None,
    } | {name: round(share, 3) if num_needed else None for name, share in shares.items()}  # fmt: skip


def syncs_per_call(call: Callable[[], object]) -> float:
    """How often a call made the host wait for the device or copied to it, as the profiler saw."""
    from torch.profiler import ProfilerActivity, profile, record_function

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function(WATCHED):
            for _ in range(STEPS):
                call()
        torch.cuda.synchronize()
    return count_syncs([(e.name, e.time_range.start, e.time_range.end) for e in seen.events()]) / STEPS


def count_syncs(events: Sequence[tuple[str, float, float]]) -> int:
    """Of (name, start, end): host waits that began within the steps, and copies to the host whenever they ran."""
    start, end = next(event[1:] for event in events if event[0] == WATCHED)
    waits = [name for name, begun, _ in events if "Synchronize" in name and start <= begun <= end]
    return len(waits) + sum(name.startswith("Memcpy DtoH") for name, _, _ in events)


def _empty(experts: Experts) -> None:
    """Fill the loading buffers with what no sum survives, so that a fetch that didn't happen shows."""
    experts.arena[experts.buffers.flatten().long()] = float("nan")
