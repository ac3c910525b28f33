"""The paged MoE for batches so small that hardly two pairs share an expert: two launches, nothing sorted.

Called by `launch`, specified by `reference.paged_moe`; names and shapes as in `paged_moe`. A program streams rows of
one pair's matrices past one token with plain multiply-adds; the second kernel sums a token's pairs as it goes.
"""

import triton
import triton.language as tl

from elasticmoe.kernels.tiles import W1, W2, W3


@triton.jit
def gate_up_few_kernel(
    hidden_ptr,
    pages_ptr,
    act_ptr,
    table_ptr,
    ids_ptr,
    num_tokens_ptr,
    page,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[pair, n] = silu(W1_n · x) * (W3_n · x): one pair a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = _expert(ids_ptr, pair, num_tokens_ptr, TOP_K)
    if expert >= 0:
        row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = row.to(tl.int64)[:, None] * COLS + tl.arange(0, BLOCK_K)[None, :]
        is_row = row[:, None] < ROWS
        gate_ptr = pages_ptr + tl.load(table_ptr + expert * 3 + W1).to(tl.int64) * page + at
        up_ptr = pages_ptr + tl.load(table_ptr + expert * 3 + W3).to(tl.int64) * page + at
        x_ptr = hidden_ptr + (pair // TOP_K).to(tl.int64) * COLS + tl.arange(0, BLOCK_K)
        gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for k in tl.static_range(0, COLS, BLOCK_K):
            is_col = k + tl.arange(0, BLOCK_K) < COLS
            x = tl.load(x_ptr + k, mask=is_col, other=0.0).to(tl.float32)[None, :]
            mask = is_row & is_col[None, :]
            gate += x * tl.load(gate_ptr + k, mask=mask, other=0.0).to(tl.float32)
            up += x * tl.load(up_ptr + k, mask=mask, other=0.0).to(tl.float32)
        g = tl.sum(gate, axis=1)
        act = g / (1 + tl.exp(-g)) * tl.sum(up, axis=1)
        tl.store(act_ptr + pair.to(tl.int64) * ROWS + row, act.to(act_ptr.dtype.element_ty), mask=row < ROWS)


@triton.jit
def down_few_kernel(
    act_ptr,
    pages_ptr,
    weights_ptr,
    out_ptr,
    table_ptr,
    ids_ptr,
    num_tokens_ptr,
    page,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = sum over k, in order, of weights[t, k] * (W2_n · act[t, k]): one token a program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row.to(tl.int64)[:, None] * COLS + tl.arange(0, BLOCK_K)[None, :]
    is_row = row[:, None] < ROWS
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = _expert(ids_ptr, pair, num_tokens_ptr, TOP_K)
        page_id = tl.load(table_ptr + expert * 3 + W2, mask=expert >= 0, other=0)
        down_ptr = pages_ptr + page_id.to(tl.int64) * page + at
        x_ptr = act_ptr + pair.to(tl.int64) * COLS + tl.arange(0, BLOCK_K)
        product = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in tl.static_range(0, COLS, BLOCK_K):
            is_col = (start + tl.arange(0, BLOCK_K) < COLS) & (expert >= 0)
            x = tl.load(x_ptr + start, mask=is_col, other=0.0).to(tl.float32)[None, :]
            weights = tl.load(down_ptr + start, mask=is_row & is_col[None, :], other=0.0).to(tl.float32)
            product += x * weights
        rounded = tl.sum(product, axis=1).to(out_ptr.dtype.element_ty).to(tl.float32)
        total += tl.load(weights_ptr + pair) * rounded
    tl.store(out_ptr + token.to(tl.int64) * ROWS + row, total.to(out_ptr.dtype.element_ty), mask=row < ROWS)


@triton.jit
def _expert(ids_ptr, pair, num_tokens_ptr, TOP_K: tl.constexpr):
    """The expert of a pair, -1 where the pair is masked or its token pads the batch."""
    expert = tl.load(ids_ptr + pair)
    if num_tokens_ptr is not None:
        expert = tl.where(pair < tl.load(num_tokens_ptr) * TOP_K, expert, -1)
    return expert
