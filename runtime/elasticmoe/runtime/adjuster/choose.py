"""Which experts go and which come: layers nominate, the coldest (hottest) nominee over all layers is taken.

Amounts are net of loading buffers: an eviction that deepens its layer's buffer frees nothing by itself. One numpy pass
finds all layers' nominees; Python touches only experts that are taken.
"""

import heapq

import numpy as np

from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.changes import Swap
from elasticmoe.runtime.pages.table import OFFLOADED
from elasticmoe.runtime.units import MATRICES, ExpertKey

SMOOTHING = 0.1
"""Added to both sides of a swap's comparison, as a share of a layer's mean expert: keeps rare tokens from deciding."""


class _Nominees:
    """The next expert that each layer would give up, with the layer's room under its limit and its buffer."""

    def __init__(self, snap: Snapshot) -> None:
        self._snap = snap
        self._cold = snap.resident_heat()
        self._slotted = snap.num_slotted.tolist()
        self._depth = snap.buffer_depth.tolist()
        self._waiting: list[list[tuple[float, int, int]]] = [[] for _ in self._depth]
        """Nominees that would deepen their buffer, by buffer."""
        self._ready: list[tuple[float, int, int]] = []
        """Nominees that free pages at once: (probability, -expert, layer), a heap."""
        experts = self._cold.argmin(axis=1)
        rows = np.arange(snap.num_layers)
        may_go = (snap.num_slotted < snap.limit) & np.isfinite(self._cold[rows, experts])
        probability = snap.probability[rows, experts].tolist()
        for layer in np.flatnonzero(may_go).tolist():
            self._enter((probability[layer], -int(experts[layer]), layer))

    def _enter(self, nominee: tuple[float, int, int]) -> None:
        layer = nominee[2]
        buffer = layer % len(self._depth)
        if self._slotted[layer] < self._depth[buffer]:
            heapq.heappush(self._ready, nominee)
        else:
            self._waiting[buffer].append(nominee)

    def _renominate(self, layer: int) -> None:
        if self._slotted[layer] >= self._snap.limit:
            return
        expert = int(self._cold[layer].argmin())
        if np.isfinite(self._cold[layer, expert]):
            self._enter((float(self._snap.probability[layer, expert]), -expert, layer))

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
        self._cold[layer, -negative] = np.inf
        self._renominate(layer)
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
    is_offloaded = snap.state == OFFLOADED
    excess = snap.num_offloaded - snap.limit
    first: tuple[ExpertKey, ...] = ()
    if (excess > 0).any():
        heat = snap.offloaded_heat()
        last = np.take_along_axis(np.sort(heat, axis=1)[:, ::-1], np.maximum(excess - 1, 0)[:, None], axis=1)
        is_beyond = is_offloaded & (heat >= last) & (excess > 0)[:, None]
        first = _hottest(snap, is_beyond, num)
        is_offloaded &= ~is_beyond
    return first + _hottest(snap, is_offloaded, num - len(first))


def _hottest(snap: Snapshot, mask: np.ndarray, num: int) -> tuple[ExpertKey, ...]:
    """Return the `num` most probable experts of a mask, of equals the lower id and the lower layer first."""
    layers, experts = np.nonzero(mask)
    if num <= 0 or not len(layers):
        return ()
    probability = snap.probability[layers, experts]
    if len(layers) > num:
        is_among = probability >= np.partition(probability, -num)[-num]
        layers, experts, probability = layers[is_among], experts[is_among], probability[is_among]
    order = np.lexsort((layers, experts, -probability))[:num]
    return tuple(map(ExpertKey, layers[order].tolist(), experts[order].tolist()))


def choose_swaps(snap: Snapshot, num: int, margin: float) -> tuple[Swap, ...]:
    """Return up to `num` swaps, those that gain most first: at most one a layer, none in a layer above the limit.

    The offloaded expert must be hotter by `margin`, as a share. Until it has landed both are away, so a layer on its
    buffer's last slot needs a slot more for that long: such layers swap while pages for it are free.
    """
    if num <= 0:
        return ()
    rows = np.arange(snap.num_layers)
    cold, hot = snap.resident_heat(), snap.offloaded_heat()
    leaving, coming = cold.argmin(axis=1), hot.argmax(axis=1)
    exists = np.isfinite(cold[rows, leaving]) & np.isfinite(hot[rows, coming]) & (snap.num_slotted <= snap.limit)
    smoothing = SMOOTHING / snap.num_experts
    leaves, comes = snap.probability[rows, leaving], snap.probability[rows, coming]
    pays = exists & (comes + smoothing > (1 + margin) * (leaves + smoothing))
    order = np.argsort(leaves - comes, kind="stable")
    depth, free = snap.buffer_depth.tolist(), snap.free_pages
    swaps: list[Swap] = []
    for layer in order[pays[order]].tolist():
        buffer = layer % len(depth)
        if snap.num_slotted[layer] >= depth[buffer]:
            if free < MATRICES:
                continue
            free -= MATRICES
            depth[buffer] += 1
        swaps.append(Swap(ExpertKey(layer, int(leaving[layer])), ExpertKey(layer, int(coming[layer]))))
        if len(swaps) == num:
            break
    return tuple(swaps)
