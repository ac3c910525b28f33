"""The page pool: which huge pages KV holds and which are split into expert pages, and what is free in each.

The engine's block pool reports every block that KV takes or frees; the page table takes and gives expert pages.
Never touches memory: it deals in ids only.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from elasticmoe.runtime.errors import OutOfPagesError
from elasticmoe.runtime.pages.changes import Move
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import BlockId, HugeId, PageId


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
        groups = -(-num_blocks // tiers.blocks_per_huge)
        self._plain = [self._all_blocks(HugeId(h)) for h in range(groups)]
        self._plain[0].discard(BlockId(0))
        self._num_cached = [0] * groups
        self._num_free_blocks = num_blocks - 1
        self._split = dict.fromkeys(h for h in map(HugeId, (0, groups - 1)) if not self.is_lendable(h))
        self._whole_plain = dict.fromkeys(map(HugeId, range(1, self.num_huge)))
        self._whole_cached: dict[HugeId, None] = {}
        self._free_pages: dict[HugeId, set[PageId]] = {}
        self._num_free_split_pages = 0
        self._lent: set[HugeId] = set()

    def _all_blocks(self, huge: HugeId) -> set[BlockId]:
        return {BlockId(b) for b in self.tiers.blocks_of(huge) if b < self.num_blocks}

    def is_lendable(self, huge: HugeId) -> bool:
        """Return whether the huge page may ever hold experts."""
        return 0 < huge < self.num_huge

    # What is free

    @property
    def num_free_pages(self) -> int:
        """Return F_b: expert pages that could be taken now, cached prefixes given up."""
        return self.num_whole * self.tiers.pages_per_huge + self._num_free_split_pages

    @property
    def num_free_split_pages(self) -> int:
        """Return the free expert pages of huge pages that also hold owned ones."""
        return self._num_free_split_pages

    @property
    def num_whole(self) -> int:
        """Return the KV huge pages that are wholly free."""
        return len(self._whole_plain) + len(self._whole_cached)

    @property
    def num_free_blocks(self) -> int:
        """Return the blocks that KV could take now."""
        return self._num_free_blocks

    @property
    def num_lent_blocks(self) -> int:
        """Return the blocks under expert pages."""
        return len(self._lent) * self.tiers.blocks_per_huge

    @property
    def num_owned_pages(self) -> int:
        """Return the expert pages that somebody owns."""
        return len(self._lent) * self.tiers.pages_per_huge - self._num_free_split_pages

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
        self._classify(self.tiers.huge_of_block(block))

    def free_block(self, block: BlockId, *, is_cached: bool) -> None:
        """Record that KV freed a block."""
        if self._state[block] != BlockState.USED:
            message = f"block {block} freed while {BlockState(self._state[block]).name}"
            raise AssertionError(message)
        self._num_free_blocks += 1
        self._enter_free(block, is_cached=is_cached)
        self._classify(self.tiers.huge_of_block(block))

    def uncache_block(self, block: BlockId) -> None:
        """Record that a block lost its prefix hash; no news unless it is free."""
        if self._state[block] == BlockState.CACHED:
            self._leave_free(block)
            self._enter_free(block, is_cached=False)
            self._classify(self.tiers.huge_of_block(block))

    def pick_plain(self, num: int, near: HugeId | None) -> list[BlockId]:
        """Return up to num plain free blocks: the request's own huge page first, then split ones, then whole ones."""
        picked: list[BlockId] = []
        pools: list[Iterable[HugeId]] = [self._split, self._whole_plain, self._whole_cached]
        if near is not None and near not in self._lent:
            pools.insert(0, (near,))
        seen: set[HugeId] = set()
        for huge in (h for pool in pools for h in pool):
            if len(picked) >= num:
                break
            if huge not in seen:
                seen.add(huge)
                picked += sorted(self._plain[huge])[: num - len(picked)]
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
            huge = min(self._free_pages, key=self._fullness, default=None)
            free = self._free_pages[huge] if huge is not None else self._lend_huge()
            chosen = sorted(free)[: num - len(taken)]
            for page in chosen:
                self._own(page)
            taken += chosen
        return taken

    def give_pages(self, pages: Iterable[PageId]) -> None:
        """Free expert pages; a huge page with none left goes back to KV at once."""
        for page in pages:
            huge = self.tiers.huge_of_page(page)
            free = self._free_pages.setdefault(huge, set())
            if huge not in self._lent or page in free:
                message = f"expert page {page} freed but nobody owns it"
                raise AssertionError(message)
            free.add(page)
            self._num_free_split_pages += 1
            if len(free) == self.tiers.pages_per_huge:
                self._merge(huge)

    def plan_vacate(self, pinned: set[PageId]) -> list[Move]:
        """Return moves that empty the fullest-to-move huge page into free pages of others, or none if that can't be.

        `pinned` pages stay where they are.
        """
        for huge in sorted(self._free_pages, key=self._fullness, reverse=True):
            owned = [p for p in map(PageId, self.tiers.pages_of(huge)) if p not in self._free_pages[huge]]
            others = [p for h, free in self._free_pages.items() if h != huge for p in sorted(free)]
            if len(owned) <= len(others) and pinned.isdisjoint(owned):
                return [Move(src, dst) for src, dst in zip(owned, others, strict=False)]
        return []

    def move_page(self, move: Move) -> None:
        """Hand ownership of one page over to a free page of another split huge page."""
        self._own(move.dst)
        self.give_pages([move.src])

    # Inside

    def _fullness(self, huge: HugeId) -> tuple[int, int]:
        return len(self._free_pages[huge]), huge

    def _own(self, page: PageId) -> None:
        huge = self.tiers.huge_of_page(page)
        self._free_pages[huge].remove(page)
        self._num_free_split_pages -= 1
        if not self._free_pages[huge]:
            del self._free_pages[huge]

    def _lend_huge(self) -> set[PageId]:
        """Move one whole huge page from KV to experts, all its pages free."""
        if self._whole_plain:
            huge = self._whole_plain.popitem()[0]
        else:
            huge = next(iter(self._whole_cached))
            del self._whole_cached[huge]
        blocks = [BlockId(b) for b in self.tiers.blocks_of(huge)]
        self._plain[huge].clear()
        self._num_cached[huge] = 0
        self._num_free_blocks -= len(blocks)
        for block in blocks:
            self._state[block] = BlockState.LENT
        self._lent.add(huge)
        self._free_pages[huge] = {PageId(p) for p in self.tiers.pages_of(huge)}
        self._num_free_split_pages += self.tiers.pages_per_huge
        self._port.lend(blocks)
        return self._free_pages[huge]

    def _merge(self, huge: HugeId) -> None:
        """Move a huge page whose expert pages are all free back to KV."""
        del self._free_pages[huge]
        self._num_free_split_pages -= self.tiers.pages_per_huge
        self._lent.remove(huge)
        blocks = [BlockId(b) for b in self.tiers.blocks_of(huge)]
        for block in blocks:
            self._state[block] = BlockState.PLAIN
        self._plain[huge].update(blocks)
        self._num_free_blocks += len(blocks)
        self._whole_plain[huge] = None
        self._port.give_back(blocks)

    def _leave_free(self, block: BlockId) -> None:
        huge = self.tiers.huge_of_block(block)
        state = self._state[block]
        if state == BlockState.PLAIN:
            self._plain[huge].remove(block)
        elif state == BlockState.CACHED:
            self._num_cached[huge] -= 1
        else:
            message = f"block {block} is {BlockState(state).name}, not free"
            raise AssertionError(message)

    def _enter_free(self, block: BlockId, *, is_cached: bool) -> None:
        huge = self.tiers.huge_of_block(block)
        self._state[block] = BlockState.CACHED if is_cached else BlockState.PLAIN
        if is_cached:
            self._num_cached[huge] += 1
        else:
            self._plain[huge].add(block)

    def _classify(self, huge: HugeId) -> None:
        """Put a KV huge page under the one heading that fits it; a whole one keeps its place in line."""
        cached, plain = self._num_cached[huge], len(self._plain[huge])
        is_whole = self.is_lendable(huge) and cached + plain == self.tiers.blocks_per_huge
        for heading, fits in (
            (self._split, plain > 0 and not is_whole),
            (self._whole_plain, is_whole and not cached),
            (self._whole_cached, is_whole and cached > 0),
        ):
            if fits:
                heading.setdefault(huge, None)
            else:
                heading.pop(huge, None)

    def check_integrity(self) -> None:
        """Raise AssertionError with the arithmetic unless every block and page has exactly one owner."""
        free = sum(s in (BlockState.PLAIN, BlockState.CACHED) for s in self._state)
        lent = sum(s == BlockState.LENT for s in self._state)
        assert free == self._num_free_blocks, f"{free} blocks free, counted {self._num_free_blocks}"
        assert lent == self.num_lent_blocks, f"{lent} blocks lent, {len(self._lent)} huge pages lent"
        assert sum(map(len, self._plain)) + sum(self._num_cached) == free, "plain and cached blocks don't sum to free"
        split = sum(map(len, self._free_pages.values()))
        assert split == self._num_free_split_pages, f"{split} pages free, counted {self._num_free_split_pages}"
        assert all(0 < len(f) < self.tiers.pages_per_huge for f in self._free_pages.values()), "an unmerged huge page"
        for huge in range(1, self.num_huge):
            states = {self._state[b] for b in self.tiers.blocks_of(HugeId(huge))}
            is_whole = states <= {BlockState.PLAIN, BlockState.CACHED}
            assert is_whole == (huge in self._whole_plain or huge in self._whole_cached), f"huge page {huge}: {states}"
            assert (huge in self._lent) == (states == {BlockState.LENT}), f"huge page {huge} is partly lent"
