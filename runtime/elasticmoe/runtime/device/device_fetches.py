"""Fetches that the device drives: a small kernel beside the computation sees the routing and copies what is away.

Nothing returns to the host, so a CUDA graph may hold all of it; imports Triton.
"""

import contextlib
from collections.abc import Callable

import numpy as np
import torch

from elasticmoe.kernels.fetch import (
    COPIED,
    COPY_NS,
    DEFAULT,
    EXPOSED_NS,
    HITS,
    NUM_TOTALS,
    Counts,
    Masters,
    fetch_needed,
    stamp,
)
from elasticmoe.kernels.launch import Late
from elasticmoe.runtime.device.arena import Arena
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.report import FetchCounts, Pending
from elasticmoe.runtime.device.tables import DeviceTable, Mirrored
from elasticmoe.runtime.units import ExpertKey

FEW_TOKENS = 4
"""A batch up to this has too little to compute beside a fetch to be worth a second stream."""


class DeviceFetches:
    """One fetch a layer on a stream of its own, from the routing on, joined before the experts that were away compute.

    It starts after everything enqueued before it, so after its slots' last readers; every rank does the same.
    """

    tuning = DEFAULT
    """How the kernel is launched."""

    def __init__(self, pool: HostPool, table: DeviceTable, arena: Callable[[], Arena]) -> None:
        """Copy from `pool`, which must be pinned where there is a GPU, into what `arena` returns at the time."""
        device, layout = table.pages.device, pool.layout
        self._table = table
        self._arena = arena
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._num_tokens = Mirrored(np.zeros(1, dtype=np.int32), device)
        self._routed = torch.zeros((layout.num_layers, layout.num_experts), dtype=torch.int64, device=device)
        self._totals = torch.zeros(NUM_TOTALS, dtype=torch.int64, device=device)
        clock = torch.zeros(2, dtype=torch.int64, device=device)
        self._counts = [Counts(routed, self._totals, clock) for routed in self._routed]
        firsts = [pool.matrices(ExpertKey(layer, 0))[0] for layer in range(layout.num_layers)]
        self._masters = [Masters(first.data_ptr(), layout.matrix_bytes) for first in firsts]

    @torch.inference_mode()
    def begin_step(self, num_tokens: int) -> None:
        """Let the forwards enqueued from here on fetch for, and count, their first `num_tokens` tokens."""
        if self._num_tokens.host[0] != num_tokens:
            self._num_tokens.host[0] = num_tokens
            self._num_tokens.send()

    def end_step(self) -> None:
        """Do nothing: dummy batches come before the first step, when no token is real yet."""

    def prepare(self, layer: int, topk_ids: torch.Tensor) -> Late | None:
        """Start to fetch what `topk_ids` [T, K] names and the layer hasn't; the result says what may be read when.

        None: whatever is launched next may read it all.
        """
        counts, resident, ids = self._counts[layer], self._table.resident[layer], topk_ids.contiguous()
        arena, is_awaited = self._arena(), ids.shape[0] <= FEW_TOKENS
        with contextlib.nullcontext() if is_awaited else self._beside():
            fetch_needed(
                ids, self._table.pages[layer], resident, self._masters[layer], arena.storage, arena.granule_bytes,
                num_tokens=self._num_tokens.device, counts=counts, is_awaited=is_awaited, tuning=self.tuning,
            )  # fmt: skip
        return None if is_awaited else Late(resident, lambda: self._join(counts, ids))

    @torch.inference_mode()
    def take(self) -> Pending:
        """Return the counts since the last call and start anew, in order with the forwards; waits for nothing."""
        sent = [_sent(self._routed), _sent(self._totals)]
        self._routed.zero_()
        self._totals.zero_()
        done = None if self._side is None else torch.cuda.current_stream().record_event()

        def counts() -> FetchCounts:
            if done is not None:
                done.synchronize()
            routed, totals = (each.numpy() for each in sent)
            hits, missed = int(totals[HITS]), int(totals[COPIED])
            return FetchCounts(routed, hits, missed, totals[EXPOSED_NS] / 1e9, totals[COPY_NS] / 1e9)

        return counts

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context whose launches run beside what is enqueued next, after all that was enqueued before."""
        if self._side is None:
            return contextlib.nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _join(self, counts: Counts, ids: torch.Tensor) -> None:
        del ids  # held until here: its memory is the side stream's as long
        stamp(counts)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def _sent(counts: torch.Tensor) -> torch.Tensor:
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
    return host.copy_(counts, non_blocking=True)
