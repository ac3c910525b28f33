"""Kernels that read experts over the bus otherwise than the fetch kernel does; `bench.fetch.variants` launches them.

Each copies the first `num` matrices at `address`, one after the other, to the pages of `table_ptr` [num] int32, where
page p starts at p * `granule`. Shapes: E (MATRIX) bytes of a matrix.
"""
# Triton's pointers and tensors have no types in Python:
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917

import triton
import triton.language as tl

BULK_STAGES, BULK_STAGE_BYTES = 4, 8192
"""Of a thread block's shared memory in `bulk`: the most that needs no opt-in is 48 KiB."""
BULK_TRIES = 1 << 16
"""How often a chunk is waited for before the copy is given up, and found wrong."""
READ = "ld.global.L1::no_allocate.L2::256B.v2.b64 {$0, $1}, [$2];"
"""16 bytes; whoever misses the L2 has it fetch 256."""
AHEAD = (
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)
"""One thread has the L2 fetch the next chunk while this one is copied."""
BULK = f"""
{{
.shared .align 128 .b8 stage[{BULK_STAGES * BULK_STAGE_BYTES}];
.shared .align 8 .b8 bars[{BULK_STAGES * 8}];
.reg .pred p; .reg .b32 t, at, bar, left, k, phase, slot, ask, tries; .reg .b64 to, asked;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra DONE;
mov.u32 k, 0;
INIT:
  shl.b32 t, k, 3; mov.u32 bar, bars; add.u32 bar, bar, t;
  mbarrier.init.shared::cta.b64 [bar], 1;
  add.u32 k, k, 1; setp.lt.u32 p, k, {BULK_STAGES};
  @p bra INIT;
fence.proxy.async.shared::cta;
mov.u64 asked, $1; mov.u64 to, $2; mov.u32 left, $3;
mov.u32 ask, 0;
FILL:
  setp.ge.u32 p, ask, left; @p bra FILLED;
  setp.ge.u32 p, ask, {BULK_STAGES - 1}; @p bra FILLED;
  shl.b32 t, ask, 3; mov.u32 bar, bars; add.u32 bar, bar, t;
  mul.lo.u32 t, ask, {BULK_STAGE_BYTES}; mov.u32 at, stage; add.u32 at, at, t;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {BULK_STAGE_BYTES};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [asked], {BULK_STAGE_BYTES}, [bar];
  add.u64 asked, asked, {BULK_STAGE_BYTES}; add.u32 ask, ask, 1;
  bra FILL;
FILLED:
mov.u32 k, 0;
NEXT:
  setp.ge.u32 p, k, left; @p bra DRAIN;
  rem.u32 slot, k, {BULK_STAGES}; div.u32 phase, k, {BULK_STAGES}; and.b32 phase, phase, 1;
  shl.b32 t, slot, 3; mov.u32 bar, bars; add.u32 bar, bar, t;
  mul.lo.u32 t, slot, {BULK_STAGE_BYTES}; mov.u32 at, stage; add.u32 at, at, t;
  mov.u32 tries, 0;
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 p, [bar], phase;
  @p bra ARRIVED;
  add.u32 tries, tries, 1; setp.lt.u32 p, tries, {BULK_TRIES};
  @p bra WAIT;
  bra DRAIN;
ARRIVED:
  cp.async.bulk.global.shared::cta.bulk_group [to], [at], {BULK_STAGE_BYTES};
  cp.async.bulk.commit_group;
  add.u64 to, to, {BULK_STAGE_BYTES}; add.u32 k, k, 1;
  setp.ge.u32 p, ask, left; @p bra NEXT;
  cp.async.bulk.wait_group.read 1;
  rem.u32 slot, ask, {BULK_STAGES};
  shl.b32 t, slot, 3; mov.u32 bar, bars; add.u32 bar, bar, t;
  mul.lo.u32 t, slot, {BULK_STAGE_BYTES}; mov.u32 at, stage; add.u32 at, at, t;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {BULK_STAGE_BYTES};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [asked], {BULK_STAGE_BYTES}, [bar];
  add.u64 asked, asked, {BULK_STAGE_BYTES}; add.u32 ask, ask, 1;
  bra NEXT;
DRAIN:
cp.async.bulk.wait_group 0;
mov.u32 k, 0;
GONE:
  shl.b32 t, k, 3; mov.u32 bar, bars; add.u32 bar, bar, t;
  mbarrier.inval.shared::cta.b64 [bar];
  add.u32 k, k, 1; setp.lt.u32 p, k, {BULK_STAGES};
  @p bra GONE;
DONE:
mov.u32 $0, 0;
}}
"""
"""A thread reads and writes whole spans by the bulk copy engine of its multiprocessor: [$1] to [$2], $3 stages full."""


