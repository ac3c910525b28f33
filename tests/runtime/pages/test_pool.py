"""The page pool: which huge pages KV holds, which experts hold, and which is taken first."""

import pytest

from elasticmoe.runtime.errors import OutOfPagesError
from elasticmoe.runtime.pages.changes import Move
from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers
from elasticmoe.runtime.units import BlockId, HugeId, PageId
from tests.fakes.block_port import FakeBlockPort

TWO_BLOCKS_A_PAGE = fit_tiers(64, 32)  # k = 1, m = 2
THREE_PAGES = Tiers(expert_bytes=32, block_bytes=48, raw_block_bytes=48, pages_per_huge=3, blocks_per_huge=2)
PADDED = Tiers(expert_bytes=96, block_bytes=80, raw_block_bytes=64, pages_per_huge=2, blocks_per_huge=3)  # H = 240


class Fixture:
    """A pool and its fake KV side."""

    def __init__(self, tiers: Tiers, num_blocks: int) -> None:
        """Start with every block free and plain."""
        self.port = FakeBlockPort(num_blocks)
        self.pool = PagePool(tiers, num_blocks, self.port)

    def use(self, *blocks: int) -> None:
        """Have a request take blocks."""
        for block in map(BlockId, blocks):
            self.pool.use_block(block)
            self.port.use(block)

    def let_go(self, *blocks: int, is_cached: bool = False) -> None:
        """Have a request free blocks."""
        for block in map(BlockId, blocks):
            self.pool.free_block(block, is_cached=is_cached)
            self.port.let_go(block, is_cached=is_cached)

    def cache(self, *blocks: int) -> None:
        """Make free blocks hold a prefix."""
        self.use(*blocks)
        self.let_go(*blocks, is_cached=True)


def test_the_null_block_and_the_tail_stay_with_kv() -> None:
    """Of 9 blocks in huge pages of 2, huge page 0 and the ninth block are never lent: 3 pages can be taken."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 9)
    assert (f.pool.num_free_blocks, f.pool.num_free_pages) == (8, 3)
    assert [f.pool.is_lendable(HugeId(h)) for h in range(5)] == [False, True, True, True, False]
    f.pool.take_pages(3)
    assert f.port.lent == {2, 3, 4, 5, 6, 7}
    f.pool.check_integrity()


def test_a_huge_page_is_lent_whole() -> None:
    """One expert page of three takes all blocks of its huge page out of KV, and the two others are free for experts."""
    f = Fixture(THREE_PAGES, 8)
    assert f.pool.take_pages(1) == [9]
    assert f.port.lent == {6, 7}
    assert (f.pool.num_lent_huge, f.pool.num_lent_blocks, f.pool.num_free_split_pages) == (1, 2, 2)
    assert f.pool.num_free_pages == 2 * 3 + 2


def test_split_huge_pages_are_filled_before_a_whole_one_is_split() -> None:
    """The free pages of already split huge pages are taken first, of the fullest first of all."""
    f = Fixture(THREE_PAGES, 10)
    nine = f.pool.take_pages(9)
    f.pool.give_pages([nine[0], nine[1], nine[3]])
    assert f.pool.take_pages(2) == [nine[3], nine[0]]
    assert f.pool.num_lent_huge == 3


def test_experts_take_plain_huge_pages_before_cached_ones() -> None:
    """A huge page with a cached prefix is lent only when no plain one is left."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 8)
    f.cache(6)
    f.pool.take_pages(2)
    assert f.port.lost == set()
    f.pool.take_pages(1)
    assert f.port.lost == {6}


