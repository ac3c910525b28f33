"""Fetches that the device drives: a small kernel beside the computation sees the routing and copies what is away.

Nothing returns to the host, so a CUDA graph may hold all of it; imports Triton.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from elasticmoe.kernels.fetch import (
    COPY_NS,
    DEFAULT,
    EXPOSED_NS,
    FORESEEN,
    HITS,
    MISSED,
    NUM_TOTALS,
    PREDICTED,
    Counts,
    Masters,
    fetch_needed,
    stamp,
)
from elasticmoe.kernels.launch import FEW_TOKENS, Late
from elasticmoe.runtime.device.arena import Arena
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.report import FetchCounts, Pending
from elasticmoe.runtime.device.side_stream import SideStream
from elasticmoe.runtime.device.tables import DeviceTable, Mirrored
from elasticmoe.runtime.device.trust import Trust
from elasticmoe.runtime.units import ExpertKey

Predict = Callable[[int, torch.Tensor], torch.Tensor]
"""(MoE layer, hidden states [T, d] of the layer before) → the experts [T, K] that the layer's tokens may go to."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What was started ahead for a layer; the ids are held as long as the device may read them."""

    layer: int
    ids: torch.Tensor


class DeviceFetches:
    """A fetch a layer on a stream of its own, from the routing on, joined before the experts that were away compute.

    It starts after everything enqueued before it, so after its slots' last readers; every rank does the same. With a
    prediction another stream fetches for the next layer meanwhile, into the next loading buffer, whose last reader
    computed before; what the routing then asks for besides, the layer's own fetch brings.
    """

    tuning = DEFAULT
    """How the kernel is launched."""

    def __init__(self, pool: HostPool, table: DeviceTable, arena: Callable[[], Arena]) -> None:
        """Copy from `pool`, which must be pinned where there is a GPU, into what `arena` returns at the time."""
        device, layout = table.pages.device, pool.layout
        self.predict: Predict | None = None
        """None: nothing is fetched ahead."""
        self._table = table
        self._arena = arena
        self._own, self._gates, self._next = (SideStream(device) for _ in range(3))
        self._num_tokens, self._num_ahead = (Mirrored(np.zeros(1, dtype=np.int32), device) for _ in range(2))
        self._held = torch.zeros((layout.num_layers, layout.num_experts), dtype=torch.bool, device=device)
        self._routed = torch.zeros((layout.num_layers, layout.num_experts), dtype=torch.int64, device=device)
        self._totals = torch.zeros(NUM_TOTALS, dtype=torch.int64, device=device)
        clock = torch.zeros(2, dtype=torch.int64, device=device)
        self._counts = [Counts(routed, self._totals, clock) for routed in self._routed]
        firsts = [pool.matrices(ExpertKey(layer, 0))[0] for layer in range(layout.num_layers)]
        self._masters = [Masters(first.data_ptr(), layout.matrix_bytes) for first in firsts]
        self._ahead: _Ahead | None = None
        self._trust = Trust()
        self._unjudged: deque[tuple[torch.cuda.Event | None, torch.Tensor]] = deque()
        """Totals on their way from the device, which tell how good predictions were."""

    @property
    def num_tokens(self) -> torch.Tensor:
        """Return the number of real tokens on the device, [1] int32; 0 until the first step."""
        return self._num_tokens.device

    @torch.inference_mode()
    def begin_step(self, num_tokens: int) -> None:
        """Let the forwards enqueued from here on fetch for, and count, their first `num_tokens` tokens."""
        self._learn()
        ahead = num_tokens if self._trust.begin_step() else 0
        for scalar, value in ((self._num_tokens, num_tokens), (self._num_ahead, ahead)):
            if scalar.host[0] != value:
                scalar.host[0] = value
                scalar.send()

    def end_step(self) -> None:
        """Do nothing: dummy batches come before the first step, when no token is real yet."""

    def prepare(
        self, layer: int, topk_ids: torch.Tensor, hidden: torch.Tensor | None = None, *, is_piece: bool = False
    ) -> Late | None:
        """Start to fetch what `topk_ids` [T, K] names and the layer hasn't; the result says what may be read when.

        None: whatever is launched next may read it all. From `hidden` [T, d] the next layer's experts are predicted,
        unless `is_piece`: a graph that ends with this layer can't leave a fetch running.
        """
        ids, ahead, self._ahead = topk_ids.contiguous(), self._ahead, None
        if not self._may_miss(layer):
            self._fetch(layer, ids)  # which only counts
            return Late(self._table.resident_by_layer[layer], None)
        was_ahead = ahead is not None and ahead.layer == layer
        if ids.shape[0] <= FEW_TOKENS:
            self._fetch(layer, ids, is_awaited=True)
            return None
        is_predicted = hidden is not None and not is_piece and self._predict_next(layer, hidden)
        with self._own.after(self._next if was_ahead else None):
            self._fetch(layer, ids, held=self._held[layer] if was_ahead else None)
        if is_predicted:
            self._fetch_next()
        held = (ahead, ids)  # the side streams read them until they are joined
        return Late(self._table.resident_by_layer[layer], partial(self._join, layer, held, is_predicted=is_predicted))

    @torch.inference_mode()
    def take(self) -> Pending:
        """Return the counts since the last call and start anew, in order with the forwards; waits for nothing."""
        sent = [_sent(self._routed), _sent(self._totals)]
        self._routed.zero_()
        self._totals.zero_()
        done = torch.cuda.current_stream().record_event() if self._totals.is_cuda else None
        self._unjudged.append((done, sent[1]))

        def counts() -> FetchCounts:
            if done is not None:
                done.synchronize()
            routed, totals = (each.numpy() for each in sent)
            return FetchCounts(
                routed=routed,
                routed_resident=int(totals[HITS]),
                missed=int(totals[MISSED]),
                predicted=int(totals[PREDICTED]),
                foreseen=int(totals[FORESEEN]),
                exposed_s=totals[EXPOSED_NS] / 1e9,
                copy_s=totals[COPY_NS] / 1e9,
            )

        return counts

    def _join(self, layer: int, held: tuple[object, ...], *, is_predicted: bool) -> None:
        """Have the computation wait for the layer's fetch; `held` is what must live until then."""
        del held
        stamp(self._counts[layer])
        self._own.join()
        if is_predicted:
            self._gates.join()  # so that the hidden states outlive their reader

    def _may_miss(self, layer: int) -> bool:
        """Return whether an expert of the layer may be away: in a graph always, as in what only warms kernels up."""
        is_step = bool(self._num_tokens.host[0])
        is_captured = self._totals.is_cuda and torch.cuda.is_current_stream_capturing()
        return is_captured or not is_step or not self._table.is_whole(layer)

    def _predict_next(self, layer: int, hidden: torch.Tensor) -> bool:
        """Start to predict the next layer's routing, if there is one and a way to, and it may miss experts."""
        if self.predict is None or layer + 1 == len(self._masters) or not self._may_miss(layer + 1):
            return False
        with self._gates.after():
            self._ahead = _Ahead(layer + 1, self.predict(layer + 1, hidden).contiguous())
        return True

    def _learn(self) -> None:
        """Judge predictions by the totals that have come; on every rank, whether its report is read or not."""
        while self._unjudged and ((done := self._unjudged[0][0]) is None or done.query()):
            totals = self._unjudged.popleft()[1]
            self._trust.learn(int(totals[PREDICTED]), int(totals[FORESEEN]))

    def _fetch_next(self) -> None:
        """Start to fetch for the next layer what was predicted."""
        assert self._ahead is not None, "nothing was predicted"
        with self._next.after(self._gates):
            held = self._held[self._ahead.layer]
            self._fetch(self._ahead.layer, self._ahead.ids, held=held, is_ahead=True)

    def _fetch(
        self,
        layer: int,
        ids: torch.Tensor,
        *,
        held: torch.Tensor | None = None,
        is_ahead: bool = False,
        is_awaited: bool = False,
    ) -> None:
        arena = self._arena()
        fetch_needed(
            ids, self._table.pages_by_layer[layer], self._table.resident_by_layer[layer], self._masters[layer],
            arena.storage, arena.granule_bytes, num_tokens=(self._num_ahead if is_ahead else self._num_tokens).device,
            held=held, is_ahead=is_ahead, counts=self._counts[layer], is_awaited=is_awaited, tuning=self.tuning,
        )  # fmt: skip


def _sent(counts: torch.Tensor) -> torch.Tensor:
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
    return host.copy_(counts, non_blocking=True)
