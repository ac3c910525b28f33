"""One rank's experts: host pool, arena, page table and counts; the worker applies deltas, the MoE layers read.

Never decides anything: what is resident, and where, comes from the scheduler.
"""

import time
from typing import TYPE_CHECKING, Protocol

import torch

from elasticmoe.runtime.contract.config import FetchKind
from elasticmoe.runtime.device.arena import Arena, page_index, temporary_arena
from elasticmoe.runtime.device.copies import copies_for
from elasticmoe.runtime.device.host_fetches import HostFetches
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.report import Pending, PendingReport, StepReport
from elasticmoe.runtime.device.tables import DeviceTable
from elasticmoe.runtime.pages.changes import Entry, PageDelta
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import ExpertKey

if TYPE_CHECKING:
    from elasticmoe.kernels.launch import Late
    from elasticmoe.runtime.device.device_fetches import Predict


class Fetches(Protocol):
    """How experts that are routed to and away come to the device, and what is counted on the way."""

    @property
    def num_tokens(self) -> torch.Tensor | None:
        """Return the number of real tokens on the device, [1] int32; None: batches are never padded."""

    def begin_step(self, num_tokens: int) -> None:
        """Begin to count; `num_tokens` of the batch are real, the others pad it."""

    def end_step(self) -> None:
        """Stop counting: dummy batches don't count."""

    def prepare(
        self, layer: int, topk_ids: torch.Tensor, hidden: torch.Tensor | None = None, *, is_piece: bool = False
    ) -> "Late | None":
        """Bring what `topk_ids` [T, K] names and is away: at once (None), or by when the result says.

        `hidden` [T, d] may tell what the next layer will name; `is_piece`: in a graph that ends with this layer.
        """

    def take(self) -> Pending:
        """Return the counts since the last call and start anew."""


class Experts:
    """The experts of every MoE layer of one rank.

    Planned loads go beside the computation and are waited for before the next delta. All in one order, the same on
    every rank.
    """

    def __init__(self, pool: HostPool, device: torch.device, fetch: FetchKind = "host") -> None:
        """Start without an arena: every forward reads one temporary expert, and nothing is fetched."""
        layout = pool.layout
        self.pool = pool
        self.device = device
        self.table = DeviceTable(layout.num_layers, layout.num_experts, device)
        self.arena = temporary_arena(layout, pool.dtype, device)
        self._tiers: Tiers | None = None
        self._copies = copies_for(device)
        self.drive(fetch)
        self._planned = 0
        self._start_copy = (0, 0.0)
        """Bytes and seconds of the residents' copies at start, until they are reported."""

    def drive(self, fetch: FetchKind) -> None:
        """From now on have `fetch` drive the fetches, with counts of its own; between steps, and outside graphs."""
        self._fetches = self._make_fetches(fetch)
        self.begin_step, self.end_step = self._fetches.begin_step, self._fetches.end_step
        self.prepare, self.num_tokens = self._fetches.prepare, self._fetches.num_tokens

    @torch.inference_mode()
    def attach(self, storage: torch.Tensor, tiers: Tiers, entries: list[Entry]) -> None:
        """Move into the real arena: `storage` is uint8 [arena bytes]; copies the resident experts in."""
        self._tiers = tiers
        self.arena = Arena(storage, tiers.granule_bytes, self.pool.layout, self.pool.dtype)
        self.table.write(entries, tiers)
        residents = [entry.key for entry in entries if entry.is_resident]
        started_s = time.perf_counter()
        for key in residents:
            self._copy_in(key)
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

    def take_report(self) -> PendingReport:
        """Return the counts since the last call and start anew; the result may wait for the device."""
        pending, planned = self._fetches.take(), self._planned
        num_bytes, seconds = self._start_copy
        self._start_copy, self._planned = (0, 0.0), 0

        def report() -> StepReport:
            counts = pending()
            return StepReport(
                routed=counts.routed,
                routed_resident=counts.routed_resident,
                missed=counts.missed,
                predicted=counts.predicted,
                foreseen=counts.foreseen,
                planned=planned,
                exposed_s=counts.exposed_s,
                copied_bytes=num_bytes + (counts.missed + counts.predicted) * self.pool.layout.expert_bytes,
                copy_s=seconds + counts.copy_s,
            )

        return report

    def predict_by(self, predict: "Predict") -> None:
        """From now on fetch the next layer's experts ahead, as predicted; for fetches that the device drives."""
        from elasticmoe.runtime.device.device_fetches import DeviceFetches  # noqa: PLC0415 -- imports Triton

        assert isinstance(self._fetches, DeviceFetches), "the host fetches what is routed to, never ahead"
        self._fetches.predict = predict

    def _make_fetches(self, fetch: FetchKind) -> Fetches:
        if fetch == "host":
            return HostFetches(self.table, self._copy_in)
        from elasticmoe.runtime.device.device_fetches import DeviceFetches  # noqa: PLC0415 -- imports Triton

        return DeviceFetches(self.pool, self.table, lambda: self.arena)

    def _copy_in(self, key: ExpertKey) -> None:
        for index, master in zip(self.table.row(key), self.pool.matrices(key), strict=True):
            self.arena.page(index).copy_(master, non_blocking=True)
