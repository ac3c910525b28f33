"""What the paged MoE's two GEMMs share: which tile a program computes, and how it is read, multiplied and written.

Called by the kernels of `paged_moe`, in whose words and shapes it speaks; the matrices' places by `few_pairs` too.
"""

import triton
import triton.language as tl

W1 = tl.constexpr(0)
W3 = tl.constexpr(1)
W2 = tl.constexpr(2)
"""Places of an expert's matrices in its row of the page table."""


@triton.jit
def span(num_blocks_ptr, PART: tl.constexpr):
    """How many blocks come before those of a part, and how many it has."""
    before = 0
    if PART == "late":
        before = tl.load(num_blocks_ptr + 1)
        count = tl.load(num_blocks_ptr) - before
    elif PART == "resident":
        count = tl.load(num_blocks_ptr + 1)
    else:
        count = tl.load(num_blocks_ptr)
    return before, count


@triton.jit
def is_due(block, page_id, num_blocks_ptr, PART: tl.constexpr):
    """Whether a block, of as many as any routing can need, has rows that this launch computes."""
    if PART == "resident":
        due = block < tl.load(num_blocks_ptr + 1)
    else:
        due = page_id >= 0
    return due


@triton.jit
def place(tile, blocks, strips, GROUP_M: tl.constexpr):
    """The block and the strip of weight rows of a tile: GROUP_M blocks share a strip before the next one's turn."""
    group = tile // (GROUP_M * strips)
    first = group * GROUP_M
    size = tl.minimum(blocks - first, GROUP_M)
    within = tile % (GROUP_M * strips)
    return first + within % size, within // size


@triton.jit
def load_rows(x, is_row, k, col, COLS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The rows at pointers `x`, columns [k, k + BLOCK_K); [BLOCK_M, BLOCK_K]."""
    at = x[:, None] + k + col[None, :]
    if COLS % BLOCK_K == 0:
        rows = tl.load(at, mask=is_row[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=is_row[:, None] & (k + col[None, :] < COLS), other=0.0)
    return rows


@triton.jit
def load_weights(
    matrix, desc, page_id, start, row, k, col, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + BLOCK_N) and columns [k, k + BLOCK_K) of one matrix, zeros past its edges."""
    if TMA:
        weights = desc.load([page_id, start, k]).reshape(BLOCK_N, BLOCK_K)
    else:
        at = matrix + row[:, None] * COLS + k + col[None, :]
        if ROWS % BLOCK_N == 0 and COLS % BLOCK_K == 0:
            weights = tl.load(at)
        elif COLS % BLOCK_K == 0:
            weights = tl.load(at, mask=row[:, None] < ROWS, other=0.0)
        else:
            weights = tl.load(at, mask=(row[:, None] < ROWS) & (k + col[None, :] < COLS), other=0.0)
    return weights


@triton.jit
def dot(a, b, total, SWAP: tl.constexpr):
    """Add a · bᵀ to `total`, or its transpose: the matrix units want 64 rows, which weights always have."""
    if SWAP:
        total = tl.dot(b, a.T, total, input_precision="ieee")
    else:
        total = tl.dot(a, b.T, total, input_precision="ieee")
    return total


@triton.jit
def zeros(HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """An empty tile, as `dot` fills it."""
    if SWAP:
        total = tl.zeros([BLOCK_N, HEIGHT], dtype=tl.float32)
    else:
        total = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
    return total


@triton.jit
def store_tile(
    to_ptr, tile, slot, is_pair, row, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Write a tile to its slots' rows; those that pad a block keep what they held."""
    if SWAP:
        tile = tile.T
    at = to_ptr + slot.to(tl.int64)[:, None] * ROWS + row[None, :]
    if ROWS % BLOCK_N == 0:
        tl.store(at, tile, mask=is_pair[:, None])
    else:
        tl.store(at, tile, mask=is_pair[:, None] & (row[None, :] < ROWS))
