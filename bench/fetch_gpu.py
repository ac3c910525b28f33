"""Times the device-driven fetch on the GPU at hand: alone, and under a synthetic decode step of 48 layers.

    python -m bench.fetch_gpu                      # writes bench/results/fetch-h200.json
    python -m bench.fetch_gpu --batches 64 --ahead 1 --out FILE.json

The result: `engine_gb_s`, the copy engine's; `kernel`, the fetch kernel's by launch; `idle_us`, what a fetch of nothing
takes by tokens; `rows`, steps by batch, routing, layers ahead and thread blocks: bench/fetch/forward.py says what a
step is.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.fetch import copies
from bench.fetch.forward import Case, syncs_per_call, time_case
from bench.fetch.idle import idle_us
from bench.fetch.setup import make_experts
from bench.kernel_gpu import meta

OUT = Path(__file__).resolve().parent / "results" / "fetch-h200.json"
NUM_SLOTS = 64
"""Of each loading buffer; the copies alone fill one of them."""


def main() -> None:
    """Run what the command line says; what has been measured is written after each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--batches", type=_numbers, default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--ahead", type=_numbers, default=[0, 1, 2], help="layers that fetches start ahead")
    parser.add_argument("--offloaded", type=_numbers, default=[10], help="experts of each layer")
    args = parser.parse_args()
    result: dict[str, Any] = {"meta": meta()}
    for _ in measure(args, result):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result), encoding="utf-8")


def measure(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
    """Add the copies' figures, then each case's rows."""
    assert syncs_per_call(lambda: torch.ones(1, device="cuda").item()) >= 1, (
        "the profiler sees no sync where there is one"
    )
    experts = make_experts(NUM_SLOTS, max(args.ahead) + 1)
    result["engine_gb_s"] = copies.engine_gb_s(experts)
    result["engine_by_matrix_gb_s"] = copies.expert_copies_gb_s(experts, NUM_SLOTS)
    print(f"engine {result['engine_gb_s']} GB/s, a copy a matrix {result['engine_by_matrix_gb_s']}", flush=True)
    result["kernel"] = list(copies.kernel_rows(experts))
    best = copies.best_tunings(result["kernel"])
    for blocks, tuning in best.items():
        gb_s = max(row["gb_s"] for row in result["kernel"] if row["blocks"] == blocks)
        print(f"{blocks} blocks {gb_s} GB/s with {tuning}", flush=True)
    fastest = best[max(best, key=lambda blocks: max(r["gb_s"] for r in result["kernel"] if r["blocks"] == blocks))]
    result["idle_us"] = idle_us(experts)
    print(f"idle {result['idle_us']} us", flush=True)
    result["rows"] = []
    yield
    for case in itertools.starmap(
        Case, itertools.product(args.batches, ("skewed", "flat"), args.ahead, args.offloaded)
    ):
        rows = time_case(experts, case, [fastest])
        result["rows"] += rows
        for row in rows:
            print(row, flush=True)
        yield


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
