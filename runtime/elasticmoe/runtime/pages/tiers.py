"""Sizes of the three tiers of pages, worked out from one expert matrix and one vLLM block.

The rule: huge page H = m * S holds k expert pages of E bytes, S padded a little where E and S don't divide.
Page j of huge page h lies at h * H + j * E, block b at b * S. Used by the pool, the worker and the simulator.
"""

import math
from dataclasses import dataclass

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.units import BlockId, HugeId, PageId, align_up, ceil_div

ALIGN_BYTES = 16
"""Block strides and page offsets are multiples of this: vector loads and TMA strides need it."""
GRANULE_BYTES = 4096
"""A padded S is rounded to what E shares with this, so that offsets in granules fit an int32 for any GPU."""
MAX_HUGE_BYTES = 256 * 2**20
MAX_WASTE = 0.01


@dataclass(frozen=True, slots=True)
class Tiers:
    """Page sizes in bytes and how they nest."""

    expert_bytes: int
    """E: one expert matrix."""
    block_bytes: int
    """S: one vLLM block over all layers, padding included."""
    raw_block_bytes: int
    """Bytes of S that vLLM uses."""
    pages_per_huge: int
    """k."""
    blocks_per_huge: int
    """m."""

    @property
    def huge_bytes(self) -> int:
        """Return H in bytes."""
        return self.block_bytes * self.blocks_per_huge

    @property
    def waste(self) -> float:
        """Return the larger share of a huge page that padding takes, as KV or as experts."""
        kv = 1 - self.raw_block_bytes * self.blocks_per_huge / self.huge_bytes
        return max(kv, 1 - self.expert_bytes * self.pages_per_huge / self.huge_bytes)

    @property
    def granule_bytes(self) -> int:
        """Return the largest unit that every page offset is a multiple of (E itself where H = k * E)."""
        return math.gcd(self.expert_bytes, self.huge_bytes)

    def page_offset(self, page: PageId) -> int:
        """Return where the page starts in the arena, in bytes."""
        huge, index = divmod(page, self.pages_per_huge)
        return huge * self.huge_bytes + index * self.expert_bytes

    def huge_of_page(self, page: PageId) -> HugeId:
        """Return the huge page that the expert page lies in."""
        return HugeId(page // self.pages_per_huge)

    def huge_of_block(self, block: BlockId) -> HugeId:
        """Return the huge page that the block lies in."""
        return HugeId(block // self.blocks_per_huge)

    def pages_of(self, huge: HugeId) -> range:
        """Return the expert page ids of a huge page."""
        return range(huge * self.pages_per_huge, (huge + 1) * self.pages_per_huge)

    def blocks_of(self, huge: HugeId) -> range:
        """Return the block ids of a huge page."""
        return range(huge * self.blocks_per_huge, (huge + 1) * self.blocks_per_huge)


def _candidate(expert_bytes: int, block_bytes: int, k: int) -> Tiers:
    """Return the tiers with k expert pages a huge page, S padded so that its blocks cover them; k * E is at least S."""
    m = k * expert_bytes // block_bytes
    padded, rest = divmod(k * expert_bytes, m)
    if rest or padded % ALIGN_BYTES:
        padded = align_up(padded + 1, math.gcd(expert_bytes, GRANULE_BYTES))
    return Tiers(expert_bytes, padded, block_bytes, k, m)


def fit_tiers(expert_bytes: int, block_bytes: int) -> Tiers:
    """Return the smallest huge page whose padding is at most MAX_WASTE, else the one that wastes least.

    `expert_bytes` is one expert matrix, `block_bytes` one vLLM block over all layers.
    """
    for name, value in (("an expert matrix", expert_bytes), ("a KV block", block_bytes)):
        if value <= 0 or value % ALIGN_BYTES:
            message = f"{name} must be a multiple of {ALIGN_BYTES} bytes to share pages, this model's has {value}"
            raise ConfigError(message)
    first = ceil_div(block_bytes, expert_bytes)
    last = max(MAX_HUGE_BYTES // expert_bytes, first)
    best = _candidate(expert_bytes, block_bytes, first)
    for k in range(first + 1, last + 1):
        if best.waste <= MAX_WASTE:
            break
        best = min(best, _candidate(expert_bytes, block_bytes, k), key=lambda tiers: tiers.waste)
    return best
