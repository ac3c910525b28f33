"""Fetches offloaded experts without the host: a list made on the device, and a kernel that copies what it says.

Called where the engine would otherwise ask the device which experts a batch needs; specified by `reference`. Shapes:
T tokens, N experts, K top-k, S slots, R rounds, E bytes of a matrix. Grids and addresses depend on shapes alone, and
nothing returns to the host: a CUDA graph may hold all of it, while table, slots and routing change between replays.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from elasticmoe.kernels.reference import Needed, num_rounds

__all__ = ["Masters", "Needed", "Tuning", "fetch", "list_needed", "num_rounds", "round_ids"]

TILE = 1024
"""Pairs that are looked at in one go."""
VECTOR_BYTES = 16
"""The widest load; what isn't aligned to it is copied in narrower words."""
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""What a kernel's pointers count, by its bytes."""
MAX_BLOCKS = 8
"""The most thread blocks that a fetch may take from the kernels beside it."""


@dataclass(frozen=True, slots=True)
class Masters:
    """One layer's experts in host memory: N times W1, W3 and W2, without gaps."""

    address: int
    """Of the layer's first byte, as the device sees it: memory that is pinned, and mapped for the device."""
    matrix_bytes: int
    """E."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the copy kernel is launched; a thread copies chunk_bytes / (32 * num_warps) bytes in one go."""

    num_blocks: int = MAX_BLOCKS
    """At most `MAX_BLOCKS`."""
    chunk_bytes: int = 32768
    """A power of two."""
    num_warps: int = 8
    num_stages: int = 1
    """Above 1, chunks go through shared memory, this many less one at once, which have to fit in it."""


DEFAULT = Tuning()


def list_needed(
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    slots: torch.Tensor,
    *,
    rounds: int = 1,
    before: Needed | None = None,
) -> Needed:
    """The list as the reference makes it, rounds and `before` included; in stream order, one launch.

    `topk_ids` [T, K] int, `table` [N, 3] int32, `resident` [N] bool, `slots` [S, 3] int32, contiguous. More needed
    experts than slots are worked in rounds, of which each takes a `fetch`, a `round_ids` and a paged MoE.
    """
    num_experts = table.shape[0]
    types = (table.dtype, resident.dtype, slots.dtype)
    assert types == (torch.int32, torch.bool, torch.int32), f"table, resident and slots are {types}"
    for each in (topk_ids, table, resident, slots):
        assert each.is_contiguous(), f"{each.shape} with strides {each.stride()}"
    made = _empty_list(table, rounds)
    _list[(1,)](
        topk_ids, table, resident, slots, *((None, None) if before is None else (before.places, before.count)),
        made.experts, made.pages, made.places, made.table, made.spans, made.count, topk_ids.numel(), slots.shape[0],
        num_experts, triton.next_power_of_2(num_experts), triton.next_power_of_2(max(slots.shape[0], 1)), rounds,
        triton.next_power_of_2(rounds), TILE, before is not None, num_warps=8,
    )  # fmt: skip
    return made


def round_ids(topk_ids: torch.Tensor, needed: Needed, index: int) -> torch.Tensor:
    """The ids [T, K] int32 of round `index`, -1 for the pairs of the other rounds; one launch."""
    assert topk_ids.is_contiguous(), f"ids with strides {topk_ids.stride()}"
    ids, pairs = torch.empty_like(topk_ids, dtype=torch.int32), topk_ids.numel()
    if pairs:
        _round[(triton.cdiv(pairs, TILE),)](
            topk_ids, needed.places, needed.spans, ids, pairs, index, needed.places.shape[0], TILE
        )
    return ids


def fetch(
    needed: Needed,
    index: int,
    masters: Masters,
    storage: torch.Tensor,
    granule_bytes: int,
    tuning: Tuning = DEFAULT,
) -> None:
    """Copy the entries of round `index` to their pages in `storage`, uint8 [bytes]; in stream order, one launch.

    Page p starts at p * `granule_bytes`. Whoever computes from the pages launches after this; whoever computed from
    what they held before launched before it.
    """
    assert storage.dtype == torch.uint8, f"an arena of {storage.dtype}"
    assert 1 <= tuning.num_blocks <= MAX_BLOCKS, f"{tuning.num_blocks} thread blocks, of at most {MAX_BLOCKS}"
    align = math.gcd(VECTOR_BYTES, masters.address, masters.matrix_bytes, granule_bytes, storage.data_ptr())
    _fetch[(tuning.num_blocks,)](
        needed.experts, needed.pages, needed.spans, storage, masters.address, granule_bytes, index,
        masters.matrix_bytes, WORDS[min(align, 8)], align, tuning.chunk_bytes, tuning.num_stages,
        num_warps=tuning.num_warps,
    )  # fmt: skip


def _empty_list(table: torch.Tensor, rounds: int) -> Needed:
    def make(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=table.device)

    num_experts = table.shape[0]
    return Needed(
        make(num_experts), make(num_experts, 3), make(num_experts), make(num_experts, 3), make(rounds, 2), make(1)
    )


