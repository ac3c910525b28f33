"""Ids and sizes as types, and the only place that divides bytes by a page size."""

from typing import NamedTuple, NewType

PageId = NewType("PageId", int)
"""One expert page: page j of huge page h is h * pages_per_huge + j."""
BlockId = NewType("BlockId", int)
"""One vLLM block id: a small page, over all layers."""
HugeId = NewType("HugeId", int)
"""One huge page."""

MATRICES = 3
"""Matrices, and so expert pages, of one expert: W1 (gate), W3 (up), W2 (down), in this order."""


class ExpertKey(NamedTuple):
    """One expert of one MoE layer; layers are counted among MoE layers only."""

    layer: int
    expert: int


def ceil_div(amount: int, unit: int) -> int:
    """Return the fewest units that hold amount."""
    return -(-amount // unit)


def align_up(amount: int, unit: int) -> int:
    """Return the smallest multiple of unit that is at least amount."""
    return ceil_div(amount, unit) * unit


def mib(num_bytes: int) -> str:
    """Return bytes as text in MiB, for messages."""
    return f"{num_bytes / 2**20:.2f} MiB"
