"""Times the device-driven fetch on the GPU at hand: alone, and under a synthetic decode step of 48 layers.

    python -m bench.fetch_gpu                      # writes bench/results/fetch-h200.json, in two minutes at most
    python -m bench.fetch_gpu --variants           # other ways to copy, too, in another minute
    python -m bench.fetch_gpu --batches 64 --ahead 1 --out FILE.json

The result: `engine_gb_s`, the copy engine's; `kernel`, the fetch kernel's by launch, `variants`, that of other copies;
`idle_us`, what a fetch of nothing takes by tokens; `launches`, one step by how its fetches are launched; `rows`, with
the best of them, steps by batch, routing, layers ahead, experts offloaded and join; `left_out`, how many of them were
not reached in time: bench/fetch/forward.py says what a step is.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.serving import needs

if __name__ == "__main__":
    needs.first("torch", "triton")

import torch

from bench.fetch import copies
from bench.fetch.forward import NUM_LAYERS, Case, Launch, syncs_per_call, time_case
from bench.fetch.idle import idle_us
from bench.fetch.setup import MAX_REQUESTS, make_experts
from bench.kernel_gpu import meta
from bench.serving.arguments import amount, counts, new_file
from bench.serving.errors import BenchError
from bench.serving.files import end_in_a_sentence
from elasticmoe.kernels.fetch import Tuning
from elasticmoe.runtime.cli.staging import write_whole

OUT = Path(__file__).resolve().parent / "results" / "fetch-h200.json"
NUM_SLOTS = 64
"""Of each loading buffer; the copies alone fill one of them."""
LAUNCHES = [
    Launch(tuning, percent)
    for tuning in (
        Tuning(8, 65536, 16, 1), Tuning(8, 32768, 4, 1), Tuning(8, 32768, 4, 3), Tuning(4, 32768, 4, 3),
        Tuning(2, 65536, 8, 3),
    )
    for percent in (-1, 100)
] + [Launch(Tuning(8, 32768, 4, 1), priority=0)]  # fmt: skip
"""What a step is tried with: more or less of a multiprocessor taken, its shared memory left to GEMMs or not, and once
without precedence."""


def main() -> int:
    """Run what the command line says, and write what was measured after each step; 0 once that is all."""
    args = parser().parse_args()
    result: dict[str, Any] = {"meta": meta()}
    for _ in measure(args, result):
        write_whole(args.out, json.dumps(result))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=new_file, default=OUT)
    made.add_argument("--batches", type=counts(1, MAX_REQUESTS), default=[32, 64, 128, 256, 1])
    layers, experts = counts(0, NUM_LAYERS - 1), counts(0, NUM_SLOTS)
    made.add_argument("--ahead", type=layers, default=[0, 1, 2], help="layers that fetches start ahead")
    made.add_argument("--offloaded", type=experts, default=[4, 10], help="experts of each layer, where skewed")
    made.add_argument("--flat-offloaded", type=experts, default=[2], help="and where flat")
    made.add_argument("--sweep", action="store_true", help="time every launch of the kernel alone")
    made.add_argument("--variants", action="store_true", help="time other copies")
    made.add_argument("--seconds", type=amount, default=115, help="begin no other step after this")
    return made


def measure(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
    """Add the copies' figures, then each case's rows."""
    begun = time.monotonic()
    if syncs_per_call(lambda: torch.ones(1, device="cuda").item()) < 1:
        raise BenchError("want a profiler that counts syncs, torch's sees none where there is one; let CUPTI be free")
    experts = make_experts(NUM_SLOTS, max(args.ahead) + 1)
    result["engine_gb_s"] = copies.engine_gb_s(experts)
    result["engine_by_matrix_gb_s"] = copies.expert_copies_gb_s(experts, NUM_SLOTS)
    print(f"engine {result['engine_gb_s']} GB/s, a copy a matrix {result['engine_by_matrix_gb_s']}", flush=True)
    result["kernel"] = list(copies.kernel_rows(experts, copies.sweep() if args.sweep else copies.FEW))
    for blocks, tuning in copies.best_tunings(result["kernel"]).items():
        gb_s = max(row["gb_s"] for row in result["kernel"] if row["blocks"] == blocks)
        print(f"{blocks} blocks {gb_s} GB/s with {tuning}", flush=True)
    result["idle_us"] = idle_us(experts)
    print(f"idle {result['idle_us']} us", flush=True)
    yield
    todo = cases(args)
    tables = [_printed(time_case(experts, case, LAUNCHES)) for case in middle(todo)]
    result["launches"] = list(itertools.chain.from_iterable(tables))
    launch = LAUNCHES[fastest(tables)]
    print(f"steps with {launch} after {time.monotonic() - begun:.0f} s", flush=True)
    yield
    result["rows"], watched = [], set()
    for at, case in enumerate(todo):
        result["left_out"] = len(todo) - at
        if time.monotonic() - begun > args.seconds:
            break
        is_watched = (case.routing, case.ahead) not in watched
        watched.add((case.routing, case.ahead))
        result["rows"] += _printed(time_case(experts, case, [launch], is_watched=is_watched))
        result["left_out"] -= 1
        yield
    if args.variants:
        result["variants"] = _printed(copies.variant_rows())
    print(f"{result['left_out']} left out after {time.monotonic() - begun:.0f} s", flush=True)
    yield


def cases(args: argparse.Namespace) -> list[Case]:
    """All steps, by batch; joins that aren't `late` where the most are offloaded and fetched one layer ahead."""
    loads = [("skewed", num) for num in args.offloaded] + [("flat", num) for num in args.flat_offloaded]
    found = []
    for batch, (routing, num), ahead in itertools.product(args.batches, loads, args.ahead):
        found.append(Case(batch, routing, ahead, num))
        if routing == "skewed" and num == max(args.offloaded) and ahead == 1:
            found += [Case(batch, routing, ahead, num, "arrived"), Case(batch, routing, ahead, num, "first")]
    return found


def middle(todo: list[Case]) -> list[Case]:
    """The steps that all launches are tried with: of 64 tokens, if there are any, with nothing or a layer ahead."""
    tried = [case for case in todo if case.routing == "skewed" and case.join == "late" and case.ahead <= 1]
    num = max((case.num_offloaded for case in tried), default=0)
    return [case for case in tried if case.num_offloaded == num and case.batch == 64] or todo[:1]


def fastest(tables: list[list[dict[str, Any]]]) -> int:
    """Which launch's steps are, taken together; each table has a row a launch."""
    sums = [sum(float(row["step_ms"]) for row in rows) for rows in zip(*tables, strict=True)]
    return sums.index(min(sums))


def _printed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
