"""The fetch kernels compiled for a Hopper GPU, which takes none: that they compile, and how wide the copies are."""

import re
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.fetch import variant_kernels
from bench.fetch.variants import VARIANTS, Box, Bulk, Words
from elasticmoe.kernels import fetch

HOPPER = GPUTarget("cuda", 90, 32)
COPY: dict[str, Any] = {
    "ids_ptr": "*i32", "table_ptr": "*i32", "resident_ptr": "*i1", "num_tokens_ptr": "*i32", "held_ptr": None,
    "routed_ptr": "*i64", "totals_ptr": "*i64", "clock_ptr": "*i64", "storage_ptr": "*u8", "address": "i64",
    "granule": "i64", "pairs": "i32", "TOP_K": 8, "N": 60, "BINS": 64, "TILE": fetch.TILE, "MATRIX": 3 * 2**20,
    "WORD": tl.int64, "ALIGN": 16, "CHUNK": 32768, "STAGES": 1, "IS_AHEAD": False,
    "COUNTS": True, "TIMED": True, "IS_AWAITED": False,
}  # fmt: skip


TEXTS = {"LOAD", "LOAD_KEEP", "STORE", "STORE_KEEP", "ASM", "AHEAD"}
"""Constants that are strings."""


def _ptx(kernel: triton.JITFunction, arguments: dict[str, Any], num_warps: int = 8) -> str:
    """The assembly; a string is an argument's type, anything else a constant, and TEXTS too."""
    types = {name for name, value in arguments.items() if isinstance(value, str) and name not in TEXTS}
    signature = {name: value if name in types else "constexpr" for name, value in arguments.items()}
    constants = {(kernel.arg_names.index(name),): value for name, value in arguments.items() if name not in types}
    made = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options={"num_warps": num_warps})
    return str(made.asm["ptx"])


@pytest.mark.parametrize("matrix", [3 * 2**20, 3 * 2**20 + 16])
def test_a_thread_copies_16_bytes_at_a_time_with_eight_loads_in_flight(matrix: int) -> None:
    """All loads of a chunk of 32 KiB by 256 threads come before its first store, whether it may be cut or not."""
    words = re.findall(r"(ld|st)\.global\.(?:L\d::\w+\.)*(v\d\.b\d+)", _ptx(fetch._fetch, COPY | {"MATRIX": matrix}))
    assert [word for word in words if word[1] == "v2.b64"] == [("ld", "v2.b64")] * 8 + [("st", "v2.b64")] * 8


def test_with_stages_chunks_are_on_their_way_while_others_are_written() -> None:
    """Vectors of 16 bytes go into shared memory, and a chunk is waited for while the next one is still under way."""
    ptx = _ptx(fetch._fetch, COPY | {"STAGES": 3})
    sizes = re.findall(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], (\w+)", ptx)
    assert sizes == ["0x10"] * 24
    assert re.search(r"cp\.async\.wait_group\s+1;", ptx)


@pytest.mark.parametrize(("word", "align", "width"), [(tl.int64, 8, "b64"), (tl.int32, 4, "b32"), (tl.int16, 2, "b16")])
def test_what_is_not_aligned_is_copied_in_its_own_words(word: tl.dtype, align: int, width: str) -> None:
    """No load is wider than the addresses allow."""
    ptx = _ptx(
        fetch._fetch, COPY | {"MATRIX": 1000 * align, "WORD": word, "ALIGN": align, "CHUNK": 8192, "COUNTS": False}
    )
    stores = set(re.findall(r"st\.global\.([\w.]+)", ptx))
    assert stores == {width}


@pytest.mark.parametrize(("has_held", "is_ahead"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ids", ["*i32", "*i64"])
def test_every_kind_of_call_compiles(ids: str, has_held: bool, is_ahead: bool) -> None:  # noqa: FBT001
    """For both types of ids, ahead or not, counting or not; the clock is read where it counts."""
    held = "*i1" if has_held else None
    kind = {"ids_ptr": ids, "held_ptr": held, "IS_AHEAD": is_ahead, "COUNTS": not is_ahead, "IS_AWAITED": has_held}
    assert ("%globaltimer" in _ptx(fetch._fetch, COPY | kind)) == (not is_ahead)
    assert "%globaltimer" in _ptx(fetch._stamp, {"clock_ptr": "*i64"}, num_warps=1)


LAID: dict[str, Any] = {"table_ptr": "*i32", "storage_ptr": "*u8", "address": "i64", "granule": "i64", "num": "i32"}
MOVES = {
    "plain": "ld.global.v2.b64", "wide 32": "ld.global.v2.b64", "load .cg": "ld.global.cg.v2.b64",
    "load evict_first": "ld.global.L1::evict_first.L2::cache_hint.v2.b64", "store .cs": "st.global.cs.v2.b64",
    "strip light": "ld.global.v2.b64", "l2 256": "ld.global.L1::no_allocate.L2::256B.v2.b64",
    "l2 ahead": "cp.async.bulk.prefetch.L2.global", "box 256 x 16": "cp.async.bulk.tensor.2d.global.shared::cta",
    "bulk 384 KiB": "cp.async.bulk.global.shared::cta.bulk_group",
}  # fmt: skip
"""Instructions that tell a variant of the copy, by its name."""


@pytest.mark.parametrize("name", MOVES)
def test_other_ways_to_copy_are_what_they_are_called(name: str) -> None:
    """Those that the bench compares compile, down to the device's code, with the instructions they are there for."""
    variant, matrix = VARIANTS[name], 3 * 2**20
    if isinstance(variant, Words):
        texts = {
            "LOAD": variant.load, "LOAD_KEEP": variant.load_keep, "STORE": variant.store,
            "STORE_KEEP": variant.store_keep, "ASM": variant.asm, "AHEAD": variant.ahead,
        }  # fmt: skip
        sizes = {"MATRIX": matrix, "CHUNK": variant.chunk_bytes, "IS_STRIP": variant.is_strip}
        ptx = _ptx(variant_kernels.by_words, LAID | texts | sizes, variant.num_warps)
        assert ptx.count(f"{MOVES[name]} ") == (
            1 if name == "l2 ahead" else variant.chunk_bytes // (32 * variant.num_warps * 16)
        )
    elif isinstance(variant, Box):
        box = f"tensordesc<i64[{variant.rows}, {variant.cols}]>"
        types = {"table_ptr": "*i32", "src": box, "dst": box, "granule": "i32", "num": "i32"}
        sizes = {"MATRIX": matrix, "ROWS": variant.rows, "COLS": variant.cols, "STAGES": variant.stages}
        assert MOVES[name] in _ptx(variant_kernels.by_box, types | sizes, num_warps=4)
    else:
        sizes = {"MATRIX": matrix, "SPAN": variant.span_bytes, "STAGE": variant_kernels.BULK_STAGE_BYTES}
        assert MOVES[name] in _ptx(variant_kernels.by_bulk, LAID | sizes | {"ASM": variant_kernels.BULK}, num_warps=1)


def test_every_way_to_copy_divides_a_matrix() -> None:
    """There is no mask: a chunk that doesn't would run into the next page."""
    for variant in VARIANTS.values():
        if isinstance(variant, Words):
            chunk = variant.chunk_bytes
        elif isinstance(variant, Box):
            chunk = variant.rows * variant.cols * 8
        else:
            assert isinstance(variant, Bulk)
            chunk = variant.span_bytes
            assert chunk % variant_kernels.BULK_STAGE_BYTES == 0
        assert (3 * 2**20) % chunk == 0
