"""How many experts must leave so that the arena holds the rest, the loading buffers and one request.

Pure arithmetic that the scheduler, the workers and the memory report share, so that all agree on the start.
"""

from dataclasses import dataclass

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import MATRICES, ceil_div, mib

SLACK_EXPERTS = 10
"""Experts a layer that may leave beyond the least that fits, if no limit is asked for (the paper's knee)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The arena and the model as the pool sees them."""

    tiers: Tiers
    num_blocks: int
    num_layers: int
    """MoE layers only."""
    num_experts: int
    loading_depth: int
    request_blocks: int
    """Blocks of the longest request (max_model_len)."""

    @property
    def arena_bytes(self) -> int:
        """Return the size of the arena."""
        return self.num_blocks * self.tiers.block_bytes

    @property
    def num_lendable(self) -> int:
        """Return the huge pages that experts could hold beside one request and the null block."""
        spare = (self.num_blocks - 1 - self.request_blocks) // self.tiers.blocks_per_huge
        return max(0, min(self.num_blocks // self.tiers.blocks_per_huge - 1, spare))

    def num_pages(self, offloaded: int) -> int:
        """Return the expert pages in use with `offloaded` experts of every layer out, slots included."""
        resident = self.num_layers * (self.num_experts - offloaded)
        return MATRICES * (resident + min(self.loading_depth, self.num_layers) * offloaded)

    def num_huge(self, offloaded: int) -> int:
        """Return the huge pages that those expert pages fill."""
        return ceil_div(self.num_pages(offloaded), self.tiers.pages_per_huge)

    def least_offload(self, headroom_pages: int = 0) -> int:
        """Return the fewest experts that every layer must offload to fit, with `headroom_pages` left free.

        Raises PoolTooSmallError with the numbers when no residency fits.
        """
        room = self.num_lendable - ceil_div(headroom_pages, self.tiers.pages_per_huge)
        excess = self.num_pages(0) - room * self.tiers.pages_per_huge
        if excess <= 0:
            return 0
        gain = self.num_pages(0) - self.num_pages(1)
        least = ceil_div(excess, gain) if gain else self.num_experts + 1
        if least > self.num_experts:
            raise PoolTooSmallError(self._shortage())
        return least

    def start_offload(self, headroom_pages: int) -> int:
        """Return the offloaded experts a layer to start with: room for `headroom_pages` if that can be had."""
        least = self.least_offload()
        try:
            return self.least_offload(headroom_pages)
        except PoolTooSmallError:
            return least

    def effective_limit(self, requested: int | None) -> int:
        """Return the offload limit in force: the requested one, but never less than what must be offloaded."""
        least = self.least_offload()
        wanted = least + SLACK_EXPERTS if requested is None else requested
        return min(self.num_experts, max(least, wanted))

    def num_kept_blocks(self, limit: int) -> int:
        """Return the blocks that stay under experts and slots even when every layer is at the limit."""
        return self.num_huge(limit) * self.tiers.blocks_per_huge

    def _shortage(self) -> str:
        least_huge = self.num_huge(self.num_experts)
        experts = least_huge * self.tiers.huge_bytes
        request = (1 + self.request_blocks) * self.tiers.block_bytes
        wanted = (
            max(1 + self.request_blocks, self.tiers.blocks_per_huge) + least_huge * self.tiers.blocks_per_huge
        ) * self.tiers.block_bytes
        return (
            f"arena_bytes: the pool needs at least {wanted} bytes ({mib(experts)} for the experts of one layer per "
            f"loading buffer, {mib(request)} for one request of the maximum length), there are {self.arena_bytes} "
            f"({mib(self.arena_bytes)}); raise arena_bytes or lower --max-model-len"
        )
