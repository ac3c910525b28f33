"""The KV side of the simulated engine: stock vLLM's fixed room, and the shared pool with the real adjuster over it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from elasticmoe.runtime.adjuster.adjuster import IDLE, Adjuster, Demand
from elasticmoe.runtime.simulator.requests import Request
from elasticmoe.runtime.units import BlockId


class Kv(Protocol):
    """Blocks for requests; the elastic one also moves experts, as the engine's scheduler does around each step."""

    def allocate(self, request: Request, num_new: int, num_wanted: int, lost_tokens: int) -> bool:
        """Give the request `num_new` blocks if `num_wanted` are free or can be freed; else change nothing.

        `lost_tokens` is what a preemption would throw away if this fails.
        """

    def free(self, request: Request) -> None:
        """Take all blocks of the request back."""


class StockKv:
    """vLLM's block pool without prefix caching: all blocks are alike, so only their number counts."""

    def __init__(self, num_blocks: int) -> None:
        """Start with all but the null block free."""
        self.num_free = num_blocks - 1

    def allocate(self, request: Request, num_new: int, num_wanted: int, lost_tokens: int) -> bool:
        """Give the request blocks if so many are free."""
        del lost_tokens  # nothing could be done about it
        if num_wanted > self.num_free:
            return False
        self.num_free -= num_new
        request.blocks.extend([BlockId(0)] * num_new)
        return True

    def free(self, request: Request) -> None:
        """Take all blocks of the request back."""
        self.num_free += len(request.blocks)
        request.blocks.clear()


class SilentPort:
    """The KV side that the pool tells of blocks changing tiers: the pool's own books are all that is needed here."""

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Hear of blocks that went to experts."""

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Hear of blocks that came back."""


class ElasticKv:
    """The shared pool: short of blocks, it evicts experts as the engine does, with the same adjuster."""

    def __init__(self, adjuster: Adjuster) -> None:
        """Take the adjuster whose pool blocks come from."""
        self.adjuster = adjuster
        self.ask_demand: Callable[[], Demand] = lambda: IDLE
        """The scheduler's load, asked where a request falls short."""
        self._pool = adjuster.table.pool

    def allocate(self, request: Request, num_new: int, num_wanted: int, lost_tokens: int) -> bool:
        """Give the request blocks, evicting until they are free; False if that can't be."""
        while (short := num_wanted - self._pool.num_free_blocks) > 0:
            if not self.adjuster.rescue(short, self.ask_demand(), lost_tokens):
                return False
        near = self._pool.tiers.huge_of_block(request.blocks[-1]) if request.blocks else None
        picked = self._pool.pick_plain(num_new, near)
        for block in picked:
            self._pool.use_block(block)
        request.blocks.extend(picked)
        return True

    def free(self, request: Request) -> None:
        """Take all blocks of the request back, the last one first, as vLLM does."""
        for block in reversed(request.blocks):
            self._pool.free_block(block, is_cached=False)
        request.blocks.clear()

    @property
    def num_away(self) -> int:
        """Return the experts that are not resident."""
        return int(self.adjuster.table.state.size) - self.adjuster.table.num_resident

    def adjust(self, demand: Demand) -> int:
        """Let the policy act once the step is scheduled; returns the loads that the step ships."""
        self.adjuster.adjust(demand)
        return len(self.adjuster.drain().loads)
