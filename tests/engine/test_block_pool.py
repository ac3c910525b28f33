"""vLLM's real block pool and our page pool stay in step, whatever order blocks are taken, freed, hashed and lent in."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import PageId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 41
SHAPES = [(1, 2), (1, 1), (3, 5), (4, 1)]
"""(pages, blocks) of a huge page."""


class BlockPoolMachine(RuleBasedStateMachine):
    """Every block is with a request, free or lent, in vLLM's lists and in the page pool alike."""

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int]) -> None:
        """Build both pools."""
        from vllm.v1.core.block_pool import BlockPool

        from elasticmoe.runtime.engine.block_pool import ElasticBlockPool

        pages, blocks = shape
        tiers = Tiers(240 // pages, 240 // blocks, 240 // blocks, pages, blocks)
        self.blocks = ElasticBlockPool.adopt(BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=16))
        self.pages = PagePool(tiers, NUM_BLOCKS, self.blocks)
        self.blocks.connect(self.pages)
        self.held: list[list[KVCacheBlock]] = []
        self.owned: list[list[PageId]] = []
        self.num_hashed = 0

    @rule(num=st.integers(1, 8), near=st.one_of(st.none(), st.integers(0, 8)), is_cached=st.booleans())
    def allocate(self, *, num: int, near: int | None, is_cached: bool) -> None:
        """A request takes blocks, and may fill them with a prefix worth keeping."""
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        if num > self.blocks.get_num_free_blocks():
            return
        self.blocks.free_block_queue.near = near
        taken = self.blocks.get_new_blocks(num)
        assert all(block.block_hash is None for block in taken), "a block kept the hash of its former content"
        self.held.append(taken)
        for block in taken if is_cached else []:
            self.num_hashed += 1
            name = make_block_hash_with_group_id(BlockHash(str(self.num_hashed).encode()), 0)
            self.blocks._insert_block_hash(name, block, num_tokens=16)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A request ends."""
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.blocks.free_blocks(reversed(self.held.pop(index)))

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """A request finds a cached block that nobody uses."""
        cached = [b for b in self.blocks.free_block_queue.get_all_free_blocks() if b.block_hash is not None]
        if cached:
            block = data.draw(st.sampled_from(cached))
            self.blocks.touch([block])
            self.held.append([block])

    @rule(num=st.integers(1, 6))
    def take_pages(self, num: int) -> None:
        """An expert takes pages."""
        if num <= self.pages.num_free_pages:
            self.owned.append(self.pages.take_pages(num))

    @rule(data=st.data())
    def give_pages(self, data: st.DataObject) -> None:
        """An expert leaves."""
        if self.owned:
            self.pages.give_pages(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Some prefixes are dropped by id, or all of them where no request runs."""
        self.blocks.evict_blocks(data.draw(st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=5)))
        assert self.blocks.reset_prefix_cache() == (not self.held)

    @rule(kept_blocks=st.integers(0, NUM_BLOCKS - 2))
    def change_limit(self, kept_blocks: int) -> None:
        """A new limit keeps other blocks under experts, also where requests hold more than it leaves them."""
        self.blocks.kept_blocks = kept_blocks

    @invariant()
    def in_step(self) -> None:
        """Both count alike, lent blocks are nobody's and hold no hash."""
        if not hasattr(self, "pages"):
            return
        self.pages.check_integrity()
        free = self.blocks.free_block_queue.get_all_free_blocks()
        assert len(free) == self.blocks.get_num_free_blocks() == self.pages.num_free_blocks
        assert self.blocks.num_lent == self.pages.num_lent_blocks
        assert self.blocks.num_used == sum(map(len, self.held))
        assert 0 <= self.blocks.get_usage() <= 1
        busy = {block.block_id for block in free} | {block.block_id for blocks in self.held for block in blocks}
        lent = [block for block in self.blocks.blocks[1:] if block.block_id not in busy]
        assert len(lent) == self.blocks.num_lent
        assert all(block.block_hash is None and block.ref_cnt == 0 for block in lent)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