def test_of_cached_huge_pages_the_oldest_is_lent_first() -> None:
    """Prefixes are given up in the order in which their huge page became wholly free."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 8)
    f.cache(4, 2, 6)
    f.use(4)
    f.let_go(4, is_cached=True)  # touched: the youngest now
    f.pool.take_pages(1)
    assert f.port.lost == {2}


def test_a_used_block_keeps_its_huge_page_from_experts() -> None:
    """A free block beside a used one is trapped: free for KV, not for experts."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 6)
    f.use(2)
    assert f.pool.num_free_pages == 1
    assert f.pool.num_trapped_blocks == 2  # block 3, and block 1 beside the null block
    assert f.pool.num_free_blocks == 4


def test_a_huge_page_without_owned_pages_goes_back_to_kv() -> None:
    """The last expert page that is freed merges its huge page into plain blocks at once."""
    f = Fixture(THREE_PAGES, 4)
    pages = f.pool.take_pages(3)
    f.pool.give_pages(pages[:2])
    assert f.port.lent == {2, 3}
    f.pool.give_pages(pages[2:])
    assert f.port.plain == {1, 2, 3}
    assert (f.pool.num_lent_huge, f.pool.num_owned_pages, f.pool.num_free_pages) == (0, 0, 3)
    f.pool.check_integrity()


def test_taking_too_many_pages_changes_nothing() -> None:
    """All or nothing: with 6 pages free, 7 raise an error that has both numbers."""
    f = Fixture(THREE_PAGES, 6)
    with pytest.raises(OutOfPagesError, match="need 7 expert pages, 6 free of 3 huge pages"):
        f.pool.take_pages(7)
    assert (f.pool.num_free_pages, f.port.lent) == (6, set())


def test_padding_is_what_expert_pages_leave_of_lent_huge_pages() -> None:
    """Two expert pages of 96 bytes in a huge page of 240 leave 48, for each lent huge page."""
    f = Fixture(PADDED, 9)
    assert f.pool.padding_bytes == 0
    f.pool.take_pages(3)
    assert f.pool.padding_bytes == 2 * 48


# Which blocks KV takes


def test_kv_takes_blocks_of_the_requests_own_huge_page_first() -> None:
    """Small pages of one huge page go to the same request where possible, so that they come back together."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 10)
    f.use(4, 6)
    assert f.pool.pick_plain(1, HugeId(3)) == [7]
    assert f.pool.pick_plain(2, HugeId(2)) == [5, 1]


def test_kv_fills_split_huge_pages_before_it_breaks_whole_ones() -> None:
    """Without a huge page of its own a request takes trapped blocks, then whole plain huge pages."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 8)
    f.use(4)
    assert f.pool.pick_plain(4, None) == [1, 5, 2, 3]


def test_kv_takes_plain_blocks_beside_cached_ones_last() -> None:
    """Plain blocks of a wholly free huge page that holds a prefix are the last plain ones to go."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 6)
    f.cache(2)
    assert f.pool.pick_plain(9, None) == [1, 4, 5, 3]


def test_cached_and_lent_blocks_are_no_plain_ones() -> None:
    """Fewer than asked for come back when the rest is cached, used or lent; no block comes twice."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 8)
    f.pool.take_pages(1)
    f.cache(2, 3)
    assert f.pool.pick_plain(9, HugeId(2)) == [4, 5, 1]
    assert f.pool.pick_plain(9, HugeId(3)) == [1, 4, 5]
    assert f.pool.pick_plain(0, None) == []


