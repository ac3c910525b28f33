"""Which experts go and which come: layers nominate, the nominee that is waited for least (most) is taken.

Each layer nominates its coldest expert. A step waits for it as often as it is routed to, where the layer misses more
than it hides already: so layers that hide more give first, and only of equals the coldest one.

Amounts are net of loading buffers: an eviction that deepens its layer's buffer frees nothing by itself. One numpy pass
judges the nominees of all layers that free pages at once, and one more those that would deepen a buffer, if they must.
"""

import heapq
from typing import Any

import numpy as np

from elasticmoe.runtime.adjuster.misses import Floats, Misses, touched_share
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.changes import Swap
from elasticmoe.runtime.pages.table import OFFLOADED, RESIDENT
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
        self._tokens = float(max(1, snap.num_running))
        self._room = float(snap.fit.room(self._tokens))
        self.away = (snap.state == OFFLOADED).ravel().nonzero()[0]
        """Experts that are away, numbered through all layers."""
        self.layers = self.away // snap.num_experts
        """Theirs."""
        self._touched = self.touch(snap.spared.take(self.away))
        self._mean = self._sum(self._touched, snap.num_layers)
        self._variance = self._sum(self._touched * (1.0 - self._touched), snap.num_layers)

    def touch(self, spared: Floats) -> Floats:
        """Return the chance that a step is routed to experts, by the snapshot's logs of what a token spares."""
        return touched_share(self._tokens, spared)

    def of_leaving(self, layers: np.ndarray, touched: Floats) -> Floats:
        """Return what steps would wait for an expert of each layer, in copies of one, if it left.

        Each further bit of a miss is waited for by the share of layers that are saturated then: taken in the middle.
        """
        waits: Floats = self._share(layers, touched / 2.0) * touched
        return waits

    def of_away(self) -> Floats:
        """Return what steps wait for each expert that is away, in copies of one."""
        return np.asarray(self._share(self.layers, self._touched / -2.0) * self._touched)

    def leave(self, layer: int, touched: float) -> None:
        """Take into account that an expert has left its layer."""
        self._mean[layer] += touched
        self._variance[layer] += touched * (1 - touched)

    def _sum(self, each: Floats, num_layers: int) -> Floats:
        return np.bincount(self.layers, each, num_layers).astype(np.float64)  # counts of nobody are integers

    def _share(self, layers: np.ndarray, more: Floats) -> Floats:
        return Misses(self._mean.take(layers) + more, self._variance.take(layers)).saturation(self._room)


class _Nominees:
    """The next expert that each layer would give up, judged only once its leaving could free pages."""

    def __init__(self, snap: Snapshot) -> None:
        self._snap = snap
        self._limit = min(snap.limit, snap.num_experts)
        self._state = snap.state.copy()
        self._slotted = snap.num_slotted.tolist()
        self._depth = snap.buffer_depth.tolist()
        self._waits = _Waits(snap)
        ready: list[int] = []
        self._waiting: list[int] = []
        """Layers whose next expert would deepen their buffer."""
        num_buffers = len(self._depth)
        for layer, slotted in enumerate(self._slotted):
            if slotted < self._limit:
                (ready if slotted < self._depth[layer % num_buffers] else self._waiting).append(layer)
        self._ready = self._nominate(ready)
        """Nominees that free pages at once, a heap."""
        self._taken: int | None = None
        """The layer that gave the last one; it nominates its next only when another is asked for."""
        heapq.heapify(self._ready)

    def _nominate(self, layers: list[int]) -> list[_Nominee]:
        return list(zip(*self._judge(np.array(layers)), strict=True)) if layers else []

    def _judge(self, layers: np.ndarray) -> tuple[Any, ...]:
        """Return the columns of these layers' nominees, or of one layer, of shape (), the nominee."""
        snap, state = self._snap, self._state.take(layers, axis=0)
        heat = np.where(state == RESIDENT, snap.heat.take(layers, axis=0), np.inf)
        experts = heat.argmin(axis=-1)
        places = layers * snap.num_experts + experts
        touched = self._waits.touch(snap.spared.take(places))
        columns = self._waits.of_leaving(layers, touched), snap.probability.take(places), -experts, layers, touched
        return tuple(column.tolist() for column in columns)

    def _renominate(self, layer: int) -> None:
        if self._slotted[layer] >= self._limit:
            return
        if self._slotted[layer] < self._depth[layer % len(self._depth)]:
            heapq.heappush(self._ready, self._judge(np.array(layer)))
        else:
            self._waiting.append(layer)

    def _deepen(self) -> bool:
        """Add a slot to the buffer whose layers then free pages for the least waiting; False when none frees any."""
        by_buffer: list[list[_Nominee]] = [[] for _ in self._depth]
        for nominee in self._nominate(self._waiting):
            by_buffer[nominee[3] % len(self._depth)].append(nominee)
        gaining = [b for b, nominees in enumerate(by_buffer) if len(nominees) > 1]  # one eviction pays for the slot
        if not gaining:
            return False
        buffer = min(gaining, key=lambda b: _waiting_per_page(by_buffer[b]))
        self._depth[buffer] += 1
        self._ready = by_buffer[buffer]  # none was ready
        self._waiting = [layer for layer in self._waiting if layer % len(self._depth) != buffer]
        heapq.heapify(self._ready)
        return True

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
        self._state[layer, -negative] = OFFLOADED
        self._taken = layer
        return ExpertKey(layer, -negative), cost


def _waiting_per_page(nominees: list[_Nominee]) -> tuple[float, int]:
    """Return what each page costs if all of these leave for one slot more, and of equals the buffer that has most."""
    return sum(nominee[0] for nominee in nominees) / (len(nominees) - 1), -len(nominees)


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
        first = (heat.ravel()[waits.away] >= last[waits.layers]) & (excess[waits.layers] > 0)
    experts, probability = waits.away % snap.num_experts, snap.probability.ravel()[waits.away]
    order = np.lexsort((waits.layers, experts, -probability, -waits.of_away(), ~first))[:num]
    return tuple(map(ExpertKey, waits.layers[order].tolist(), experts[order].tolist()))


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
    layers = pays.nonzero()[0]
    if not layers.size:
        return ()
    order = np.argsort((leaves - comes)[layers], kind="stable")
    depth, free = snap.buffer_depth.tolist(), snap.free_pages
    swaps: list[Swap] = []
    for layer in layers[order].tolist():
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
