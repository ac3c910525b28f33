"""A synthetic decode step of Qwen3-30B-A3B's shape in one CUDA graph, with fetches on a forked stream.

A layer is what the model has at a batch's size but for the attention itself: the projections before and after it, the
residual adds, and the paged MoE. Its routing is given. A layer's fetch starts at its gate, and what it brings is
computed after the residents, as in the engine. Looking ahead, the side stream is also given, at the gate of layer l,
what layer l + ahead will route to, as from a perfect predictor; a layer's own fetch then finds nothing to do, but both
are launched. There is a loading buffer more than layers are looked ahead. Shapes: T tokens, N experts, K top-k,
S slots, d hidden.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.fetch.setup import SHAPE, Experts, route_layer
from bench.kernel.timing import capture, interleaved_us
from elasticmoe.kernels.fetch import NUM_TOTALS, Counts, Tuning, fetch_needed, stamp
from elasticmoe.kernels.launch import Late, paged_moe

NUM_LAYERS = 48
QKV, HEADS = 5120, 4096
"""Columns of the projection before the attention (32 heads of 128, 4 each of keys and values), rows of the other."""
REPEATS = 7
STEPS = 3
"""Calls that are watched for syncs."""
WATCHED = "elasticmoe watched"


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
        self._side = torch.cuda.Stream(priority=-1)
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

    def fetching(self, tuning: Tuning) -> None:
        """Compute the same, fetching on the side stream."""
        ahead, hidden = self._case.ahead, self._hidden
        for layer in range(NUM_LAYERS):
            hidden = self._attend(layer, hidden)
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._fetch(layer, tuning)
                done = self._side.record_event()
                if ahead:
                    for later in range(layer + ahead if layer else 1, min(layer + ahead + 1, NUM_LAYERS)):
                        self._fetch(later, tuning, is_ahead=True)
            late = Late(self.routed[layer].resident, partial(self._join, done))
            hidden = self._experts_of(layer, hidden, self._rows[layer], late)
        torch.cuda.current_stream().wait_stream(self._side)
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

    def _join(self, done: torch.cuda.Event) -> None:
        stamp(self._counts)
        torch.cuda.current_stream().wait_event(done)

    def _with_slots(self, layer: int) -> torch.Tensor:
        """The layer's table with its offloaded experts in the slots of its loading buffer."""
        rows, away = self._table(layer).clone(), ~self.routed[layer].resident
        rows[away] = self._experts.buffers[layer % (self._case.ahead + 1)][: int(away.sum())]
        return rows

    def _table(self, layer: int) -> torch.Tensor:
        return self._experts.tables[layer % len(self._experts.tables)]

    def _attend(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        kind = layer % len(self._qkv)
        return hidden + (hidden @ self._qkv[kind])[:, :HEADS] @ self._out[kind]

    def _experts_of(self, layer: int, hidden: torch.Tensor, table: torch.Tensor, late: Late | None) -> torch.Tensor:
        routed, views = self.routed[layer], self._experts.views
        return hidden + paged_moe(hidden, routed.topk_weights, routed.topk_ids, *views, table, late=late)


def time_case(experts: Experts, case: Case, tunings: Sequence[Tuning]) -> list[dict[str, Any]]:
    """Rows of one case, one by each tuning."""
    step = Step(experts, case)
    step.resident()
    want = step.output.clone()
    base = capture([step.resident])
    rows = []
    for tuning in tunings:
        graph = capture([partial(step.fetching, tuning)])
        _empty(experts)
        graph.replay()
        assert torch.equal(step.output, want), f"fetched experts gave other bits: {case} {tuning}"
        alone = capture([partial(step.fetches, tuning)])
        times = [statistics.median(runs) for runs in interleaved_us((base, graph, alone), 1, REPEATS)]
        num_needed = sum(routed.num_needed for routed in step.routed)
        rows.append(row_of(case, tuning, num_needed, times) | {"syncs_per_step": syncs_per_call(graph.replay)})
    return rows


def row_of(case: Case, tuning: Tuning, num_needed: int, times_us: Sequence[float]) -> dict[str, Any]:
    """Of the times of a step without fetches, with them, and of the fetches alone.

    `hidden_share` is the share of the fetches' time by which the step didn't get longer; None if nothing was fetched.
    """
    base_us, step_us, alone_us = times_us
    num_bytes = num_needed * 3 * SHAPE.f * SHAPE.d * 2
    return {
        "batch": case.batch, "routing": case.routing, "blocks": tuning.num_blocks, "ahead": case.ahead,
        "offloaded": case.num_offloaded, "fetched_per_layer": round(num_needed / NUM_LAYERS, 2),
        "base_ms": round(base_us / 1e3, 3), "step_ms": round(step_us / 1e3, 3), "fetch_ms": round(alone_us / 1e3, 3),
        "fetch_gb_s": round(num_bytes / alone_us / 1e3, 2) if num_needed else None,
        "hidden_share": round(1 - (step_us - base_us) / alone_us, 3) if num_needed else None,
    }  # fmt: skip


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
