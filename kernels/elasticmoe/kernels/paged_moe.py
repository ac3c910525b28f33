"""The paged MoE on a GPU: two grouped GEMMs that read every expert's weights through the page table.

Called by `launch`, specified by `reference.paged_moe`. Shapes: T tokens, N experts, K top-k, d hidden, f intermediate;
a *pair* is `token * K + rank`, a *slot* a row of the order that `align` made, BLOCK_M slots are a block of one expert.
A tile is one block times BLOCK_N rows of a weight matrix, and looks its page up once. Matrices are [rows, cols] =
[f, d] (W1, W3) or [d, f] (W2), `page` elements apart in the arena, rows past the last are masked: BLOCK_N needn't
divide them. With TMA set, the two descriptors are [P, rows, cols] over the whole arena, so the hardware masks.

PART says which blocks a launch computes: "all", "resident" (the first ones) or "late" (those behind them, whose pages
the launches before don't read). How many there are only the device knows, so the late ones are a few programs' loop.
A tile is computed by the same function in all three, and has the same bits; the loop around it has no pipeline of its
own, so that it takes no more shared memory.
"""

import triton
import triton.language as tl

from elasticmoe.kernels.tiles import W1, W2, W3, dot, is_due, load_rows, load_weights, place, span, store_tile, zeros


@triton.jit(do_not_specialize=["pairs", "blocks"])
def gate_up_kernel(
    hidden_ptr,
    pages_ptr,
    pages_desc,
    act_ptr,
    sorted_ptr,
    block_pages_ptr,
    num_blocks_ptr,
    pairs,
    blocks,
    page,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVINGS: tl.constexpr,
    TMA: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
    PART: tl.constexpr,
):
    """act[slot, n] = silu(W1_n · x) * (W3_n · x), x the token of the slot's pair."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    strips = tl.cdiv(ROWS, BLOCK_N)
    if PART == "late":
        before, count = span(num_blocks_ptr, PART)
        for tile in tl.range(tl.program_id(0), count * strips, tl.num_programs(0), num_stages=1):
            block, strip = place(tile, count, strips, GROUP_M)
            block += before
            w1 = tl.load(block_pages_ptr + block * 3 + W1)
            w3 = tl.load(block_pages_ptr + block * 3 + W3)
            _gate_up_tile(
                block * BLOCK_M, strip * BLOCK_N, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr,
                pairs, page, TOP_K, ROWS, COLS, BLOCK_M, BLOCK_N, BLOCK_K, HALVINGS, TMA, SWAP,
            )  # fmt: skip
    else:
        block, strip = place(tl.program_id(0), blocks, strips, GROUP_M)
        w1 = tl.load(block_pages_ptr + block * 3 + W1)
        w3 = tl.load(block_pages_ptr + block * 3 + W3)
        if is_due(block, w1, num_blocks_ptr, PART):
            _gate_up_tile(
                block * BLOCK_M, strip * BLOCK_N, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr,
                pairs, page, TOP_K, ROWS, COLS, BLOCK_M, BLOCK_N, BLOCK_K, HALVINGS, TMA, SWAP,
            )  # fmt: skip


@triton.jit
def _gate_up_tile(
    first, start, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr, pairs, page, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HALVINGS: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """The tile of slots [first, first + HEIGHT) and weight rows [start, start + BLOCK_N), or of half the height."""
    if HALVINGS == 0:
        _gate_up(
            first, start, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr, pairs, page,
            TOP_K, ROWS, COLS, HEIGHT, BLOCK_N, BLOCK_K, TMA, SWAP,
        )  # fmt: skip
    elif tl.load(sorted_ptr + first + HEIGHT // 2) >= pairs:
        _gate_up_tile(
            first, start, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr, pairs, page,
            TOP_K, ROWS, COLS, HEIGHT // 2, BLOCK_N, BLOCK_K, HALVINGS - 1, TMA, SWAP,
        )  # fmt: skip
    else:
        _gate_up(
            first, start, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr, pairs, page,
            TOP_K, ROWS, COLS, HEIGHT, BLOCK_N, BLOCK_K, TMA, SWAP,
        )  # fmt: skip


@triton.jit
def _gate_up(
    first, start, w1, w3, hidden_ptr, pages_ptr, pages_desc, act_ptr, sorted_ptr, pairs, page, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    slot = first + tl.arange(0, HEIGHT)
    pair = tl.load(sorted_ptr + slot)
    is_pair = pair < pairs
    row = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_K)
    x = hidden_ptr + (pair // TOP_K).to(tl.int64) * COLS
    gate_ptr = pages_ptr + w1.to(tl.int64) * page
    up_ptr = pages_ptr + w3.to(tl.int64) * page
    gate = zeros(HEIGHT, BLOCK_N, SWAP)
    up = zeros(HEIGHT, BLOCK_N, SWAP)
    for k in range(0, COLS, BLOCK_K):
        a = load_rows(x, is_pair, k, col, COLS, BLOCK_K)
        b = load_weights(gate_ptr, pages_desc, w1, start, row, k, col, ROWS, COLS, BLOCK_N, BLOCK_K, TMA)
        c = load_weights(up_ptr, pages_desc, w3, start, row, k, col, ROWS, COLS, BLOCK_N, BLOCK_K, TMA)
        gate = dot(a, b, gate, SWAP)
        up = dot(a, c, up, SWAP)
    act = (gate / (1 + tl.exp(-gate)) * up).to(act_ptr.dtype.element_ty)
    store_tile(act_ptr, act, slot, is_pair, row, ROWS, BLOCK_N, SWAP)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def down_kernel(
    act_ptr,
    rows_desc,
    pages_ptr,
    pages_desc,
    products_ptr,
    sorted_ptr,
    block_pages_ptr,
    num_blocks_ptr,
    pairs,
    blocks,
    page,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVINGS: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
    PART: tl.constexpr,
):
    """products[slot, n] = W2_n · act[slot]; persistent programs read the slots' rows by descriptor too."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    strips = tl.cdiv(ROWS, BLOCK_N)
    if PERSISTENT or PART == "late":
        before, count = span(num_blocks_ptr, PART)
        stages: tl.constexpr = None if PERSISTENT else 1
        for tile in tl.range(
            tl.program_id(0), count * strips, tl.num_programs(0), num_stages=stages, flatten=PERSISTENT
        ):
            block, strip = place(tile, count, strips, GROUP_M)
            block += before
            w2 = tl.load(block_pages_ptr + block * 3 + W2)
            if PERSISTENT:
                _down(
                    block * BLOCK_M, strip * BLOCK_N, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr,
                    sorted_ptr, pairs, page, ROWS, COLS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, PERSISTENT, SWAP,
                )  # fmt: skip
            else:
                _down_tile(
                    block * BLOCK_M, strip * BLOCK_N, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr,
                    sorted_ptr, pairs, page, ROWS, COLS, BLOCK_M, BLOCK_N, BLOCK_K, HALVINGS, TMA, SWAP,
                )  # fmt: skip
    else:
        block, strip = place(tl.program_id(0), blocks, strips, GROUP_M)
        w2 = tl.load(block_pages_ptr + block * 3 + W2)
        if is_due(block, w2, num_blocks_ptr, PART):
            _down_tile(
                block * BLOCK_M, strip * BLOCK_N, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr,
                sorted_ptr, pairs, page, ROWS, COLS, BLOCK_M, BLOCK_N, BLOCK_K, HALVINGS, TMA, SWAP,
            )  # fmt: skip


