"""GB/s out of pinned host memory: the copy engine's, and the fetch kernel's by thread blocks, chunk and stages."""

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.fetch.setup import SHAPE, Experts
from elasticmoe.kernels.fetch import Tuning, fetch_needed
from elasticmoe.runtime.units import ExpertKey

BLOCKS = (2, 4, 8)
CHUNKS = (16384, 32768, 65536)
WARPS = (4, 8, 16)
STAGES = (1, 3)
VECTORS = (4, 16)
"""The fewest and the most 16-byte loads that a thread has in flight in one stage."""
SHARED_BYTES = 224 * 1024
"""What the stages of a thread block may take on a Hopper GPU."""
FEW = (
    Tuning(2, 65536, 8, 3), Tuning(2, 65536, 16, 1), Tuning(4, 32768, 4, 3), Tuning(4, 32768, 8, 1),
    Tuning(8, 16384, 4, 3), Tuning(8, 32768, 4, 1), Tuning(8, 32768, 4, 3), Tuning(8, 32768, 8, 1),
    Tuning(8, 65536, 16, 1),
)  # fmt: skip
"""The fastest that an H200 knew by thread blocks, warps and stages."""
REPEATS = 9
VARIANTS_S = 90
"""How long the variants may take all together."""


def tunings(num_blocks: int) -> Iterator[Tuning]:
    """The ways to launch the kernel that are worth timing and fit the device."""
    for chunk, warps, stages in itertools.product(CHUNKS, WARPS, STAGES):
        fits = (stages - 1) * chunk <= SHARED_BYTES
        if fits and VECTORS[0] <= chunk // (32 * warps * 16) <= VECTORS[1]:
            yield Tuning(num_blocks, chunk, warps, stages)


def engine_gb_s(experts: Experts) -> float:
    """Of one copy of a layer's experts by cudaMemcpyAsync."""
    first, size = experts.pool.matrices(ExpertKey(0, 0))[0], experts.pool.layout.layer_bytes
    host = first.as_strided((size,), (1,), first.storage_offset())
    to = torch.empty(size, dtype=torch.uint8, device="cuda")
    return gb_s_of(size, lambda: to.copy_(host, non_blocking=True))


def expert_copies_gb_s(experts: Experts, num_experts: int) -> float:
    """Of the copy engine too, but a copy a matrix, as a fetch has them."""
    storage, table, size = experts.storage, experts.buffers[0].tolist(), experts.pool.layout.matrix_bytes

    def copies() -> None:
        for expert, row in enumerate(table[:num_experts]):
            for page, master in zip(row, experts.pool.matrices(ExpertKey(0, expert)), strict=True):
                storage[page * size : (page + 1) * size].copy_(master, non_blocking=True)

    return gb_s_of(num_experts * experts.pool.layout.expert_bytes, copies)


def kernel_rows(experts: Experts, tried: Iterable[Tuning]) -> Iterator[dict[str, Any]]:
    """Rows of {blocks, chunk_bytes, num_warps, num_stages, gb_s}: as many experts as the first loading buffer holds."""
    for tuning in tried:
        yield {
            "blocks": tuning.num_blocks, "chunk_bytes": tuning.chunk_bytes, "num_warps": tuning.num_warps,
            "num_stages": tuning.num_stages, "gb_s": kernel_gb_s(experts, tuning),
        }  # fmt: skip


def sweep() -> Iterator[Tuning]:
    """Every launch that is worth timing."""
    return itertools.chain.from_iterable(map(tunings, BLOCKS))


def variant_rows() -> list[dict[str, Any]]:
    """The rows of `bench.fetch.variants`, run in a process of its own, which may fail on its way or hang."""
    command, root = [sys.executable, "-m", "bench.fetch.variants"], Path(__file__).parents[2]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=VARIANTS_S, cwd=root)
        out, end = done.stdout, f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, end = late.stdout or b"", f"took longer than {VARIANTS_S} s"
    return read_rows(out.decode(), end)


def read_rows(out: str, end: str) -> list[dict[str, Any]]:
    """The rows that were printed, and another one if the process came to no good end."""
    found: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return found + ([{"variant": "next one", "error": end}] if end else [])


def kernel_gb_s(experts: Experts, tuning: Tuning) -> float:
    """Of one fetch; checks that every byte arrived."""
    num, size = len(experts.buffers[0]), experts.pool.layout.matrix_bytes
    ids = torch.arange(num, dtype=torch.int32, device="cuda").view(1, -1)
    resident = torch.zeros(SHAPE.num_experts, dtype=torch.bool, device="cuda")
    table = experts.tables[0].clone()
    table[:num] = experts.buffers[0]
    operands = ids, table, resident, experts.masters(0), experts.storage, size
    pages = experts.buffers[0].flatten().long()
    experts.arena[pages] = 0
    gb_s = gb_s_of(len(pages) * size, lambda: fetch_needed(*operands, tuning=tuning))
    own = experts.tables[0, :num].flatten().long()
    assert torch.equal(experts.arena[pages], experts.arena[own]), f"wrong bytes with {tuning}"
    return gb_s


def best_tunings(rows: list[dict[str, Any]]) -> dict[int, Tuning]:
    """The fastest launch by number of thread blocks."""
    fastest = {row["blocks"]: row for row in sorted(rows, key=lambda row: float(row["gb_s"]))}
    return {
        blocks: Tuning(blocks, row["chunk_bytes"], row["num_warps"], row["num_stages"])
        for blocks, row in sorted(fastest.items())
    }


def gb_s_of(num_bytes: int, call: Callable[[], object]) -> float:
    """The median of some calls, in 10⁹ bytes a second; the first, which may compile, doesn't count."""
    call()
    times_ms = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times_ms.append(float(start.elapsed_time(end)))
    return round(num_bytes / statistics.median(times_ms) / 1e6, 2)
