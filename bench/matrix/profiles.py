"""Profiles of a serving engine's decode steps on the GPU at hand: what `bench.matrix.timeline` reads.

    python -m bench.matrix.profiles --system ours --model CONFIG.json --out bench/results/profile-h200.json

Takes the options of `python -m bench.serving_h200 run` but for its cells. Each case serves its requests and has
`torch.profiler` watch a few steps of theirs once all of them decode.
"""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.matrix.cells import Cell
from bench.matrix.run import Bench
from bench.matrix.workloads import Arrival
from bench.serving import needs
from bench.serving.files import end_in_a_sentence
from bench.serving.progress import say
from elasticmoe.runtime.cli.staging import write_whole

FIRST_STEP, NUM_STEPS = 34, 5
"""Steps after which the watch begins, and how many it lasts: by then every prompt is computed."""
NUM_IN = 100
MOST_RAW = 1500
"""Kernels of the timeline that are kept: a step of 48 layers, and some of the one before."""
WATCHED = ("Synchronize", "Launch", "Memcpy")
"""In the names of the CUDA calls that are counted."""

Event = tuple[str, float, float, Any]
"""(kernel or call, start µs, µs, stream)."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is served while the profiler watches."""

    num_requests: int
    kv_gib: float
    num_out: int
    routing: str = "skewed"


CASES = {
    "full256": Case(256, 8.0, 40),
    "churn": Case(256, 1.0, 60),
    "light8": Case(8, 8.0, 40),
    "flat1": Case(256, 1.0, 60, "flat"),
}


def summary(kernels: Iterable[Event], calls: Iterable[Event]) -> dict[str, Any]:
    """Return a profile as `bench.matrix.timeline` takes it."""
    kernels = list(kernels)
    timeline = sorted((round(start, 1), round(us, 1), name[:28], stream) for name, start, us, stream in kernels)
    return {
        "top": sorted(([n, num, round(us, 1)] for n, (num, us) in _sums(kernels).items()), key=lambda one: -one[2]),
        "cpu": _sums(call for call in calls if any(part in call[0] for part in WATCHED)),
        "span_us": timeline[-1][0] - timeline[0][0],
        "raw": timeline[-MOST_RAW:],
    }


def _sums(events: Iterable[Event]) -> dict[str, list[float]]:
    sums: dict[str, list[float]] = {}
    for name, _, us, _ in events:
        one = sums.setdefault(name[:90], [0, 0.0])
        one[0] += 1
        one[1] += us
    return sums


@contextmanager
def _watching(core: Any, found: list[Any]) -> Any:
    """Have the profiler watch some of the core's steps, and put what it saw into `found`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    stock: Callable[..., Any] = core.step_fn
    seen, steps = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]), 0

    def step(*args: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == FIRST_STEP:
            torch.cuda.synchronize()
            seen.start()
        result = stock(*args, **named)
        if steps == FIRST_STEP + NUM_STEPS - 1:
            torch.cuda.synchronize()
            seen.stop()
            found.extend(seen.events())
        return result

    core.step_fn = step
    try:
        yield
    finally:
        core.step_fn = stock


def profile_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Serve a case; return its profile."""
    bench.prepare(Cell("closed", case.routing, case.kv_gib))
    found: list[Any] = []
    with _watching(bench.core, found):
        bench.serve((Arrival(0.0, NUM_IN, case.num_out),) * case.num_requests)
    assert found, f"the case ended before step {FIRST_STEP + NUM_STEPS}: let it ask for more tokens"
    on_gpu: dict[bool, list[Event]] = {True: [], False: []}
    for event in found:
        time, stream = event.time_range, getattr(event, "device_resource_id", None)
        on_gpu[event.device_type.name == "CUDA"].append((event.name, time.start, time.elapsed_us(), stream))
    return summary(on_gpu[True], on_gpu[False]) | {"resident": bench.room.num_resident}


def main() -> int:
    """Profile every case, and write what there is after each; returns the exit status."""
    from bench.serving_h200 import make_parser

    args = make_parser().parse_args(["run", *sys.argv[1:], "--cells", ""])
    needs.packages("vllm")
    needs.gpu()
    from bench.kernel_gpu import meta

    bench, told, cases = Bench(args), meta(), dict[str, Any]()
    for name, case in CASES.items():
        cases[name] = profile_case(bench, case)
        write_whole(args.out, json.dumps({"meta": told, "cases": cases}) + "\n")
        say(f"{name}: {cases[name]['span_us'] / NUM_STEPS / 1000:.1f} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
