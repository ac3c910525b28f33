"""The configs that the tuner tries: what was left of a wide first search, which covered some 300 a batch size."""

from collections.abc import Iterator
from dataclasses import replace

from elasticmoe.kernels.config import Gemm

FEW = (
    Gemm(4, 1024, num_warps=4),
    Gemm(8, 1024, num_warps=4),
    Gemm(4, 512, num_warps=2),
    Gemm(8, 512, num_warps=2),
    Gemm(16, 256, num_warps=2),
    Gemm(16, 256, num_warps=4),
)
"""For batches whose pairs share no weights."""

_TMA = Gemm(64, 128, tma=True)
SMALL = (
    _TMA,
    replace(_TMA, swap=True),
    replace(_TMA, swap=True, num_stages=4),
    replace(_TMA, block_k=256, num_stages=2),
    replace(_TMA, block_n=128),
    replace(_TMA, block_n=128, swap=True),
    replace(_TMA, block_n=128, num_stages=2),
    replace(_TMA, block_k=64, num_stages=5, swap=True),
    replace(_TMA, block_n=128, block_k=64, swap=True),
    Gemm(64, 64, num_stages=5, swap=True),
    Gemm(64, 128, num_stages=2, swap=True),
)
"""For blocks of 16 or 32 rows."""
SLICED_GATE_UP = (
    replace(_TMA, block_n=32, num_stages=4),
    replace(_TMA, block_n=32, block_k=256),
    replace(_TMA, block_n=32, block_k=64, num_stages=5),
)
SLICED_DOWN = (
    replace(_TMA, block_k=32, num_stages=4),
    replace(_TMA, block_n=128, block_k=32, num_stages=4),
    replace(_TMA, block_n=128, block_k=64),
    replace(_TMA, block_n=256, block_k=64, swap=True),
)
"""For matrices cut thin by tensor parallelism."""
SLICED = 256
"""Intermediate sizes below which those are tried."""


def block_sizes(rows: float) -> tuple[int, ...]:
    """The block heights worth trying for so many rows an expert on average."""
    return tuple(size for size in (16, 32, 64, 128) if min(rows / 2, 64) <= size <= max(4 * rows, 16))


def gemms(block_m: int, *, is_down: bool, f: int) -> Iterator[Gemm]:
    """The ways to tile one of the two GEMMs."""
    if block_m <= 32:
        yield from SMALL
        if f < SLICED:
            yield from SLICED_DOWN if is_down else SLICED_GATE_UP
    elif block_m == 64:
        yield from _large_64(is_down=is_down)
    else:
        yield from _large_128(is_down=is_down)


def _large_64(*, is_down: bool) -> Iterator[Gemm]:
    narrow = replace(_TMA, block_n=128 if is_down else 64, block_k=64)
    wide = Gemm(256, 64, 8, 8, 4, tma=True) if is_down else Gemm(128, 64, 8, 4, 4, tma=True)
    for gemm in (narrow, wide):
        yield gemm
        yield replace(gemm, halvings=1)
        yield replace(gemm, halvings=2, swap=True)


def _large_128(*, is_down: bool) -> Iterator[Gemm]:
    wide = Gemm(256 if is_down else 128, 64, 1, 8, 4, tma=True)
    yield wide
    yield replace(wide, halvings=1)
    yield replace(wide, halvings=1, group_m=8)
    yield replace(wide, halvings=1, group_m=4)
    yield replace(wide, halvings=1, num_stages=3)
    yield replace(wide, halvings=2, swap=True)
    yield Gemm(128 if is_down else 64, 64, 8, 4, 3, tma=True, halvings=1)
    if is_down:
        yield replace(wide, num_stages=3, persistent=True)
        yield replace(wide, num_stages=3, persistent=True, group_m=8)
    else:
        yield replace(wide, block_k=128, num_stages=2, halvings=1)
