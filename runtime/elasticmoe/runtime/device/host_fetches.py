"""Fetches that the host drives: it asks the device what a batch routed to, and has the copy engine bring it.

Simple, and the reference of the tests; the question costs a sync in every layer that has experts away.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from elasticmoe.runtime.device.report import FetchCounts, Pending
from elasticmoe.runtime.device.tables import DeviceTable
from elasticmoe.runtime.units import ExpertKey


class HostFetches:
    """Enqueues every fetch on the stream that computes, so it starts after its slot's last reader."""

    num_tokens = None
    """Batches are never padded."""

    def __init__(self, table: DeviceTable, copy_in: Callable[[ExpertKey], None]) -> None:
        """Fetch by `copy_in`, which copies one expert to where its row points."""
        self._table = table
        self._copy_in = copy_in
        self._is_counting = False
        device, (num_layers, num_experts, _) = table.pages.device, table.pages.shape
        self._routed = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        self._hits = torch.zeros((), dtype=torch.int64, device=device)
        self._missed = 0
        self._timer = _timer_for(device)

    def begin_step(self, num_tokens: int) -> None:
        """Count what is routed from here on."""
        del num_tokens
        self._is_counting = True

    def end_step(self) -> None:
        """Count no more: what follows is warm-up or a dummy batch."""
        self._is_counting = False

    def prepare(
        self, layer: int, topk_ids: torch.Tensor, hidden: torch.Tensor | None = None, *, is_piece: bool = False
    ) -> None:
        """Make every expert that `topk_ids` [T, K] names readable through the layer's rows, and count the tokens."""
        del hidden, is_piece  # nothing is predicted
        ids = topk_ids.reshape(-1).long()
        if self._is_counting:
            self._routed[layer].scatter_add_(0, ids, torch.ones_like(ids))
            self._hits += self._table.resident[layer][ids].sum()
        if self._table.is_whole(layer) or not ids.numel():
            return
        offloaded = self._table.offloaded(layer)
        touched = torch.zeros(offloaded.shape[0], dtype=torch.bool, device=ids.device)
        touched[ids] = True
        needed = np.flatnonzero(touched.cpu().numpy() & offloaded).tolist()
        if not needed:
            return
        with self._timer:
            for expert in needed:
                self._copy_in(ExpertKey(layer, expert))
        if self._is_counting:
            self._missed += len(needed)

    def take(self) -> Pending:
        """Return the counts since the last call and start anew; waits for the device."""
        exposed_s = self._timer.take()
        counts = FetchCounts(
            routed=self._routed.cpu().numpy().copy(),
            routed_resident=int(self._hits),
            missed=self._missed,
            predicted=0,
            foreseen=0,
            exposed_s=exposed_s,
            copy_s=exposed_s,
        )
        self._routed.zero_()
        self._hits.zero_()
        self._missed = 0
        return lambda: counts


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