@triton.jit(do_not_specialize=["pairs"])
def _list(
    ids_ptr,
    table_ptr,
    resident_ptr,
    slots_ptr,
    held_places_ptr,
    held_count_ptr,
    experts_ptr,
    pages_ptr,
    places_ptr,
    made_table_ptr,
    spans_ptr,
    count_ptr,
    pairs,
    NUM_SLOTS: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    R: tl.constexpr,
    ROUNDS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """Write the whole list: one program, an expert a lane, so that places are a running sum."""
    expert = tl.arange(0, BINS)
    is_expert = expert < N
    routed = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
        routed += tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < N))
    resident = tl.load(resident_ptr + expert, mask=is_expert, other=1) != 0
    slot = tl.arange(0, SLOTS)
    alive = tl.sum((tl.load(slots_ptr + slot * 3, mask=slot < NUM_SLOTS, other=-1) >= 0).to(tl.int32))
    place = tl.full([BINS], -1, dtype=tl.int32)
    held = 0
    if HAS_BEFORE:
        held = tl.minimum(tl.load(held_count_ptr), alive)
        place = tl.load(held_places_ptr + expert, mask=is_expert, other=-1)
        place = tl.where(place < held, place, -1)
    is_new = (routed > 0) & ~resident & (place < 0)
    place = tl.where(is_new, held + tl.cumsum(is_new.to(tl.int32), 0) - 1, place)
    count = held + tl.sum(is_new.to(tl.int32))
    is_listed = place >= 0
    tl.store(count_ptr, count)
    tl.store(places_ptr + expert, place, mask=is_expert)
    tl.store(experts_ptr + place, expert, mask=is_listed)
    tl.store(experts_ptr + expert, -1, mask=is_expert & (expert >= count))
    taken = place % tl.maximum(alive, 1) * 3
    has_slot = is_listed & (alive > 0)
    for matrix in tl.static_range(3):
        own = tl.load(table_ptr + expert * 3 + matrix, mask=is_expert, other=-1)
        page = tl.load(slots_ptr + taken + matrix, mask=has_slot, other=-1)
        tl.store(made_table_ptr + expert * 3 + matrix, tl.where(has_slot, page, own), mask=is_expert)
        tl.store(pages_ptr + place * 3 + matrix, page, mask=is_listed)
        tl.store(pages_ptr + expert * 3 + matrix, -1, mask=is_expert & (expert >= count))
    index = tl.arange(0, ROUNDS)
    first = tl.where(index == 0, held, tl.minimum(index * alive, count))
    tl.store(spans_ptr + index * 2, first, mask=index < R)
    tl.store(spans_ptr + index * 2 + 1, tl.minimum((index + 1) * alive, count), mask=index < R)


@triton.jit(do_not_specialize=["pairs", "index"])
def _round(ids_ptr, places_ptr, spans_ptr, to_ptr, pairs, index, N: tl.constexpr, TILE: tl.constexpr):
    """Mask the pairs of tile `program_id` that belong to other rounds."""
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    is_expert = (ids >= 0) & (ids < N)
    place = tl.load(places_ptr + ids, mask=is_expert, other=-1)
    first = tl.load(spans_ptr + index * 2)
    last = tl.load(spans_ptr + index * 2 + 1)
    is_in = is_expert & (place < last) & ((index == 0) | (place >= first))
    tl.store(to_ptr + pair, tl.where(is_in, ids, -1), mask=pair < pairs)


@triton.jit(do_not_specialize=["address", "granule", "index"])
def _fetch(
    experts_ptr,
    pages_ptr,
    spans_ptr,
    storage_ptr,
    address: tl.int64,
    granule: tl.int64,
    index,
    MATRIX: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Copy every `num_programs`-th chunk of each entry; all sizes are bytes."""
    word: tl.constexpr = WORD.primitive_bitwidth // 8
    chunks: tl.constexpr = (MATRIX + CHUNK - 1) // CHUNK
    first = tl.load(spans_ptr + index * 2)
    last = tl.load(spans_ptr + index * 2 + 1)
    for entry in range(first, last):
        w1 = tl.load(pages_ptr + entry * 3)
        w3 = tl.load(pages_ptr + entry * 3 + 1)
        w2 = tl.load(pages_ptr + entry * 3 + 2)
        master = address + tl.load(experts_ptr + entry).to(tl.int64) * (3 * MATRIX)
        for chunk in tl.range(tl.program_id(0), 3 * chunks, tl.num_programs(0), num_stages=STAGES):
            matrix = chunk // chunks
            page = tl.where(matrix == 0, w1, tl.where(matrix == 1, w3, w2)).to(tl.int64)
            src = (master + matrix * MATRIX).to(tl.pointer_type(WORD))
            dst = (storage_ptr + page * granule).to(tl.pointer_type(WORD))
            at = (chunk - matrix * chunks) * (CHUNK // word) + tl.arange(0, CHUNK // word)
            src = tl.multiple_of(src, ALIGN) + at
            dst = tl.multiple_of(dst, ALIGN) + at
            if MATRIX % CHUNK == 0:
                tl.store(dst, tl.load(src))
            else:
                is_word = at < MATRIX // word
                tl.store(dst, tl.load(src, mask=is_word), mask=is_word)
