"""What it takes the host to launch one MoE layer's kernels, as they are launched here and by Triton's own launch.

    .venv/bin/python bench/launches.py  # ten seconds on one core, no GPU; writes bench/results/launches.json

Whole calls of `paged_moe` with a late part, as a step that no CUDA graph holds makes them: of Qwen3-30B-A3B's sizes,
compiled for an H200, on a driver that launches nothing. So what CUDA's launch takes is in neither figure, nor is what
Triton's launch asks the driver about each array's address. `sizes`: rounding a quotient up, plainly and by Triton.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/launches.py` finds `bench`

from bench.serving import needs

if __name__ == "__main__":
    needs.first("torch", "triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench.serving.arguments import count, counts, new_file
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT, collect_meta, find_versions
from bench.serving.progress import say
from elasticmoe.kernels.config import Shape, config_for
from elasticmoe.kernels.launch import Late, paged_moe
from elasticmoe.kernels.launcher import Launcher, ceil_div
from elasticmoe.runtime.cli.staging import write_whole

RESULT = ROOT / "bench" / "results" / "launches.json"
SHAPE = Shape(num_experts=128, top_k=8, f=768, d=2048, dtype=torch.bfloat16)
NUM_PAGES = 4
Call = Callable[[], object]
OURS = Launcher.__call__


class NoGpu:
    """Triton's driver of a Hopper GPU that isn't there; counts launches, and does nothing else for one."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232448}
    )

    def __init__(self) -> None:
        """Start with no launch."""
        self.num_launches = 0

    def launcher_cls(self, *_: object) -> Call:
        """What a compiled kernel is launched by."""

        def launch(*_: object) -> None:
            self.num_launches += 1

        return launch

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """A handle."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", 90, 32)


def _by_triton(self: Launcher, grid: tuple[int, ...], *args: object, **options: object) -> None:
    self._kernel[grid](*args, **options)  # what a launcher does where Triton interprets


@contextmanager
def launching(how: Any) -> Iterator[None]:
    """Have every launcher launch so."""
    kind: Any = Launcher
    kind.__call__ = how
    try:
        yield
    finally:
        kind.__call__ = OURS


def layer_of(tokens: int) -> Call:
    """One layer's call over so many tokens, some experts of which may be late."""
    config = config_for("NVIDIA_H200", SHAPE, tokens, is_hopper=True)
    arena = torch.empty(NUM_PAGES * SHAPE.f * SHAPE.d, dtype=SHAPE.dtype)
    up, down = arena.view(NUM_PAGES, SHAPE.f, SHAPE.d), arena.view(NUM_PAGES, SHAPE.d, SHAPE.f)
    hidden = torch.empty((tokens, SHAPE.d), dtype=SHAPE.dtype)
    weights, ids = torch.empty((tokens, SHAPE.top_k)), torch.zeros((tokens, SHAPE.top_k), dtype=torch.int32)
    table = torch.zeros((SHAPE.num_experts, 3), dtype=torch.int32)
    late = Late(torch.ones(SHAPE.num_experts, dtype=torch.bool), lambda: None)
    return lambda: paged_moe(hidden, weights, ids, up, down, table, config, late)


def us_of(call: Call, num_calls: int) -> float:
    """The mean microseconds of so many calls."""
    begun = time.perf_counter()
    for _ in range(num_calls):
        call()
    return 1e6 * (time.perf_counter() - begun) / num_calls


def measure_layer(gpu: NoGpu, tokens: int, num_calls: int, turns: int) -> dict[str, Any]:
    """{tokens, launches, ours_us, triton_us, …}, which take turns: the fastest, as they differ by other work beside."""
    layer, runs, launches = layer_of(tokens), dict[str, list[float]](), set()
    for turn in range(1 + turns):  # the first compiles
        for name, how in (("ours", OURS), ("triton", _by_triton)):
            before = gpu.num_launches
            with launching(how):
                us = us_of(layer, num_calls if turn else 1)
            if turn:
                runs.setdefault(name, []).append(us)
                launches.add((gpu.num_launches - before) / num_calls)
    (each,) = launches
    fastest = {f"{name}_us": round(min(us), 2) for name, us in runs.items()}
    medians = {f"{name}_median_us": round(statistics.median(us), 2) for name, us in runs.items()}
    return {"tokens": tokens, "launches": each, **fastest, **medians}


def measure_sizes(num_calls: int, turns: int) -> dict[str, float]:
    """Microseconds of rounding a quotient up; of the fastest turn."""
    calls = {"ceil_div_us": lambda: ceil_div(1000, 16), "triton_cdiv_us": lambda: triton.cdiv(1000, 16)}
    runs = {name: [us_of(call, num_calls) for _ in range(turns)] for name, call in calls.items()}
    return {name: round(min(us), 3) for name, us in runs.items()}


def main() -> int:
    """0 if the result was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=counts(5, 8192), default=[64, 512, 1024], help="of a step (%(default)s)")
    parser.add_argument("--calls", type=count, default=20, help="of a turn (%(default)s)")
    parser.add_argument("--turns", type=count, default=300, help="of each way to launch (%(default)s)")
    parser.add_argument("--out", type=new_file, default=RESULT)
    args = parser.parse_args()
    meta = asdict(collect_meta())
    meta["packages"] |= find_versions(("triton",))
    gpu, rows = NoGpu(), []
    driver.set_active(gpu)
    for tokens in args.tokens:
        rows.append(measure_layer(gpu, tokens, args.calls, args.turns))
        ours, theirs, launches = (rows[-1][name] for name in ("ours_us", "triton_us", "launches"))
        say(f"{tokens} tokens, {launches:.0f} launches: ours {ours:.1f} µs of the host, Triton's {theirs:.1f}")
    result = {"meta": meta, "rows": rows, "sizes": measure_sizes(args.calls, args.turns)}
    write_whole(args.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