@triton.jit
def _down_tile(
    first, start, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr, sorted_ptr, pairs, page,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HALVINGS: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """As `_gate_up_tile`."""
    if HALVINGS == 0:
        _down(
            first, start, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr, sorted_ptr, pairs, page,
            ROWS, COLS, HEIGHT, BLOCK_N, BLOCK_K, TMA, False, SWAP,
        )  # fmt: skip
    elif tl.load(sorted_ptr + first + HEIGHT // 2) >= pairs:
        _down_tile(
            first, start, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr, sorted_ptr, pairs, page,
            ROWS, COLS, HEIGHT // 2, BLOCK_N, BLOCK_K, HALVINGS - 1, TMA, SWAP,
        )  # fmt: skip
    else:
        _down(
            first, start, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr, sorted_ptr, pairs, page,
            ROWS, COLS, HEIGHT, BLOCK_N, BLOCK_K, TMA, False, SWAP,
        )  # fmt: skip


@triton.jit
def _down(
    first, start, w2, act_ptr, rows_desc, pages_ptr, pages_desc, products_ptr, sorted_ptr, pairs, page,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, ROWS_TMA: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    slot = first + tl.arange(0, HEIGHT)
    is_pair = tl.load(sorted_ptr + slot) < pairs
    row = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_K)
    x = act_ptr + slot.to(tl.int64) * COLS
    down_ptr = pages_ptr + w2.to(tl.int64) * page
    product = zeros(HEIGHT, BLOCK_N, SWAP)
    for k in range(0, COLS, BLOCK_K):
        if ROWS_TMA:
            a = rows_desc.load([first, k])
        else:
            a = load_rows(x, is_pair, k, col, COLS, BLOCK_K)
        b = load_weights(down_ptr, pages_desc, w2, start, row, k, col, ROWS, COLS, BLOCK_N, BLOCK_K, TMA)
        product = dot(a, b, product, SWAP)
    store_tile(products_ptr, product.to(products_ptr.dtype.element_ty), slot, is_pair, row, ROWS, BLOCK_N, SWAP)


@triton.jit
def sum_kernel(
    products_ptr,
    weights_ptr,
    slots_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = sum over k, in order, of weights[t, k] * products[slots[t, k]]; a masked pair adds nothing."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + k)
        weight = tl.load(weights_ptr + token * TOP_K + k)
        at = products_ptr + slot.to(tl.int64) * COLS + col
        total += weight * tl.load(at, mask=(col < COLS) & (slot >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * COLS + col, total.to(out_ptr.dtype.element_ty), mask=col < COLS)
