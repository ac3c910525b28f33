"""Which experts go and which come: layers nominate, the nominee that is waited for least (most) is taken.

Each layer nominates its coldest expert. A step waits for it as often as it is routed to, where the layer misses more
than it hides already: so layers that hide more give first, and only of equals the coldest one.

Amounts are net of loading buffers: an eviction that deepens its layer's buffer frees nothing by itself. One numpy pass
finds all layers' nominees; Python touches only experts that are taken.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from elasticmoe.runtime.adjuster.misses import Floats, Misses, touched_share
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.changes import Swap
from elasticmoe.runtime.pages.table import OFFLOADED
from elasticmoe.runtime.units import MATRICES, ExpertKey

SMOOTHING = 0.1
"""Added to both sides of a swap's comparison, as a share of a layer's mean expert: keeps rare tokens from deciding."""


_Nominee = tuple[float, float, int, int, float]
"""(what steps would wait, share of its layer's tokens, -expert, layer, chance that a step is routed to it).

Ordered so: of equals the one that draws fewer tokens leaves, then the one with the higher id.
"""


class _Waits:
    """How much of an expert's copy each step would wait for, by what its layer misses in a step of what runs now."""

    def __init__(self, snap: Snapshot) -> None:
        self._tokens = np.asarray(float(max(1, snap.num_running)))
        self._top_k = snap.top_k
        self._room = snap.fit.room(self._tokens)
        away = np.flatnonzero(snap.state == OFFLOADED)
        self.layers, self.experts = np.divmod(away, snap.num_experts)
        self.probability = snap.probability.ravel()[away]
        self._touched = self.touch(self.probability)
        self._mean = self._sum(self._touched, snap.num_layers)
        self._variance = self._sum(self._touched * (1 - self._touched), snap.num_layers)

    def touch(self, probability: Floats) -> Floats:
        """Return the chance that a step is routed to experts that draw such shares of their layers' tokens."""
        return touched_share(self._tokens, self._top_k * probability)

    def of_leaving(self, layers: np.ndarray | int, touched: Floats) -> Floats:
        """Return what steps would wait for an expert of each layer, in copies of one, if it left.

        Each further bit of a miss is waited for by the share of layers that are saturated then: taken in the middle.
        """
        return np.asarray(self._share(layers, touched / 2) * touched)

    def of_away(self) -> Floats:
        """Return what steps wait for each expert that is away, `layers` and `experts` of it, in copies of one."""
        return np.asarray(self._share(self.layers, -self._touched / 2) * self._touched)

    def leave(self, layer: int, touched: float) -> None:
        """Take into account that an expert has left its layer."""
        self._mean[layer] += touched
        self._variance[layer] += touched * (1 - touched)

    def _sum(self, each: Floats, num_layers: int) -> Floats:
        return np.bincount(self.layers, each, num_layers).astype(np.float64)  # counts of nobody are integers

    def _share(self, layers: np.ndarray | int, more: Floats) -> Floats:
        return Misses(self._mean[layers] + more, self._variance[layers]).saturation(self._room)


class _Nominees:
    """The next expert that each layer would give up, with the layer's room under its limit and its buffer."""

    def __init__(self, snap: Snapshot) -> None:
        self._snap = snap
        self._cold = snap.resident_heat()
        self._slotted = snap.num_slotted.tolist()
        self._depth = snap.buffer_depth.tolist()
        self._waits = _Waits(snap)
        self._ready: list[_Nominee] = []
        """Nominees that free pages at once, a heap."""
        self._waiting: list[list[_Nominee]] = [[] for _ in self._depth]
        """Nominees that would deepen their buffer, by buffer."""
        self._taken: int | None = None
        """The layer that gave the last one; it nominates its next only when another is asked for."""
        experts, rows = self._cold.argmin(axis=1), np.arange(snap.num_layers)
        layers = np.flatnonzero((snap.num_slotted < snap.limit) & np.isfinite(self._cold[rows, experts]))
        for nominee in self._judge(layers, experts[layers]):
            self._enter(nominee)

    def _judge(self, layers: np.ndarray, experts: np.ndarray) -> Iterator[_Nominee]:
        probability = self._snap.probability[layers, experts]
        touched = self._waits.touch(probability)
        waits = self._waits.of_leaving(layers, touched)
        return zip(*(column.tolist() for column in (waits, probability, -experts, layers, touched)), strict=True)

    def _enter(self, nominee: _Nominee) -> None:
        layer = nominee[3]
        buffer = layer % len(self._depth)
        if self._slotted[layer] < self._depth[buffer]:
            heapq.heappush(self._ready, nominee)
        else:
            self._waiting[buffer].append(nominee)

    def _renominate(self, layer: int) -> None:
        if self._slotted[layer] >= self._snap.limit:
            return
        expert = self._cold[layer].argmin()
        if self._cold[layer, expert] < np.inf:
            probability = self._snap.probability[layer, expert]
            touched = self._waits.touch(probability)
            waits = self._waits.of_leaving(layer, touched)
            self._enter((float(waits), float(probability), -int(expert), layer, float(touched)))

    def _deepen(self) -> bool:
        """Add a slot to the buffer whose layers then free pages for the least waiting; False when none frees any."""
        gaining = [b for b, nominees in enumerate(self._waiting) if len(nominees) > 1]  # one eviction pays for the slot
        if not gaining:
            return False
        buffer = min(gaining, key=self._waiting_per_page)
        self._depth[buffer] += 1
        self._ready, self._waiting[buffer] = self._waiting[buffer], []  # none was ready
        heapq.heapify(self._ready)
        return True

    def _waiting_per_page(self, buffer: int) -> tuple[float, int]:
        nominees = self._waiting[buffer]
        return sum(nominee[0] for nominee in nominees) / (len(nominees) - 1), -len(nominees)

    def take(self) -> tuple[ExpertKey, int] | None:
        """Return the next expert to evict and the pages that it costs to have room for it, or None."""
        if self._taken is not None:
            self._renominate(self._taken)
        cost = 0
        if not self._ready:
            if not self._deepen():
                return None
            cost = MATRICES
        _, _, negative, layer, touched = heapq.heappop(self._ready)
        self._waits.leave(layer, touched)
        self._slotted[layer] += 1
        self._cold[layer, -negative] = np.inf
        self._taken = layer
        return ExpertKey(layer, -negative), cost


def choose_evictions(snap: Snapshot, pages: int) -> tuple[ExpertKey, ...] | None:
    """Return experts whose eviction costs least and frees at least `pages` pages net, or None if no set does."""
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
    """Return up to `num` offloaded experts, those waited for most first; layers above the limit come first."""
    if num <= 0:
        return ()
    waits = _Waits(snap)
    first = np.zeros(len(waits.layers), dtype=bool)
    excess = snap.num_offloaded - snap.limit
    if (excess > 0).any():
        heat = snap.offloaded_heat()
        last = np.take_along_axis(np.sort(heat, axis=1)[:, ::-1], np.maximum(excess - 1, 0)[:, None], axis=1)[:, 0]
        first = (heat[waits.layers, waits.experts] >= last[waits.layers]) & (excess[waits.layers] > 0)
    order = np.lexsort((waits.layers, waits.experts, -waits.probability, -waits.of_away(), ~first))[:num]
    return tuple(map(ExpertKey, waits.layers[order].tolist(), waits.experts[order].tolist()))


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
