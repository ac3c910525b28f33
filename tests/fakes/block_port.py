"""The KV side of the pool as plain sets: a fake that shares nothing with the pool's own books."""

from collections.abc import Sequence

from elasticmoe.runtime.units import BlockId


class FakeBlockPort:
    """Knows of every block but the null block whether it is used, plain, cached or lent; refuses a wrong change."""

    def __init__(self, num_blocks: int) -> None:
        """Start with every block plain."""
        self.plain = set(map(BlockId, range(1, num_blocks)))
        self.cached: set[BlockId] = set()
        self.used: set[BlockId] = set()
        self.lent: set[BlockId] = set()
        self.lost: set[BlockId] = set()
        """Blocks that were cached when they were lent, since the last `forget`."""

    @property
    def free(self) -> set[BlockId]:
        """Return plain and cached blocks."""
        return self.plain | self.cached

    def forget(self) -> None:
        """Forget which cached blocks were lost."""
        self.lost = set()

    def use(self, block: BlockId) -> None:
        """Take a free block for a request."""
        assert block in self.free, f"block {block} used but not free"
        self.plain.discard(block)
        self.cached.discard(block)
        self.used.add(block)

    def let_go(self, block: BlockId, *, is_cached: bool) -> None:
        """Free a used block."""
        self.used.remove(block)
        (self.cached if is_cached else self.plain).add(block)

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Take free blocks out of KV."""
        assert self.free.issuperset(blocks), f"blocks {set(blocks) - self.free} lent but not free"
        self.lost.update(self.cached.intersection(blocks))
        self.plain.difference_update(blocks)
        self.cached.difference_update(blocks)
        self.lent.update(blocks)

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Return lent blocks to KV, plain."""
        assert self.lent.issuperset(blocks), f"blocks {set(blocks) - self.lent} given back but not lent"
        self.lent.difference_update(blocks)
        self.plain.update(blocks)