def test_a_block_that_loses_its_hash_is_plain() -> None:
    """uncache_block turns a cached free block plain, and says nothing of any other block."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 6)
    f.cache(2, 3)
    f.use(4)
    for block in (0, 2, 4, 5):
        f.pool.uncache_block(BlockId(block))
    assert f.pool.pick_plain(9, None) == [1, 5, 2]
    f.pool.check_integrity()


# Emptying a huge page


def scattered() -> tuple[Fixture, list[PageId]]:
    """Three lent huge pages of three pages with 1, 2 and 1 free ones: 5 owned pages, in order of huge page."""
    f = Fixture(THREE_PAGES, 10)
    nine = sorted(f.pool.take_pages(9))
    f.pool.give_pages([nine[0], nine[3], nine[4], nine[6]])
    return f, [nine[1], nine[2], nine[5], nine[7], nine[8]]


def test_the_emptiest_huge_page_is_vacated() -> None:
    """The huge page that needs the fewest moves is emptied into the free pages of others, and goes back to KV."""
    f, owned = scattered()
    moves = f.pool.plan_vacate(pinned=set())
    assert [move.src for move in moves] == [owned[2]]
    for move in moves:
        f.pool.move_page(move)
    assert f.pool.num_lent_huge == 2
    f.pool.check_integrity()


def test_pinned_pages_stay() -> None:
    """A huge page with a pinned page is not vacated; the next emptiest is."""
    f, owned = scattered()
    moves = f.pool.plan_vacate(pinned={owned[2]})
    assert {move.src for move in moves} in ({owned[0], owned[1]}, {owned[3], owned[4]})


def test_a_full_huge_page_is_vacated_when_every_split_one_is_pinned() -> None:
    """Free pages enough for a huge page always give one back as long as one holds no pinned page."""
    f = Fixture(THREE_PAGES, 12)
    pages = sorted(f.pool.take_pages(12))
    f.pool.give_pages([pages[0], pages[3], pages[6]])
    pinned = {pages[1], pages[4], pages[7]}
    moves = f.pool.plan_vacate(pinned)
    assert {move.src for move in moves} == set(pages[9:])
    assert {move.dst for move in moves} == {pages[0], pages[3], pages[6]}
    assert f.pool.plan_vacate(pinned | {pages[9]}) == []


def test_nothing_is_vacated_into_too_little_room() -> None:
    """Two free pages can't take three: no moves."""
    f = Fixture(THREE_PAGES, 8)
    pages = sorted(f.pool.take_pages(9))
    f.pool.give_pages([pages[0], pages[3]])
    assert f.pool.plan_vacate(pinned=set()) == []


# Our own bugs


def test_a_block_in_use_cannot_be_used_again() -> None:
    """Only a free block can be taken."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 4)
    f.use(2)
    with pytest.raises(AssertionError, match="block 2 is USED, not free"):
        f.pool.use_block(BlockId(2))


def test_a_lent_block_cannot_be_used() -> None:
    """A block under expert pages is not KV's to take."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 4)
    f.pool.take_pages(1)
    with pytest.raises(AssertionError, match="block 3 is LENT, not free"):
        f.pool.use_block(BlockId(3))


def test_a_free_block_cannot_be_freed() -> None:
    """Freed twice is a bug."""
    f = Fixture(TWO_BLOCKS_A_PAGE, 4)
    with pytest.raises(AssertionError, match="block 2 freed while PLAIN"):
        f.pool.free_block(BlockId(2), is_cached=False)


def test_the_null_block_is_never_freed() -> None:
    """Block 0 belongs to no request."""
    with pytest.raises(AssertionError, match="null block"):
        Fixture(TWO_BLOCKS_A_PAGE, 4).pool.free_block(BlockId(0), is_cached=False)


def test_an_expert_page_that_nobody_owns_cannot_be_freed() -> None:
    """Freed twice, or freed while its huge page is KV's, is a bug that leaves the pool as it was."""
    f = Fixture(THREE_PAGES, 6)
    (page,) = f.pool.take_pages(1)
    for wrong in (PageId(page + 1), PageId(3)):
        with pytest.raises(AssertionError, match=f"expert page {wrong} freed but"):
            f.pool.give_pages([wrong])
    f.pool.check_integrity()


def test_a_page_is_moved_to_a_free_page_only() -> None:
    """Moving onto an owned page is a bug."""
    f = Fixture(THREE_PAGES, 6)
    one, two = f.pool.take_pages(2)
    with pytest.raises(AssertionError, match=f"expert page {two} taken but not free"):
        f.pool.move_page(Move(one, two))
