"""Which experts go and which come: layers nominate, the coldest (hottest) nominee over all layers is taken.

Amounts are net of loading buffers: an eviction that deepens its layer's buffer frees nothing by itself.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.units import MATRICES, ExpertKey


class _Nominees:
    """The next expert that each layer would give up, with the layer's room under its limit and its buffer."""

    def __init__(self, snap: Snapshot) -> None:
        self._snap = snap
        self._coldest: dict[int, Iterator[int]] = {}
        self._slotted = snap.num_slotted.tolist()
        self._depth = snap.buffer_depth.tolist()
        self._waiting: list[list[tuple[float, int, int]]] = [[] for _ in self._depth]
        """Nominees that would deepen their buffer, by buffer."""
        self._ready: list[tuple[float, int, int]] = []
        """Nominees that free pages at once: (probability, -expert, layer), a heap."""
        for layer in range(snap.num_layers):
            self._coldest[layer] = iter(snap.coldest(layer))
            self._nominate(layer)

    def _nominate(self, layer: int) -> None:
        if self._slotted[layer] >= self._snap.limit:
            return
        expert = next(self._coldest[layer], None)
        if expert is None:
            return
        nominee = (float(self._snap.probability[layer, expert]), -expert, layer)
        buffer = layer % len(self._depth)
        if self._slotted[layer] < self._depth[buffer]:
            heapq.heappush(self._ready, nominee)
        else:
            self._waiting[buffer].append(nominee)

    def _deepen(self) -> bool:
        """Add a slot to the buffer with the most layers to gain from it; False when none gains."""
        buffer = max(range(len(self._depth)), key=lambda b: (len(self._waiting[b]), -b))
        if len(self._waiting[buffer]) < 2:  # noqa: PLR2004 -- one eviction pays for the slot, the second one frees pages
            return False
        self._depth[buffer] += 1
        for nominee in self._waiting[buffer]:
            heapq.heappush(self._ready, nominee)
        self._waiting[buffer] = []
        return True

    def take(self) -> tuple[ExpertKey, int] | None:
        """Return the next expert to evict and the pages that it costs to have room for it, or None."""
        cost = 0
        if not self._ready:
            if not self._deepen():
                return None
            cost = MATRICES
        _, negative, layer = heapq.heappop(self._ready)
        self._slotted[layer] += 1
        self._nominate(layer)
        return ExpertKey(layer, -negative), cost


def choose_evictions(snap: Snapshot, pages: int) -> tuple[ExpertKey, ...] | None:
    """Return the coldest experts whose eviction frees at least `pages` pages net, or None if no set does."""
    nominees = _Nominees(snap)
    chosen: list[ExpertKey] = []
    gained = 0
    while gained < pages:
        taken = nominees.take()
        if taken is None:
            return None
        chosen.append(taken[0])
        gained += MATRICES - taken[1]
    return tuple(chosen)


def choose_loads(snap: Snapshot, num: int) -> tuple[ExpertKey, ...]:
    """Return up to `num` offloaded experts, hottest first over all layers; layers above the limit come first."""
    if num <= 0:
        return ()
    excess = (snap.num_offloaded - snap.limit).tolist()
    hottest = {layer: iter(snap.hottest(layer)) for layer in np.flatnonzero(snap.num_offloaded).tolist()}
    heap: list[tuple[bool, float, int, int]] = []

    def nominate(layer: int) -> None:
        expert = next(hottest[layer], None)
        if expert is not None:
            heapq.heappush(heap, (excess[layer] <= 0, -float(snap.probability[layer, expert]), expert, layer))

    for layer in hottest:
        nominate(layer)
    chosen: list[ExpertKey] = []
    while heap and len(chosen) < num:
        _, _, expert, layer = heapq.heappop(heap)
        chosen.append(ExpertKey(layer, expert))
        excess[layer] -= 1
        nominate(layer)
    return tuple(chosen)
