"""Fetches offloaded experts without the host: one small kernel sees what a batch routed to, and copies what is missing.

Called beside the paged MoE, on a stream of its own; specified by `reference.fetch_needed`. Shapes: T tokens, N experts,
K top-k, E bytes of a matrix. Grid and addresses depend on shapes alone, and nothing returns to the host: a CUDA graph
may hold all of it, while table, residency, routing and the number of real tokens change between replays.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from elasticmoe.kernels.align import num_real
from elasticmoe.kernels.launcher import Launcher, next_power_of_2

TILE = 1024
"""The most pairs that are looked at in one go."""
VECTOR_BYTES = 16
"""The widest load; what isn't aligned to it is copied in narrower words."""
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""What a kernel's pointers count, by its bytes."""
MAX_BLOCKS = 8
"""The most thread blocks that a fetch may take from the kernels beside it."""
HITS, MISSED, PREDICTED, FORESEEN, COPY_NS, EXPOSED_NS = range(6)
"""Places in `Counts.totals`."""
NUM_TOTALS = 6


@dataclass(frozen=True, slots=True)
class Masters:
    """One layer's experts in host memory: N times W1, W3 and W2, without gaps."""

    address: int
    """Of the layer's first byte, as the device sees it: memory that is pinned, and mapped for the device."""
    matrix_bytes: int
    """E."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What fetches add up on the device; int64, at fixed addresses."""

    routed: torch.Tensor
    """[N]: real tokens routed to each expert of the layer."""
    totals: torch.Tensor
    """[NUM_TOTALS], of all layers: routed pairs that found their expert resident; experts copied once they were routed
    to, and ahead; of these, those that were routed to then; nanoseconds that the copies took, each fetch for itself
    where two run at once, and that `stamp`'s stream waited for them."""
    clock: torch.Tensor
    """[2], of all layers: when the computation came to wait, and when what it waits for had come, 0 if nothing did."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is launched; a thread copies chunk_bytes / (32 * num_warps) bytes in one go."""

    num_blocks: int = MAX_BLOCKS
    """At most `MAX_BLOCKS`."""
    chunk_bytes: int = 32768
    """A power of two."""
    num_warps: int = 8
    num_stages: int = 1
    """Above 1, chunks go through shared memory, this many less one at once, which have to fit in it."""


DEFAULT = Tuning()


def fetch_needed(
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    masters: Masters,
    storage: torch.Tensor,
    granule_bytes: int,
    *,
    num_tokens: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
    is_ahead: bool = False,
    counts: Counts | None = None,
    is_awaited: bool = False,
    tuning: Tuning = DEFAULT,
) -> None:
    """Copy each expert that `topk_ids` [T, K] int names and that isn't resident to its row's pages; one launch.

    `table` [N, 3] int32 and `resident` [N] bool are the layer's, `storage` uint8 [bytes] the arena, in which page p
    starts at p * `granule_bytes`. Of the batch only the first `num_tokens` [1] int32 tokens are real, the others pad
    it; ids that are no expert's, as -1, need nothing. `held` [N] bool are experts that need no copy since they were
    fetched ahead: with `is_ahead` the call, of a prediction, notes there what it copies; that of the routing comes
    after it. `is_awaited` says that this stream computes nothing meanwhile, so that all of its time counts as waited
    for. Whoever computes from the pages launches after this; whoever computed from what they held before launched
    before it.
    """
    types = (table.dtype, resident.dtype, storage.dtype)
    assert types == (torch.int32, torch.bool, torch.uint8), f"table, resident and storage are {types}"
    for each in (topk_ids, table, resident):
        assert each.is_contiguous(), f"{each.shape} with strides {each.stride()}"
    assert 1 <= tuning.num_blocks <= MAX_BLOCKS, f"{tuning.num_blocks} thread blocks, of at most {MAX_BLOCKS}"
    assert held is not None or not is_ahead, "nowhere to note what is fetched ahead"
    align = math.gcd(VECTOR_BYTES, masters.address, masters.matrix_bytes, granule_bytes, storage.data_ptr())
    pairs, num_experts = topk_ids.numel(), table.shape[0]
    tile = min(max(next_power_of_2(pairs), 64), TILE)
    arrays = (None, None, None) if counts is None else (counts.routed, counts.totals, counts.clock)
    _launch_fetch(
        (tuning.num_blocks,), topk_ids, table, resident, num_tokens, held, *arrays, storage, masters.address,
        granule_bytes, pairs, topk_ids.shape[1], num_experts, next_power_of_2(num_experts), tile, masters.matrix_bytes,
        WORDS[min(align, 8)], align, tuning.chunk_bytes, tuning.num_stages, is_ahead, counts is not None,
        storage.is_cuda, is_awaited, num_warps=tuning.num_warps,
    )  # fmt: skip


def stamp(counts: Counts) -> None:
    """Note on the computing stream that it comes to wait for a fetch; the next fetch counts how long it did."""
    if counts.clock.is_cuda:
        _launch_stamp((1,), counts.clock, num_warps=1)


