"""vLLM's block pool with a number of blocks that changes: every block that is taken or freed is told to the page pool.

The class is swapped in on the live object, so that all its holders keep their reference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.units import BlockId, HugeId


class ElasticQueue(FreeKVCacheBlockQueue):
    """vLLM's free list, in step with the page pool; takes plain blocks near each other before cached ones."""

    pool: PagePool | None = None
    near: HugeId | None = None
    """Huge page of the last block of the request that allocates now."""
    blocks: Sequence[KVCacheBlock]

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Change the list without telling the page pool, which knows already."""
        pool, self.pool = self.pool, None
        try:
            yield
        finally:
            self.pool = pool

    def popleft(self) -> KVCacheBlock:
        """Take one block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take n blocks: plain ones of the request's own huge page, of split, of whole ones, then the oldest cached."""
        if self.pool is None:
            stock: list[KVCacheBlock] = super().popleft_n(n)
            return stock
        assert n <= self.num_free_blocks, f"{n} blocks wanted, {self.num_free_blocks} free"
        picked = [self.blocks[b] for b in self.pool.pick_plain(n, self.near)]
        for block in picked:
            self.remove(block)
        for _ in range(n - len(picked)):
            oldest = self.fake_free_list_head.next_free_block
            self.remove(oldest)
            picked.append(oldest)
        return picked

    def remove(self, block: KVCacheBlock) -> None:
        """Take a given free block."""
        super().remove(block)
        if self.pool is not None:
            self.pool.use_block(BlockId(block.block_id))

    def append(self, block: KVCacheBlock) -> None:
        """Free a block that is worth keeping."""
        super().append(block)
        self._freed([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are worth keeping."""
        super().append_n(blocks)
        self._freed(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that are to be taken first."""
        super().prepend_n(blocks)
        self._freed(blocks)

    def _freed(self, blocks: list[KVCacheBlock]) -> None:
        if self.pool is not None:
            for block in blocks:
                self.pool.free_block(BlockId(block.block_id), is_cached=block.block_hash is not None)


class ElasticBlockPool(BlockPool):
    """vLLM's block pool, lending blocks to experts: a lent block is in no list, unreferenced and without a hash."""

    num_gpu_blocks: int
    kept_blocks: int
    """Blocks that stay under experts and slots whatever happens, at the limit in force."""
    num_lent: int

    @classmethod
    def adopt(cls, stock: BlockPool) -> "ElasticBlockPool":
        """Return the same object as an elastic pool; call `connect` before it is used."""
        stock.__class__ = cls
        stock.free_block_queue.__class__ = ElasticQueue
        adopted: ElasticBlockPool = stock
        adopted.free_block_queue.blocks = adopted.blocks
        adopted.kept_blocks = adopted.num_lent = 0
        return adopted

    def connect(self, pool: PagePool) -> None:
        """From now on tell the page pool of every block that is taken or freed."""
        self.free_block_queue.pool = pool

    # pages.pool.BlockPort

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Take free blocks out of KV; cached ones lose their hash."""
        queue = self.free_block_queue
        with queue.untold():
            for block in (self.blocks[b] for b in blocks):
                queue.remove(block)
                self._maybe_evict_cached_block(block)
                assert block.ref_cnt == 0, f"block {block.block_id} lent while referenced"
        self.num_lent += len(blocks)

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Return blocks to KV, to be taken first."""
        with self.free_block_queue.untold():
            self.free_block_queue.prepend_n([self.blocks[b] for b in blocks])
        self.num_lent -= len(blocks)

    # What vLLM derives from num_gpu_blocks

    @property
    def num_used(self) -> int:
        """Return the blocks that requests hold."""
        return int(self.num_gpu_blocks - 1 - self.num_lent - self.get_num_free_blocks())

    def get_usage(self) -> float:
        """Return used blocks as a share of what KV could have if every evictable expert went; 1 at most.

        After the limit was lowered, requests may hold more than that until they end.
        """
        most = self.num_gpu_blocks - 1 - self.kept_blocks
        return min(1.0, self.num_used / most) if most > 0 else 0.0

    def get_current_usage(self) -> float:
        """Return used blocks as a share of what KV has now."""
        current = self.num_gpu_blocks - 1 - self.num_lent
        return self.num_used / current if current > 0 else 0.0

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix hashes if no request holds a block."""
        stock_blocks = self.num_gpu_blocks
        self.num_gpu_blocks = stock_blocks - self.num_lent
        try:
            done = bool(super().reset_prefix_cache())
        finally:
            self.num_gpu_blocks = stock_blocks
        if done and (pool := self.free_block_queue.pool) is not None:
            for block in self.blocks:
                pool.uncache_block(BlockId(block.block_id))
        return done

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the prefix hashes of these blocks."""
        super().evict_blocks(block_ids)
        if (pool := self.free_block_queue.pool) is not None:
            for block in block_ids:
                pool.uncache_block(BlockId(block))
