"""Sorts the (token, rank) pairs of a batch by expert, in blocks of rows that one GEMM tile works on.

Called by `launch`. Shapes: T tokens, N experts, K top-k; a *pair* is `token * K + rank`, a *slot* a row of the sorted
order, in which every expert starts at a multiple of BLOCK_M. The page table is looked up here, once a block, so that a
tile's weights are one load away. Nothing depends on data but the arrays' contents: no sync, no atomics, and the same
batch always gets the same slots. Where some experts are late, their blocks come behind all others, so that either sort
of block is one span; which pairs share a block doesn't depend on it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from elasticmoe.kernels.launcher import Launcher, ceil_div, next_power_of_2

PAIRS_AT_ONCE = 8192
"""The most pairs that `_place_experts` takes: each of its programs looks at all of them."""
TILE = 512
"""Pairs of one program of `_place_tile`."""
STRIP = 32
"""Tiles, or pairs, that `_place_tile` compares in one go."""
LANES = 128
"""Blocks that are closed in one go."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which pairs each block of rows holds, where its weights lie, and where each pair went."""

    sorted_token_ids: torch.Tensor
    """[slots] int32: the pair in each slot, T * K where the slot pads an expert's last block."""
    block_pages: torch.Tensor
    """[blocks, 3] int32: the pages of each block's expert, -1 where there are fewer blocks."""
    num_blocks: torch.Tensor
    """[1] int32, or [2] where some experts may be late: of all experts, and of the resident ones, which come first."""
    slots: torch.Tensor
    """[T * K] int32: the slot of each pair, -1 where its expert is masked."""


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that any routing of so many pairs can need."""
    if num_pairs <= num_experts:
        return num_pairs
    return num_experts + (num_pairs - num_experts) // block_m


def align_width(pairs: int) -> int:
    """Pairs that each program of `_place_experts` looks at, padded; 0 where tiles of them are placed instead."""
    return max(next_power_of_2(pairs), 32) if pairs <= PAIRS_AT_ONCE else 0


def align(
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    block_m: int,
    *,
    pdl: bool = False,
    resident: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> Alignment:
    """The alignment of `topk_ids` [T, K] int32, in which -1 masks a pair, with `table` [N, 3]; in stream order.

    With `resident` [N] bool, the blocks of experts that are come before those of experts that aren't. With
    `num_tokens` [1] int32, the pairs of the tokens from there on are masked too.
    """
    (pairs, top_k), num_experts = (topk_ids.numel(), topk_ids.shape[1]), table.shape[0]
    blocks = max_blocks(pairs, num_experts, block_m)
    made = _empty(topk_ids.device, blocks, block_m, pairs, 1 if resident is None else 2)
    arrays = (
        topk_ids,
        table,
        resident,
        num_tokens,
        made.sorted_token_ids,
        made.block_pages,
        made.num_blocks,
        made.slots,
    )
    bins = next_power_of_2(num_experts)
    if width := align_width(pairs):
        _launch_by_expert(
            (num_experts,), *arrays, pairs, blocks, top_k, bins, block_m, width, LANES, pdl,
            num_warps=8 if width > TILE else 4,
        )  # fmt: skip
        return made
    tiles = ceil_div(pairs, TILE)
    counts = torch.empty((tiles, bins), dtype=torch.int32, device=topk_ids.device)
    _launch_count((tiles,), topk_ids, num_tokens, counts, pairs, top_k, bins, TILE, pdl, num_warps=4)
    extra = {"launch_pdl": True} if pdl else {}
    _launch_by_tile(
        (tiles,), *arrays, counts, pairs, blocks, tiles, top_k, num_experts, bins, block_m, TILE, STRIP, LANES, pdl,
        num_warps=8, **extra,
    )  # fmt: skip
    return made


def _empty(device: torch.device, blocks: int, block_m: int, pairs: int, counts: int) -> Alignment:
    def make(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    return Alignment(make(blocks * block_m), make(blocks, 3), make(counts), make(pairs))


@triton.jit(do_not_specialize=["pairs", "max_blocks", "top_k"], do_not_specialize_on_alignment=["resident_ptr"])
def _place_experts(
    ids_ptr,
    table_ptr,
    resident_ptr,
    num_tokens_ptr,
    sorted_ptr,
    block_pages_ptr,
    num_blocks_ptr,
    slots_ptr,
    pairs,
    max_blocks,
    top_k,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place the pairs of expert `program_id`: every program reads all pairs, so none waits for another."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    pair = tl.arange(0, WIDTH)
    real = num_real(pairs, num_tokens_ptr, top_k)
    ids = tl.load(ids_ptr + pair, mask=pair < real, other=-1)
    w1 = tl.load(table_ptr + expert * 3)
    w3 = tl.load(table_ptr + expert * 3 + 1)
    w2 = tl.load(table_ptr + expert * 3 + 2)
    counts = tl.histogram(ids, BINS, mask=ids >= 0)  # [BINS]
    bins = tl.arange(0, BINS)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    is_late = False
    if resident_ptr is None:
        first = tl.sum(tl.where(bins < expert, blocks, 0))
    else:
        is_late = tl.load(resident_ptr + bins, mask=bins < tl.num_programs(0), other=1) == 0
        first = tl.sum(tl.where(bins == expert, _starts(blocks, is_late), 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    own = (count + BLOCK_M - 1) // BLOCK_M
    is_own = ids == expert
    slot = first * BLOCK_M + tl.cumsum(is_own.to(tl.int32), 0) - 1
    tl.store(sorted_ptr + slot, pair, mask=is_own)
    tl.store(slots_ptr + pair, slot, mask=is_own)
    if expert == 0:
        total = tl.sum(blocks)
        tl.store(num_blocks_ptr, total)
        if resident_ptr is not None:
            tl.store(num_blocks_ptr + 1, total - tl.sum(tl.where(is_late, blocks, 0)))
        tl.store(slots_ptr + pair, -1, mask=(pair < pairs) & (ids < 0))
        _name(block_pages_ptr, total, max_blocks - total, -1, -1, -1, LANES)
    row = tl.arange(0, BLOCK_M)
    used = count - (own - 1) * BLOCK_M
    tl.store(sorted_ptr + (first + own - 1) * BLOCK_M + row, pairs, mask=row >= used)
    _name(block_pages_ptr, first, own, w1, w3, w2, LANES)


@triton.jit
def _starts(blocks, is_late):
    """The first block of each expert: late ones come behind all others, both in order."""
    late = tl.where(is_late, blocks, 0)
    before = tl.cumsum(late, 0) - late  # of late experts
    return tl.where(is_late, tl.sum(blocks - late) + before, tl.cumsum(blocks, 0) - blocks - before)


@triton.jit
def _name(block_pages_ptr, first, count, w1, w3, w2, LANES: tl.constexpr):
    """Give `count` blocks from `first` on their pages."""
    for start in range(0, count, LANES):
        lane = start + tl.arange(0, LANES)
        at = block_pages_ptr + (first + lane) * 3
        tl.store(at, w1, mask=lane < count)
        tl.store(at + 1, w3, mask=lane < count)
        tl.store(at + 2, w2, mask=lane < count)


@triton.jit
def num_real(pairs, num_tokens_ptr, top_k):
    """The pairs of real tokens; the others pad the batch."""
    real = pairs
    if num_tokens_ptr is not None:
        real = tl.minimum(pairs, tl.load(num_tokens_ptr) * top_k)
    return real


@triton.jit(do_not_specialize=["pairs", "top_k"])
def _count_tile(
    ids_ptr, num_tokens_ptr, counts_ptr, pairs, top_k, BINS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Count how many pairs of tile `program_id` each expert has."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    pair = tile * TILE + tl.arange(0, TILE)
    ids = tl.load(ids_ptr + pair, mask=pair < num_real(pairs, num_tokens_ptr, top_k), other=-1)
    tl.store(counts_ptr + tile * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS, mask=ids >= 0))


@triton.jit(
    do_not_specialize=["pairs", "max_blocks", "tiles", "top_k"], do_not_specialize_on_alignment=["resident_ptr"]
)
def _place_tile(
    ids_ptr,
    table_ptr,
    resident_ptr,
    num_tokens_ptr,
    sorted_ptr,
    block_pages_ptr,
    num_blocks_ptr,
    slots_ptr,
    counts_ptr,
    pairs,
    max_blocks,
    tiles,
    top_k,
    N: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place the pairs of tile `program_id` behind those of the tiles before it, and close every `tiles`-th expert."""
    tile = tl.program_id(0)
    bins = tl.arange(0, BINS)
    column = tl.arange(0, TILE)
    pair = tile * TILE + column
    ids = tl.load(ids_ptr + pair, mask=pair < num_real(pairs, num_tokens_ptr, top_k), other=-1)
    rank = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, TILE, STRIP):
        other = start + tl.arange(0, STRIP)
        theirs = tl.load(ids_ptr + tile * TILE + other, mask=tile * TILE + other < pairs, other=-1)
        is_before = (theirs[:, None] == ids[None, :]) & (other[:, None] < column[None, :])  # [STRIP, TILE]
        rank += tl.sum(is_before.to(tl.int32), axis=0)
    w1 = tl.load(table_ptr + bins * 3, mask=bins < N, other=0)
    w3 = tl.load(table_ptr + bins * 3 + 1, mask=bins < N, other=0)
    w2 = tl.load(table_ptr + bins * 3 + 2, mask=bins < N, other=0)
    is_late = False
    if resident_ptr is not None:
        is_late = tl.load(resident_ptr + bins, mask=bins < N, other=1) == 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before = tl.zeros([BINS], dtype=tl.int32)
    total = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, tiles, STRIP):
        other = start + tl.arange(0, STRIP)[:, None]
        counts = tl.load(counts_ptr + other * BINS + bins[None, :], mask=other < tiles, other=0)  # [STRIP, BINS]
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(other < tile, counts, 0), axis=0)
    blocks = (total + BLOCK_M - 1) // BLOCK_M
    if resident_ptr is None:
        first = tl.cumsum(blocks, 0) - blocks
    else:
        first = _starts(blocks, is_late)
    slot = tl.gather(first * BLOCK_M + before, tl.maximum(ids, 0), 0) + rank
    tl.store(sorted_ptr + slot, pair, mask=ids >= 0)
    tl.store(slots_ptr + pair, tl.where(ids >= 0, slot, -1), mask=pair < pairs)
    if tile == 0:
        num_blocks = tl.sum(blocks)
        tl.store(num_blocks_ptr, num_blocks)
        if resident_ptr is not None:
            tl.store(num_blocks_ptr + 1, num_blocks - tl.sum(tl.where(is_late, blocks, 0)))
        _name(block_pages_ptr, num_blocks, max_blocks - num_blocks, -1, -1, -1, LANES)
    is_mine = (bins % tiles == tile) & (blocks > 0)
    row = tl.arange(0, BLOCK_M)[None, :]
    last = (blocks - 1) * BLOCK_M
    at = sorted_ptr + (first * BLOCK_M + last)[:, None] + row
    tl.store(at, pairs, mask=is_mine[:, None] & (row >= (total - last)[:, None]))
    for block in range(tl.max(tl.where(is_mine, blocks, 0))):
        page_at = block_pages_ptr + (first + block) * 3
        is_block = is_mine & (block < blocks)
        tl.store(page_at, w1, mask=is_block)
        tl.store(page_at + 1, w3, mask=is_block)
        tl.store(page_at + 2, w2, mask=is_block)


_launch_by_expert, _launch_by_tile = Launcher(_place_experts), Launcher(_place_tile)
_launch_count = Launcher(_count_tile)
