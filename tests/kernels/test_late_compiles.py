"""The paged MoE compiled for a Hopper GPU, which takes none: what computes late experts next to what computes all."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from elasticmoe.kernels import align, paged_moe
from elasticmoe.kernels.config import Config, tuned_configs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOPPER = GPUTarget("cuda", 90, 32)
N, D, TOP_K = 128, 2048, 8
BATCHES = [(768, 16), (768, 1024), (768, 8192), (96, 32)]
"""f and T whose measured configs differ most: plain, halved, W2 persistent, and W2's columns in a single step."""
HALF, WORDS = "*bf16", "*i32"
ARRAYS: dict[str, Any] = {
    "hidden_ptr": HALF, "pages_ptr": HALF, "act_ptr": HALF, "products_ptr": HALF, "sorted_ptr": WORDS,
    "block_pages_ptr": WORDS, "num_blocks_ptr": WORDS, "pairs": "i32", "blocks": "i32", "page": "i32", "TOP_K": TOP_K,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """What the compiler made of a kernel."""

    products: list[str]
    """The matrix instructions in order."""
    shared: int
    """Bytes of shared memory."""
    stack: int
    """Bytes a thread keeps outside its registers."""


def _made(kernel: triton.JITFunction, arguments: dict[str, Any], folder: Path, **options: int) -> Made:
    """Compile; arrays are aligned as PyTorch's are, and a string is an argument's type, but for PART."""
    names = kernel.arg_names
    types = [name for name in names if isinstance(arguments[name], str) and name != "PART"]
    signature = {name: arguments[name] if name in types else "constexpr" for name in names}
    constants = {(at,): arguments[name] for at, name in enumerate(names) if name not in types}
    aligned = [name == "page" or (signature[name].startswith("*") and name != "resident_ptr") for name in names]
    attributes = {(at,): [["tt.divisibility", 16]] for at, is_aligned in enumerate(aligned) if is_aligned}
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    cubin = folder / "made.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", str(cubin)], check=True, capture_output=True, text=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack, usage
    products = re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]+", made.asm["ptx"])
    return Made(products, made.metadata.shared, int(stack[1]))


def _gemm(name: str, f: int, config: Config, part: str, folder: Path) -> Made:
    gemm, is_up = getattr(config, name), name == "gate_up"
    rows, cols = (f, D) if is_up else (D, f)
    box = f"tensordesc<bf16[1, {gemm.block_n}, {gemm.block_k}]>" if gemm.tma else None
    rows_box = f"tensordesc<bf16[{config.block_m}, {gemm.block_k}]>" if gemm.persistent else None
    arguments = ARRAYS | {
        "pages_desc": box, "rows_desc": rows_box, "ROWS": rows, "COLS": cols, "BLOCK_M": config.block_m,
        "BLOCK_N": gemm.block_n, "BLOCK_K": gemm.block_k, "GROUP_M": gemm.group_m, "HALVINGS": gemm.halvings,
        "TMA": gemm.tma, "PERSISTENT": gemm.persistent, "SWAP": gemm.swap, "PDL": config.pdl, "PART": part,
    }  # fmt: skip
    if is_up and part == "all":
        arguments["num_blocks_ptr"] = None
    kernel = paged_moe.gate_up_kernel if is_up else paged_moe.down_kernel
    return _made(kernel, arguments, folder, num_warps=gemm.num_warps, num_stages=gemm.num_stages)


@pytest.mark.parametrize(("f", "tokens"), BATCHES)
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_part_takes_the_same_instructions_as_the_whole(name: str, f: int, tokens: int, tmp_path: Path) -> None:
    """The same products in the same order, in no more shared memory, and no loop around them spills a register."""
    config = tuned_configs("NVIDIA_H200")[f"N={N},f={f},d={D},bfloat16"][tokens]
    whole = _gemm(name, f, config, "all", tmp_path)
    assert whole.products
    for part in ("resident", "late"):
        made = _gemm(name, f, config, part, tmp_path)
        assert made.products == whole.products
        assert made.shared <= whole.shared
        assert made.stack == 0


@pytest.mark.parametrize("resident", [None, "*i1"])
@pytest.mark.parametrize("name", ["_place_experts", "_place_tile"])
def test_the_alignment_compiles_with_and_without_residency(name: str, resident: str | None, tmp_path: Path) -> None:
    """Both ways to sort take the flags, and no array of theirs is kept outside the registers."""
    arrays = dict.fromkeys(("ids_ptr", "table_ptr", "sorted_ptr", "block_pages_ptr", "num_blocks_ptr"), WORDS)
    arguments: dict[str, Any] = arrays | {
        "slots_ptr": WORDS, "counts_ptr": WORDS, "resident_ptr": resident, "pairs": "i32", "max_blocks": "i32",
        "num_tokens_ptr": resident and WORDS, "top_k": "i32", "tiles": "i32", "N": N, "BINS": N, "BLOCK_M": 16,
        "WIDTH": 512, "TILE": align.TILE, "STRIP": align.STRIP, "LANES": align.LANES, "PDL": True,
    }  # fmt: skip
    assert _made(getattr(align, name), arguments, tmp_path, num_warps=8).stack == 0