@triton.jit(do_not_specialize=["address", "granule", "pairs"])
def _fetch(
    ids_ptr,
    table_ptr,
    resident_ptr,
    num_tokens_ptr,
    held_ptr,
    routed_ptr,
    totals_ptr,
    clock_ptr,
    storage_ptr,
    address: tl.int64,
    granule: tl.int64,
    pairs,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_AHEAD: tl.constexpr,
    COUNTS: tl.constexpr,
    TIMED: tl.constexpr,
    IS_AWAITED: tl.constexpr,
):
    """Copy every `num_programs`-th chunk of each needed expert; each program finds out by itself what is needed."""
    pairs = num_real(pairs, num_tokens_ptr, TOP_K)
    expert = tl.arange(0, BINS)
    is_expert = expert < N
    routed = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
        routed += tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < N))
    resident = tl.load(resident_ptr + expert, mask=is_expert, other=1) != 0
    needed = (routed > 0) & ~resident
    foreseen = tl.full([], 0, dtype=tl.int32)
    if held_ptr is not None and not IS_AHEAD:
        is_held = tl.load(held_ptr + expert, mask=is_expert, other=0) != 0
        foreseen = tl.sum((needed & is_held).to(tl.int32))
        needed = needed & ~is_held
    if IS_AHEAD:
        tl.store(held_ptr + expert, needed, mask=is_expert & (tl.program_id(0) == 0))
    count = tl.sum(needed.to(tl.int32))
    begin = tl.full([], 0, dtype=tl.int64)
    if COUNTS:
        begin = _count(
            routed, resident, count, foreseen, routed_ptr, totals_ptr, clock_ptr, N, BINS, IS_AHEAD, TIMED
        )  # fmt: skip
    place = tl.cumsum(needed.to(tl.int32), 0) - 1
    for entry in range(count):
        this = tl.sum(tl.where(needed & (place == entry), expert, 0))
        _copy(this, table_ptr, storage_ptr, address, granule, MATRIX, WORD, ALIGN, CHUNK, STAGES)
    if COUNTS and TIMED:
        _count_time(begin, count, held_ptr, totals_ptr, clock_ptr, IS_AHEAD, IS_AWAITED)


@triton.jit
def _copy(
    expert, table_ptr, storage_ptr, address, granule, MATRIX: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's chunks of an expert's three matrices."""
    word: tl.constexpr = WORD.primitive_bitwidth // 8
    chunks: tl.constexpr = (MATRIX + CHUNK - 1) // CHUNK
    w1 = tl.load(table_ptr + expert * 3)
    w3 = tl.load(table_ptr + expert * 3 + 1)
    w2 = tl.load(table_ptr + expert * 3 + 2)
    master = address + expert.to(tl.int64) * (3 * MATRIX)
    for chunk in tl.range(tl.program_id(0), 3 * chunks, tl.num_programs(0), num_stages=STAGES):
        matrix = chunk // chunks
        page = tl.where(matrix == 0, w1, tl.where(matrix == 1, w3, w2)).to(tl.int64)
        src = (master + matrix * MATRIX).to(tl.pointer_type(WORD))
        dst = (storage_ptr + page * granule).to(tl.pointer_type(WORD))
        at = (chunk - matrix * chunks) * (CHUNK // word) + tl.arange(0, CHUNK // word)
        src = tl.multiple_of(src, ALIGN) + at
        dst = tl.multiple_of(dst, ALIGN) + at
        if MATRIX % CHUNK == 0:  # read once: of the ways to copy that were timed, this eviction is the fastest
            tl.store(dst, tl.load(src, eviction_policy="evict_first"))
        else:
            is_word = at < MATRIX // word
            tl.store(dst, tl.load(src, mask=is_word, eviction_policy="evict_first"), mask=is_word)


@triton.jit
def _count(
    routed, resident, count, foreseen, routed_ptr, totals_ptr, clock_ptr, N: tl.constexpr, BINS: tl.constexpr,
    IS_AHEAD: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """The first program adds up what was routed and will be copied; returns the time."""
    begin = tl.full([], 0, dtype=tl.int64)
    if tl.program_id(0) == 0:
        if IS_AHEAD:
            _add(totals_ptr, 2, count)
        else:
            at = routed_ptr + tl.arange(0, BINS)
            is_expert = tl.arange(0, BINS) < N
            tl.store(at, tl.load(at, mask=is_expert, other=0) + routed, mask=is_expert)
            _add(totals_ptr, 0, tl.sum(tl.where(resident, routed, 0)))
            _add(totals_ptr, 1, count)
            _add(totals_ptr, 3, foreseen)
            if TIMED:
                waited, ended = tl.load(clock_ptr), tl.load(clock_ptr + 1)
                _add(totals_ptr, 5, tl.where(ended > waited, ended - waited, 0))
                tl.store(clock_ptr + 1, 0)
        if TIMED:
            begin = tl.extra.cuda.globaltimer().to(tl.int64)
    return begin


@triton.jit
def _count_time(
    begin, count, held_ptr, totals_ptr, clock_ptr, IS_AHEAD: tl.constexpr, IS_AWAITED: tl.constexpr
):  # fmt: skip
    """The first program adds up how long it copied, which is as long as the others, and notes when it ended."""
    if tl.program_id(0) == 0:
        tl.debug_barrier()
        end = tl.extra.cuda.globaltimer().to(tl.int64)
        copied = tl.where(count > 0, end - begin, 0)
        _add(totals_ptr, 4, copied)
        if IS_AWAITED:
            _add(totals_ptr, 5, copied)
        elif not IS_AHEAD:
            if held_ptr is None:
                end = tl.where(count > 0, end, 0)
            tl.store(clock_ptr + 1, end)  # with a fetch ahead of it, this one ends after that, which may be waited for


@triton.jit
def _add(totals_ptr, place: tl.constexpr, value):
    """Add to one of the totals, by the place that HITS … EXPOSED_NS name: a fetch ahead may do so at the same time."""
    tl.atomic_add(totals_ptr + place, value.to(tl.int64), sem="relaxed")


@triton.jit
def _stamp(clock_ptr):
    """Write the time."""
    tl.store(clock_ptr, tl.extra.cuda.globaltimer().to(tl.int64))


_launch_fetch, _launch_stamp = Launcher(_fetch), Launcher(_stamp)
