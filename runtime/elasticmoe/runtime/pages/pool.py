"""The page pool: which huge pages KV holds and which are split into expert pages, and what is free in each.

The engine's block pool reports every block that KV takes or frees; the page table takes and gives expert pages.
Never touches memory: it deals in ids only.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import islice
from typing import Protocol, cast

from elasticmoe.runtime.errors import OutOfPagesError
from elasticmoe.runtime.pages.changes import Move
from elasticmoe.runtime.pages.lent import LentPages
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import BlockId, HugeId, PageId, ceil_div


class BlockState(IntEnum):
    """Where one block is."""

    USED = 0
    PLAIN = 1
    """Free, holds nothing worth keeping."""
    CACHED = 2
    """Free, but holds a prefix that a request may hit."""
    LENT = 3
    """Under expert pages."""


class BlockPort(Protocol):
    """The KV side of the pool, told when blocks change tiers."""

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Take these free blocks out of KV; cached ones lose their hash."""

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Return these blocks to KV, plain and free."""


SPLIT, WHOLE_PLAIN, WHOLE_CACHED, WHOLE_MIXED = 1, 2, 4, 8
"""Lines that a KV huge page can stand in: partly used with plain blocks free; wholly free with no, some or only cached
blocks (WHOLE_CACHED is both of these); of the latter those with plain blocks too."""


class PagePool:
    """Every block is used, free or lent; every expert page of a lent huge page is owned or free; nothing is both.

    Huge page 0 (it holds vLLM's null block) and the blocks past the last whole huge page stay with KV for good.
    """

    def __init__(self, tiers: Tiers, num_blocks: int, port: BlockPort) -> None:
        """Start with every block free and plain in KV, but for the null block."""
        self.tiers = tiers
        self.num_blocks = num_blocks
        self.num_huge = num_blocks // tiers.blocks_per_huge
        self._port = port
        self._state = bytearray([BlockState.PLAIN]) * num_blocks
        self._state[0] = BlockState.USED
        groups = [HugeId(h) for h in range(ceil_div(num_blocks, tiers.blocks_per_huge))]
        self._plain = [dict.fromkeys(b for b in self._blocks_of(h) if 0 < b < num_blocks) for h in groups]
        self._num_cached = [0] * len(groups)
        self._num_free_blocks = num_blocks - 1
        self._lines = {n: OrderedDict[HugeId, None]() for n in (SPLIT, WHOLE_PLAIN, WHOLE_CACHED, WHOLE_MIXED)}
        self._lines_of = bytearray(len(groups))
        self._lent = LentPages(tiers)
        self._all_plain = bytes([BlockState.PLAIN]) * tiers.blocks_per_huge
        self._all_lent = bytes([BlockState.LENT]) * tiers.blocks_per_huge
        for huge in groups:
            self._line_up(huge)

    def is_lendable(self, huge: HugeId) -> bool:
        """Return whether the huge page may ever hold experts."""
        return 0 < huge < self.num_huge

    # What is free

    @property
    def num_free_pages(self) -> int:
        """Return F_b: expert pages that could be taken now, cached prefixes given up."""
        return self.num_whole * self.tiers.pages_per_huge + self._lent.num_free

    @property
    def num_free_split_pages(self) -> int:
        """Return the free expert pages of huge pages that also hold owned ones."""
        return self._lent.num_free

    @property
    def num_whole(self) -> int:
        """Return the KV huge pages that are wholly free."""
        return len(self._lines[WHOLE_PLAIN]) + len(self._lines[WHOLE_CACHED])

    @property
    def num_free_blocks(self) -> int:
        """Return the blocks that KV could take now."""
        return self._num_free_blocks

    @property
    def num_lent_huge(self) -> int:
        """Return the huge pages that experts hold."""
        return len(self._lent)

    @property
    def num_lent_blocks(self) -> int:
        """Return the blocks under expert pages."""
        return len(self._lent) * self.tiers.blocks_per_huge

    @property
    def num_owned_pages(self) -> int:
        """Return the expert pages that somebody owns."""
        return self._lent.num_owned

    @property
    def num_trapped_blocks(self) -> int:
        """Return the free blocks whose huge page can't merge because of live neighbours."""
        return self._num_free_blocks - self.num_whole * self.tiers.blocks_per_huge

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of lent huge pages past their last expert page."""
        return len(self._lent) * (self.tiers.huge_bytes - self.tiers.pages_per_huge * self.tiers.expert_bytes)

    # KV side

    def use_block(self, block: BlockId) -> None:
        """Record that KV took a free block."""
        self._leave_free(block)
        self._state[block] = BlockState.USED
        self._num_free_blocks -= 1
        self._line_up(self.tiers.huge_of_block(block))

    def free_block(self, block: BlockId, *, is_cached: bool) -> None:
        """Record that KV freed a block."""
        state = BlockState(self._state[block])
        assert block, "block 0 is the null block, which nobody may free"
        assert state == BlockState.USED, f"block {block} freed while {state.name}"
        self._num_free_blocks += 1
        self._enter_free(block, is_cached=is_cached)
        self._line_up(self.tiers.huge_of_block(block))

    def uncache_block(self, block: BlockId) -> None:
        """Record that a block lost its prefix hash; no news unless it is free."""
        if self._state[block] == BlockState.CACHED:
            self._leave_free(block)
            self._enter_free(block, is_cached=False)
            self._line_up(self.tiers.huge_of_block(block))

    def pick_plain(self, num: int, near: HugeId | None) -> list[BlockId]:
        """Return up to num plain free blocks: the request's own huge page first, then split ones, then whole ones."""
        picked = [] if near is None else list(islice(self._plain[near], num))
        for line in (SPLIT, WHOLE_PLAIN, WHOLE_MIXED):
            for huge in self._lines[line]:
                if len(picked) >= num:
                    return picked
                if huge != near:
                    picked += islice(self._plain[huge], num - len(picked))
        return picked

    # Experts' side

    def take_pages(self, num: int) -> list[PageId]:
        """Take expert pages: free ones of split huge pages first, then whole huge pages, plain before cached.

        All or nothing: raises OutOfPagesError when fewer are free.
        """
        if num > self.num_free_pages:
            message = f"need {num} expert pages, {self.num_free_pages} free of {self.num_huge} huge pages"
            raise OutOfPagesError(message)
        taken: list[PageId] = []
        while len(taken) < num:
            if self._lent.num_free:
                taken += self._lent.take(num - len(taken))
            elif num - len(taken) < self.tiers.pages_per_huge:
                self._lent.lend(self._lend_huge())
            else:
                taken += self._lent.lend_owned(self._lend_huge())
        return taken

    def give_pages(self, pages: Iterable[PageId]) -> None:
        """Free expert pages; a huge page with none left goes back to KV at once."""
        for page in pages:
            if huge := self._lent.give(page):  # huge page 0 is never lent
                self._merge(huge)

    def plan_vacate(self, pinned: set[PageId]) -> list[Move]:
        """Return the fewest moves that empty one lent huge page into free pages of others, or none if that can't be.

        `pinned` pages stay where they are.
        """
        return self._lent.plan_vacate(pinned)

    def move_page(self, move: Move) -> None:
        """Hand ownership of one page over to a free page of another split huge page."""
        self._lent.own(move.dst)
        self.give_pages([move.src])

    # Inside

    def _blocks_of(self, huge: HugeId) -> Sequence[BlockId]:
        return cast("Sequence[BlockId]", self.tiers.blocks_of(huge))

    def _put(self, huge: HugeId, states: bytes) -> Sequence[BlockId]:
        """Put all blocks of a huge page into these states; return them."""
        blocks = self.tiers.blocks_of(huge)
        self._state[blocks.start : blocks.stop] = states
        return cast("Sequence[BlockId]", blocks)

    def _lend_huge(self) -> HugeId:
        """Take a whole huge page from KV, and return it: the last plain one to become whole, else the oldest cached."""
        if plain := self._lines[WHOLE_PLAIN]:
            huge, _ = plain.popitem()
        else:
            huge, _ = self._lines[WHOLE_CACHED].popitem(last=False)
            self._lines[WHOLE_MIXED].pop(huge, None)
            self._num_cached[huge] = 0
        self._lines_of[huge] = 0
        blocks = self._put(huge, self._all_lent)
        self._plain[huge] = {}
        self._num_free_blocks -= len(blocks)
        self._port.lend(blocks)
        return huge

    def _merge(self, huge: HugeId) -> None:
        """Move a huge page whose expert pages are all free back to KV."""
        blocks = self._put(huge, self._all_plain)
        self._plain[huge] = dict.fromkeys(blocks)
        self._num_free_blocks += len(blocks)
        self._lines[WHOLE_PLAIN][huge] = None
        self._lines_of[huge] = WHOLE_PLAIN
        self._port.give_back(blocks)

    def _leave_free(self, block: BlockId) -> None:
        huge = self.tiers.huge_of_block(block)
        if self._state[block] == BlockState.PLAIN:
            del self._plain[huge][block]
            return
        state = BlockState(self._state[block])
        assert state == BlockState.CACHED, f"block {block} is {state.name}, not free"
        self._num_cached[huge] -= 1

    def _enter_free(self, block: BlockId, *, is_cached: bool) -> None:
        huge = self.tiers.huge_of_block(block)
        self._state[block] = BlockState.CACHED if is_cached else BlockState.PLAIN
        if is_cached:
            self._num_cached[huge] += 1
        else:
            self._plain[huge][block] = None

    def _fitting_lines(self, huge: HugeId) -> int:
        cached, plain = self._num_cached[huge], len(self._plain[huge])
        if cached + plain < self.tiers.blocks_per_huge or not self.is_lendable(huge):
            return SPLIT if plain else 0
        if not cached:
            return WHOLE_PLAIN
        return WHOLE_CACHED | WHOLE_MIXED if plain else WHOLE_CACHED

    def _line_up(self, huge: HugeId) -> None:
        """Put a huge page into the lines that fit it now; it keeps its place in those that it stays in."""
        lines = self._fitting_lines(huge)
        changed = lines ^ self._lines_of[huge]
        if not changed:
            return
        self._lines_of[huge] = lines
        for line, members in self._lines.items():
            if changed & lines & line:
                members[huge] = None
            elif changed & line:
                del members[huge]

    def check_integrity(self) -> None:
        """Raise AssertionError with the arithmetic unless every block and page has exactly one owner."""
        self._lent.check_integrity()
        num = {state: self._state.count(state) for state in BlockState}
        free = num[BlockState.PLAIN] + num[BlockState.CACHED]
        assert free == self._num_free_blocks, f"{free} blocks free, counted {self._num_free_blocks}"
        lent = self.num_lent_blocks
        assert num[BlockState.LENT] == lent, f"{num[BlockState.LENT]} blocks lent, under expert pages {lent}"
        for huge in map(HugeId, range(len(self._plain))):
            self._check_huge(huge)

    def _check_huge(self, huge: HugeId) -> None:
        blocks = [b for b in self._blocks_of(huge) if b < self.num_blocks]
        states = [self._state[b] for b in blocks]
        plain = {b for b, state in zip(blocks, states, strict=True) if state == BlockState.PLAIN}
        assert plain == set(self._plain[huge]), f"huge page {huge}: plain {plain}, listed {set(self._plain[huge])}"
        cached = states.count(BlockState.CACHED)
        assert cached == self._num_cached[huge], f"huge page {huge}: {cached} cached, counted {self._num_cached[huge]}"
        lines = sum(line for line, members in self._lines.items() if huge in members)
        assert lines == self._fitting_lines(huge) == self._lines_of[huge], f"huge page {huge} in lines {lines}"
        is_lent = set(states) == {BlockState.LENT}
        assert (huge in self._lent) == is_lent, f"huge page {huge} is partly lent: {states}"
