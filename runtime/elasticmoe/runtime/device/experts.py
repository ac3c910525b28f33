"""One rank's experts: host pool, arena, page table and counts; the worker applies deltas, the MoE layers read.

Never decides anything: what is resident, and where, comes from the scheduler.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from elasticmoe.runtime.device.arena import Arena, page_index, temporary_arena
from elasticmoe.runtime.device.copies import copies_for
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.tables import DeviceTable
from elasticmoe.runtime.pages.changes import Entry, PageDelta
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import ExpertKey


@dataclass(slots=True)
class StepReport:
    """What a worker counted since its last report; travels to the scheduler with a step's output."""

    routed: np.ndarray
    """[layers, experts] int64: tokens routed to each expert."""
    routed_resident: int
    """Of those, the ones that found their expert resident."""
    missed: int
    """Fetches of experts that were routed to and absent."""
    planned: int
    """Fetches of experts that the adjuster made resident."""
    exposed_s: float
    """Seconds that compute waited for fetches."""
    copied_bytes: int
    """Bytes copied to the device whose time was taken: fetches that were waited for, and the residents' at start."""
    copy_s: float
    """Seconds that those copies took."""


class Experts:
    """The experts of every MoE layer of one rank.

    A fetch into a slot is enqueued on the stream that computes, so it starts after the slot's last reader; planned
    loads go beside it and are waited for before the next delta. All in one order, the same on every rank.
    """

    def __init__(self, pool: HostPool, device: torch.device) -> None:
        """Start without an arena: every forward reads one temporary expert."""
        layout = pool.layout
        self.pool = pool
        self.device = device
        self.table = DeviceTable(layout.num_layers, layout.num_experts, device)
        self.arena = temporary_arena(layout, pool.dtype, device)
        self.is_counting = False
        """Whether forwards count what they route; off for warm-up and dummy batches."""
        self._tiers: Tiers | None = None
        self._copies = copies_for(device)
        self._timer = _timer_for(device)
        self._routed = torch.zeros((layout.num_layers, layout.num_experts), dtype=torch.int64, device=device)
        self._hits = torch.zeros((), dtype=torch.int64, device=device)
        self._missed = 0
        self._planned = 0
        self._start_copy = (0, 0.0)
        """Bytes and seconds of the residents' copies at start, until they are reported."""

    @torch.inference_mode()
    def attach(self, storage: torch.Tensor, tiers: Tiers, entries: list[Entry]) -> None:
        """Move into the real arena: `storage` is uint8 [arena bytes]; copies the resident experts in."""
        self._tiers = tiers
        self.arena = Arena(storage, tiers.granule_bytes, self.pool.layout, self.pool.dtype)
        self.table.write(entries, tiers)
        residents = [entry.key for entry in entries if entry.is_resident]
        started_s = time.perf_counter()
        for key in residents:
            self._copy_in(key, self.table.row(key))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._start_copy = (len(residents) * self.pool.layout.expert_bytes, time.perf_counter() - started_s)

    @torch.inference_mode()
    def apply(self, delta: PageDelta) -> None:
        """Apply one step's changes before its forward: earlier loads land, moves, rows, then new loads."""
        tiers = self._tiers
        assert tiers is not None, "a delta before the arena"
        self._copies.wait()
        for move in delta.moves:
            self.arena.page(page_index(tiers, move.dst)).copy_(self.arena.page(page_index(tiers, move.src)))
        self.table.write(delta.entries, tiers)
        if delta.loads:
            self._copies.start()
            for load in delta.loads:
                rows = [page_index(tiers, page) for page in load.pages]
                for index, master in zip(rows, self.pool.matrices(load.key), strict=True):
                    self._copies.copy(self.arena.page(index), master)
            self._copies.finish()
            self._planned += len(delta.loads)

    def prepare(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Make every expert that `topk_ids` [T, K] names readable through the layer's rows, and count the tokens."""
        ids = topk_ids.reshape(-1).long()
        if self.is_counting:
            self._routed[layer].scatter_add_(0, ids, torch.ones_like(ids))
            self._hits += self.table.resident[layer][ids].sum()
        offloaded = self.table.offloaded(layer)
        if not offloaded.any() or not ids.numel():
            return
        touched = torch.zeros(offloaded.shape[0], dtype=torch.bool, device=self.device)
        touched[ids] = True
        needed = np.flatnonzero(touched.cpu().numpy() & offloaded).tolist()
        if not needed:
            return
        with self._timer:
            for expert in needed:
                key = ExpertKey(layer, expert)
                self._copy_in(key, self.table.row(key))
        if self.is_counting:
            self._missed += len(needed)

    def take_report(self) -> StepReport:
        """Return the counts since the last call and start anew; waits for the device."""
        routed = self._routed.cpu().numpy().copy()
        exposed_s = self._timer.take()
        num_bytes, seconds = self._start_copy
        report = StepReport(
            routed=routed,
            routed_resident=int(self._hits),
            missed=self._missed,
            planned=self._planned,
            exposed_s=exposed_s,
            copied_bytes=num_bytes + self._missed * self.pool.layout.expert_bytes,
            copy_s=seconds + exposed_s,
        )
        self._start_copy = (0, 0.0)
        self._routed.zero_()
        self._hits.zero_()
        self._missed = self._planned = 0
        return report

    def _copy_in(self, key: ExpertKey, rows: list[int]) -> None:
        for index, master in zip(rows, self.pool.matrices(key), strict=True):
            self.arena.page(index).copy_(master, non_blocking=True)


class _WallTimer:
    """Seconds spent inside, by the wall clock: on a CPU a copy is done when it returns."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._total_s += time.perf_counter() - self._start_s

    def take(self) -> float:
        total, self._total_s = self._total_s, 0.0
        return total


class _EventTimer:
    """Seconds that the compute stream spends inside, by CUDA events."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._spans[-1][0].record()

    def __exit__(self, *_: object) -> None:
        self._spans[-1][1].record()

    def take(self) -> float:
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return sum(float(start.elapsed_time(end)) for start, end in spans) / 1000


def _timer_for(device: torch.device) -> _WallTimer | _EventTimer:
    return _EventTimer() if device.type == "cuda" else _WallTimer()