@triton.jit(do_not_specialize=["address", "granule", "num"])  # type: ignore[untyped-decorator]
def by_words(  # type: ignore[no-untyped-def]
    table_ptr, storage_ptr, address: tl.int64, granule: tl.int64, num, MATRIX: tl.constexpr, CHUNK: tl.constexpr,
    LOAD: tl.constexpr, LOAD_KEEP: tl.constexpr, STORE: tl.constexpr, STORE_KEEP: tl.constexpr, ASM: tl.constexpr,
    AHEAD: tl.constexpr, IS_STRIP: tl.constexpr,
):  # fmt: skip
    """Copy chunks of the first `num` matrices, 16 bytes a load."""
    chunks: tl.constexpr = MATRIX // CHUNK
    first, last, step = tl.program_id(0), num * chunks, tl.num_programs(0)
    if IS_STRIP:
        share = (last + step - 1) // step
        first, last, step = first * share, tl.minimum(first * share + share, last), 1
    for piece in range(first, last, step):
        matrix = piece // chunks
        page = tl.load(table_ptr + matrix).to(tl.int64)
        at = (piece - matrix * chunks).to(tl.int64) * CHUNK
        src = address + matrix.to(tl.int64) * MATRIX + at
        dst = tl.multiple_of((storage_ptr + page * granule + at).to(tl.pointer_type(tl.int64)), 16)
        if AHEAD != "":
            later = tl.minimum(piece + step, last - 1).to(tl.int64)  # chunks fill matrices, which have no gaps
            asked = address + later * CHUNK
            tl.inline_asm_elementwise(AHEAD, "=r,l,r", [asked, CHUNK], dtype=tl.int32, is_pure=False, pack=1)
        if ASM != "":
            pair = tl.arange(0, CHUNK // 16)
            low, high = tl.inline_asm_elementwise(
                ASM, "=l,=l,l", [src + pair * 16], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
            )
            word = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
            tl.store(dst + word, tl.join(low, high), cache_modifier=STORE, eviction_policy=STORE_KEEP)
        else:
            word = tl.arange(0, CHUNK // 8)
            words = tl.multiple_of(src.to(tl.pointer_type(tl.int64)), 16) + word
            got = tl.load(words, cache_modifier=LOAD, eviction_policy=LOAD_KEEP)
            tl.store(dst + word, got, cache_modifier=STORE, eviction_policy=STORE_KEEP)


@triton.jit(do_not_specialize=["granule", "num"])  # type: ignore[untyped-decorator]
def by_box(  # type: ignore[no-untyped-def]
    table_ptr, src, dst, granule, num, MATRIX: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Copy chunks of ROWS × COLS words by tensor descriptors, through shared memory; `granule` counts rows."""
    rows: tl.constexpr = MATRIX // (COLS * 8)
    chunks: tl.constexpr = rows // ROWS
    for piece in tl.range(tl.program_id(0), num * chunks, tl.num_programs(0), num_stages=STAGES):
        matrix = piece // chunks
        at = (piece - matrix * chunks) * ROWS
        page = tl.load(table_ptr + matrix)
        dst.store([page * granule + at, 0], src.load([matrix * rows + at, 0]))


@triton.jit(do_not_specialize=["address", "granule", "num"])  # type: ignore[untyped-decorator]
def by_bulk(  # type: ignore[no-untyped-def]
    table_ptr, storage_ptr, address: tl.int64, granule: tl.int64, num, MATRIX: tl.constexpr, SPAN: tl.constexpr,
    STAGE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Copy spans of the first `num` matrices, each by one thread's bulk copies."""
    spans: tl.constexpr = MATRIX // SPAN
    for piece in range(tl.program_id(0), num * spans, tl.num_programs(0)):
        matrix = piece // spans
        at = (piece - matrix * spans).to(tl.int64) * SPAN
        src = address + matrix.to(tl.int64) * MATRIX + at
        dst = (storage_ptr + tl.load(table_ptr + matrix).to(tl.int64) * granule + at).to(tl.int64)
        stages = tl.full([], SPAN // STAGE, dtype=tl.int32)
        tl.inline_asm_elementwise(ASM, "=r,l,l,r", [src, dst, stages], dtype=tl.int32, is_pure=False, pack=1)
