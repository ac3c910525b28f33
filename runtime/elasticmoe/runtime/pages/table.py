"""The page table: for every expert its pages, and for every expert that is not resident its slot of a loading buffer.

The scheduler owns the true one and drains a PageDelta from it each step; the worker builds an equal one at start.
"""

import numpy as np

from elasticmoe.runtime.pages.changes import Entry, Load, Move, PageDelta, Pages
from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.units import MATRICES, ExpertKey, PageId

OFFLOADED, LOADING, RESIDENT = 0, 1, 2
"""States of an expert: only in host memory, being copied into reserved pages, in pages."""


class PageTable:
    """Each expert is resident, loading or offloaded; each that is not resident has one slot of its layer's buffer.

    Layer l uses loading buffer l mod `loading_depth`. The experts of a layer that hold slots hold slots 0 … n-1, so a
    buffer is as deep as its most offloaded layer, and an eviction that deepens it costs as many pages as it frees.
    """

    def __init__(self, pool: PagePool, num_layers: int, num_experts: int, loading_depth: int) -> None:
        """Start with nothing resident and no buffers; call `place` once."""
        self.pool = pool
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.loading_depth = min(loading_depth, num_layers)
        self.state = np.full((num_layers, num_experts), OFFLOADED, dtype=np.int8)
        self._pages: dict[ExpertKey, Pages] = {}
        self._slotted: list[list[int]] = [[] for _ in range(num_layers)]
        self._num_slotted = np.zeros(num_layers, dtype=np.int64)
        self._buffers: list[list[Pages]] = [[] for _ in range(self.loading_depth)]
        self._owner: dict[PageId, ExpertKey] = {}
        self._dirty: dict[ExpertKey, None] = {}
        self._moves: list[Move] = []
        self._loads: list[Load] = []
        self._loading: list[ExpertKey] = []

    # What is where

    @property
    def num_resident(self) -> int:
        """Return the experts whose weights are in pages."""
        return int((self.state == RESIDENT).sum())

    @property
    def num_loading_pages(self) -> int:
        """Return the pages of the loading buffers."""
        return MATRICES * sum(map(len, self._buffers))

    @property
    def is_loading(self) -> bool:
        """Return whether a load was started and has not landed."""
        return bool(self._loading)

    @property
    def num_movable_huge(self) -> int:
        """Return the lent huge pages that could be emptied: no page of theirs is being copied into."""
        return self.pool.num_lent_huge - len({self.pool.tiers.huge_of_page(page) for page in self._pinned()})

    def num_slotted(self) -> np.ndarray:
        """Return [layers] int64: the experts of each layer that hold a slot."""
        return self._num_slotted.copy()

    def buffer_depth(self) -> np.ndarray:
        """Return [loading_depth] int64: the slots of each loading buffer."""
        return np.fromiter(map(len, self._buffers), dtype=np.int64, count=self.loading_depth)

    def entry(self, key: ExpertKey) -> Entry:
        """Return the row that the worker's table must hold for an expert."""
        if self.state[key] == RESIDENT:
            return Entry(key, self._pages[key], is_resident=True)
        slot = self._slotted[key.layer].index(key.expert)
        return Entry(key, self._buffers[key.layer % self.loading_depth][slot], is_resident=False)

    def entries(self) -> list[Entry]:
        """Return every row, in order of layer and expert."""
        return [self.entry(ExpertKey(n, e)) for n in range(self.num_layers) for e in range(self.num_experts)]

    # Changes

    def place(self, ranking: np.ndarray, offloaded: int) -> None:
        """Place experts at start: in each layer the first num_experts - offloaded of the ranking become resident.

        `ranking` is [layers, experts] int, hottest first.
        """
        keep = self.num_experts - offloaded
        for buffer in self._buffers:
            buffer.extend(self._take() for _ in range(offloaded))
        for layer, order in enumerate(ranking.tolist()):
            for expert in order[:keep]:
                self._settle(ExpertKey(layer, expert), self._take(), RESIDENT)
            self._slotted[layer].extend(order[keep:])
        self._num_slotted += offloaded

    def evict(self, key: ExpertKey) -> None:
        """Free the pages of a resident expert and give it a slot, deepening its buffer if it must."""
        assert self.state[key] == RESIDENT, f"{key} evicted but not resident"
        self._give(self._pages.pop(key))
        self.state[key] = OFFLOADED
        slotted, buffer = self._slotted[key.layer], self._buffers[key.layer % self.loading_depth]
        slotted.append(key.expert)
        self._num_slotted[key.layer] += 1
        if len(slotted) > len(buffer):
            buffer.append(self._take())
        self._dirty[key] = None

    def load(self, key: ExpertKey) -> None:
        """Reserve pages for an offloaded expert and have it copied there; it keeps its slot until `land`."""
        assert self.state[key] == OFFLOADED, f"{key} loaded but not offloaded"
        pages = self._take()
        self._settle(key, pages, LOADING)
        self._loads.append(Load(key, pages))
        self._loading.append(key)

    def land(self) -> None:
        """Make every expert resident whose copy was sent with an earlier step, and free the slots."""
        landed, self._loading = self._loading, []
        for key in landed:
            self.state[key] = RESIDENT
            self._dirty[key] = None
            self._free_slot(key)

    def vacate(self) -> bool:
        """Move owned pages so that one more huge page is wholly free; return whether that could be done."""
        moves = self.pool.plan_vacate(self._pinned())
        for move in moves:
            self._relocate(move)
        return bool(moves)

    def drain(self) -> PageDelta:
        """Return what the worker has to apply since the last call, and forget it."""
        delta = PageDelta(tuple(self._moves), tuple(map(self.entry, self._dirty)), tuple(self._loads))
        self._moves, self._dirty, self._loads = [], {}, []
        return delta

    # Inside

    def _pinned(self) -> set[PageId]:
        return {page for key in self._loading for page in self._pages[key]}

    def _take(self) -> Pages:
        w1, w3, w2 = self.pool.take_pages(MATRICES)
        return w1, w3, w2

    def _give(self, pages: Pages) -> None:
        for page in pages:
            self._owner.pop(page, None)
        self.pool.give_pages(pages)

    def _settle(self, key: ExpertKey, pages: Pages, state: int) -> None:
        self._pages[key] = pages
        self._owner.update(dict.fromkeys(pages, key))
        self.state[key] = state

    def _free_slot(self, key: ExpertKey) -> None:
        """Take an expert off its slot; the layer's last slot moves into the gap, an unused last slot is freed."""
        slotted, index = self._slotted[key.layer], key.layer % self.loading_depth
        slot = slotted.index(key.expert)
        last = slotted.pop()
        self._num_slotted[key.layer] -= 1
        if last != key.expert:
            slotted[slot] = last
            self._dirty[ExpertKey(key.layer, last)] = None
        if len(slotted) + 1 < len(self._buffers[index]):
            return  # another layer needs the last slot
        deepest = max(map(len, self._slotted[index :: self.loading_depth]))
        while len(self._buffers[index]) > deepest:
            self._give(self._buffers[index].pop())

    def _relocate(self, move: Move) -> None:
        """Hand a page's content and owner over to another page; slots hold nothing between steps, so aren't copied."""
        self.pool.move_page(move)
        key = self._owner.pop(move.src, None)
        if key is None:
            self._relocate_slot(move)
            return
        self._owner[move.dst] = key
        self._pages[key] = _replaced(self._pages[key], move)
        self._moves.append(move)
        self._dirty[key] = None

    def _relocate_slot(self, move: Move) -> None:
        for index, buffer in enumerate(self._buffers):
            for slot, pages in enumerate(buffer):
                if move.src in pages:
                    buffer[slot] = _replaced(pages, move)
                    users = range(index, self.num_layers, self.loading_depth)
                    held = [ExpertKey(n, s[slot]) for n in users if len(s := self._slotted[n]) > slot]
                    self._dirty.update(dict.fromkeys(held))

    def check_integrity(self) -> None:
        """Raise AssertionError with the arithmetic unless pages, slots and states agree."""
        self.pool.check_integrity()
        owned = [p for pages in self._pages.values() for p in pages]
        owned += [p for buffer in self._buffers for pages in buffer for p in pages]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert len(owned) == self.pool.num_owned_pages, f"{len(owned)} pages known, {self.pool.num_owned_pages} owned"
        owner = {page: key for key, pages in self._pages.items() for page in pages}
        assert owner == self._owner, f"pages by owner differ: {owner.items() ^ self._owner.items()}"
        reserved = {ExpertKey(*key) for key in np.argwhere(self.state != OFFLOADED).tolist()}
        assert reserved == set(self._pages), f"experts with pages of their own differ: {reserved ^ set(self._pages)}"
        loading = {ExpertKey(*key) for key in np.argwhere(self.state == LOADING).tolist()}
        assert loading == set(self._loading), f"experts being loaded differ: {loading ^ set(self._loading)}"
        for index, buffer in enumerate(self._buffers):
            deepest = max(map(len, self._slotted[index :: self.loading_depth]))
            assert len(buffer) == deepest, f"buffer {index} has {len(buffer)} slots for {deepest} experts"
        for layer, slotted in enumerate(self._slotted):
            waiting = np.flatnonzero(self.state[layer] != RESIDENT).tolist()
            assert sorted(slotted) == waiting, f"layer {layer}: slots of {slotted}, not resident {waiting}"
            num = self._num_slotted[layer]
            assert len(slotted) == num, f"layer {layer}: {len(slotted)} experts hold slots, counted {num}"


def _replaced(pages: Pages, move: Move) -> Pages:
    w1, w3, w2 = (move.dst if page == move.src else page for page in pages)
    return w1, w3, w2
