"""The page pool against a naive model: sets of blocks on the KV side, a set of owned pages on the experts' side."""

from collections import Counter
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from elasticmoe.runtime.errors import OutOfPagesError
from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import BlockId, HugeId, PageId
from tests.fakes.block_port import FakeBlockPort
from tests.fakes.tier_shapes import TIER_SHAPES

PATIENT_STEPS = 100_000
Id = TypeVar("Id", BlockId, PageId)


def some_of(ids: set[Id], most: int = 40) -> st.SearchStrategy[set[Id]]:
    """Sets of up to `most` of these ids; empty where there are none, so that no rule waits for another."""
    return st.sets(st.sampled_from(sorted(ids)), max_size=most) if ids else st.just(set())


class PoolMachine(RuleBasedStateMachine):
    """Any order of KV and experts taking, freeing and moving keeps every block and page in exactly one place."""

    @initialize(tiers=st.sampled_from(TIER_SHAPES), num_huge=st.integers(1, 8), tail=st.integers(0, 10))
    def start(self, tiers: Tiers, num_huge: int, tail: int) -> None:
        """Start with some whole huge pages and a tail that is none."""
        self.tiers = tiers
        num_blocks = num_huge * tiers.blocks_per_huge + tail % tiers.blocks_per_huge
        self.lendable = range(1, num_huge)
        self.port = FakeBlockPort(num_blocks)
        self.pool = PagePool(tiers, num_blocks, self.port)
        self.owned: set[PageId] = set()

    # The naive model's arithmetic

    def lent_huge(self) -> list[HugeId]:
        """Return the huge pages whose blocks are lent."""
        return [HugeId(h) for h in self.lendable if self.tiers.blocks_of(HugeId(h))[0] in self.port.lent]

    def num_free_split_pages(self) -> int:
        """Return the pages of lent huge pages that nobody owns."""
        return len(self.lent_huge()) * self.tiers.pages_per_huge - len(self.owned)

    def num_whole(self) -> int:
        """Return the huge pages whose blocks are all free for experts."""
        return sum(self.port.free.issuperset(self.tiers.blocks_of(HugeId(h))) for h in self.lendable)

    # KV

    @rule(num=st.integers(0, 30), near=st.integers(0, 7) | st.none())
    def use(self, num: int, near: int | None) -> None:
        """A request takes plain blocks, its own huge page's first, then cached ones."""
        huge = None if near is None else HugeId(near % len(range(0, self.pool.num_blocks, self.tiers.blocks_per_huge)))
        picked = self.pool.pick_plain(num, huge)
        assert len(set(picked)) == len(picked) == min(num, len(self.port.plain))
        assert self.port.plain.issuperset(picked)
        if huge is not None:
            own = self.port.plain.intersection(self.tiers.blocks_of(huge))
            assert len(own.intersection(picked)) == min(num, len(own))
        for block in [*picked, *sorted(self.port.cached)[: num - len(picked)]]:
            self.pool.use_block(block)
            self.port.use(block)

    @rule(data=st.data(), is_cached=st.booleans())
    def free(self, data: st.DataObject, is_cached: bool) -> None:  # noqa: FBT001 -- hypothesis passes it by name
        """A request frees some blocks."""
        for block in data.draw(some_of(self.port.used)):
            self.pool.free_block(block, is_cached=is_cached)
            self.port.let_go(block, is_cached=is_cached)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A request hits cached blocks."""
        for block in data.draw(some_of(self.port.cached)):
            self.pool.use_block(block)
            self.port.use(block)

    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        """Cached blocks lose their hashes."""
        for block in data.draw(some_of(self.port.cached)):
            self.pool.uncache_block(block)
            self.port.cached.remove(block)
            self.port.plain.add(block)

    # Experts

    @rule(num=st.integers(0, 30))
    def take(self, num: int) -> None:
        """Experts take pages: all or nothing, split huge pages first, cached blocks last."""
        room = self.num_free_split_pages() + self.num_whole() * self.tiers.pages_per_huge
        split = self.num_free_split_pages()
        lent = len(self.lent_huge())
        self.port.forget()
        if num > room:
            with pytest.raises(OutOfPagesError, match=f"need {num} expert pages, {room} free"):
                self.pool.take_pages(num)
            return
        pages = self.pool.take_pages(num)
        assert len(set(pages)) == num
        assert self.owned.isdisjoint(pages)
        assert len(self.lent_huge()) - lent == -(-max(0, num - split) // self.tiers.pages_per_huge)
        plain_left = [h for h in self.lendable if self.port.plain.issuperset(self.tiers.blocks_of(HugeId(h)))]
        assert not (self.port.lost and plain_left), "a prefix was given up beside a plain huge page"
        self.owned.update(pages)

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        """Experts free some pages."""
        pages = data.draw(some_of(self.owned))
        self.pool.give_pages(sorted(pages))
        self.owned -= pages

    @rule(data=st.data())
    def vacate(self, data: st.DataObject) -> None:
        """Moves make one more huge page KV's, whenever free pages and pins allow it at all."""
        pinned = data.draw(some_of(self.owned, most=3))
        lent = set(self.lent_huge())
        movable = lent - {self.tiers.huge_of_page(page) for page in pinned}
        is_possible = bool(movable) and self.num_free_split_pages() >= self.tiers.pages_per_huge
        moves = self.pool.plan_vacate(pinned)
        assert bool(moves) == is_possible
        for move in moves:
            assert move.src not in pinned
            self.pool.move_page(move)
            self.owned.remove(move.src)
            self.owned.add(move.dst)
        assert len(self.owned) == self.pool.num_owned_pages
        assert len(lent - set(self.lent_huge())) == bool(moves)

    # What always holds

    @invariant()
    def books_balance(self) -> None:
        """The pool's numbers are those of the model, and its own check passes."""
        self.pool.check_integrity()
        assert self.pool.num_free_blocks == len(self.port.free)
        assert self.pool.num_lent_blocks == len(self.port.lent)
        assert self.pool.num_owned_pages == len(self.owned)
        assert self.pool.num_whole == self.num_whole()
        assert self.pool.num_free_split_pages == self.num_free_split_pages()
        trapped = len(self.port.free) - self.num_whole() * self.tiers.blocks_per_huge
        assert self.pool.num_trapped_blocks == trapped

    @invariant()
    def splits_merge_back(self) -> None:
        """A huge page is lent exactly while somebody owns one of its pages, and then wholly."""
        owned = Counter(map(self.tiers.huge_of_page, self.owned))
        assert set(owned) == set(self.lent_huge())
        assert self.port.lent == {block for huge in owned for block in self.tiers.blocks_of(huge)}

    def teardown(self) -> None:
        """When all is freed every huge page is whole again."""
        if not hasattr(self, "pool"):
            return
        self.pool.give_pages(sorted(self.owned))
        for block in sorted(self.port.used):
            self.pool.free_block(block, is_cached=False)
            self.port.let_go(block, is_cached=False)
        assert self.pool.num_free_pages == len(self.lendable) * self.tiers.pages_per_huge
        assert self.port.free == set(range(1, self.pool.num_blocks))
        self.pool.check_integrity()


PoolMachine.TestCase.settings = settings()
TestPool = pytest.mark.timeout(600)(PoolMachine.TestCase)  # ten seconds, but minutes under coverage


@pytest.mark.slow
@pytest.mark.patient
@pytest.mark.timeout(900)
def test_the_pool_holds_for_a_hundred_thousand_steps() -> None:
    """The same machine, as patient as a night."""
    runs = PATIENT_STEPS // 150  # a run may end before its 200 steps; 160 is what they take on average
    patient = settings(max_examples=runs, stateful_step_count=200, deadline=None, derandomize=False)
    run_state_machine_as_test(PoolMachine, settings=patient)
