"""What a step's decisions cost: time in the adjuster and bytes of its bookkeeping, for each policy and situation.

One engine's worth of real pool, table, expert load and policy; the KV side is a port that does nothing. A step is what
the scheduler asks for: begin, a rescue where a request is short, adjust, drain, and every 16th the workers' counts. Run
it with `.venv/bin/python bench/adjuster.py`; it writes bench/results/adjuster.json.
"""

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.serving.arguments import count, new_file  # noqa: E402 -- found through the line above
from bench.serving.files import end_in_a_sentence  # noqa: E402 -- found through the line above
from bench.serving.meta import collect_meta  # noqa: E402 -- found through the line above
from elasticmoe.runtime.adjuster.adjuster import IDLE, Adjuster, Demand  # noqa: E402
from elasticmoe.runtime.adjuster.sample import StepSample  # noqa: E402
from elasticmoe.runtime.cli.staging import write_whole  # noqa: E402 -- found through the line above
from elasticmoe.runtime.contract.config import AdjusterConfig, PolicyName, RuntimeConfig  # noqa: E402
from elasticmoe.runtime.expert_load import ExpertLoad  # noqa: E402
from elasticmoe.runtime.pages.placement import Geometry  # noqa: E402
from elasticmoe.runtime.pages.tiers import fit_tiers  # noqa: E402
from elasticmoe.runtime.units import MATRICES, BlockId  # noqa: E402

RESULT = ROOT / "bench" / "results" / "adjuster.json"
POLICIES: tuple[PolicyName, ...] = ("threshold", "fixed", "goodput")
TOP_K = 8
REPORT_STEPS = 16
BATCH = 64
RUNNING = Demand(waiting_blocks=0, num_running=BATCH, num_waiting=0, num_tokens=BATCH)
QUEUED = Demand(400, num_running=BATCH, num_waiting=40, num_tokens=BATCH + 2048, prompt_tokens=2048)


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its arena, in pages of Qwen3-30B-A3B's sizes."""

    num_layers: int
    num_experts: int
    num_blocks: int

    @property
    def name(self) -> str:
        """Layers × experts, and blocks."""
        return f"{self.num_layers}x{self.num_experts}, {self.num_blocks} blocks"


SIZES = (Size(48, 128, 40_000), Size(94, 512, 94 * 512 * MATRICES * 2 + 4000))


@dataclass(frozen=True, slots=True)
class Row:
    """One case: microseconds a step in the adjuster (mean, median, slowest of a hundred), and bytes of its books."""

    case: str
    us_per_step: float
    median_us: float
    p99_us: float
    bytes: int


class NoPort:
    """A KV side that takes note of nothing."""

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""


class Bench:
    """One adjuster with KV that requests take and free, and routing that can change."""

    def __init__(self, size: Size, policy: PolicyName) -> None:
        """Start with some experts of each layer away and a measured engine."""
        self.geometry = Geometry(
            fit_tiers(3 * 2**20, 3 * 2**19), size.num_blocks, size.num_layers, size.num_experts, 2, 64
        )
        config = RuntimeConfig(policy=policy, adjuster=AdjusterConfig())
        load = ExpertLoad(size.num_layers, size.num_experts, config.adjuster.half_life_tokens, TOP_K)
        self.random = np.random.default_rng(0)
        self.adjuster = Adjuster(self.geometry, config, load, NoPort(), None)
        self.adjuster.drain()
        self.shift()
        self.route(4096)
        self.adjuster.learn(measured())
        self.used: list[BlockId] = []

    def shift(self) -> None:
        """Draw which experts are hot."""
        heat = np.exp(0.8 * self.random.standard_normal((self.geometry.num_layers, self.geometry.num_experts)))
        self.shares = heat / heat.sum(axis=1, keepdims=True)
        self.counts = self.random.multinomial(TOP_K * BATCH * REPORT_STEPS, self.shares)

    def route(self, tokens: int) -> None:
        """Report the counts of so many tokens."""
        self.adjuster.load.add(self.random.multinomial(TOP_K * tokens, self.shares))

    def use(self, num: int) -> None:
        """Have requests take blocks."""
        pool = self.adjuster.table.pool
        for block in pool.pick_plain(num, None):
            pool.use_block(block)
            self.used.append(block)

    def squeeze(self, left: int) -> None:
        """Have requests take all blocks but a few, once ten experts of each layer have left (as in a fixed split)."""
        if not self.used:
            self.use(self.adjuster.table.pool.num_free_blocks)
            self.adjuster.begin_step()
            self.adjuster.rescue(20 * (self.geometry.num_layers - 2) * MATRICES)
            self.adjuster.drain()
        spare = self.adjuster.table.pool.num_free_blocks - left
        self.use(max(0, spare))
        self.let_go(max(0, -spare))

    def let_go(self, num: int) -> None:
        """Have requests free blocks."""
        for _ in range(min(num, len(self.used))):
            self.adjuster.table.pool.free_block(self.used.pop(), is_cached=False)


def measured() -> StepSample:
    """What an engine with a fast bus would measure in 16 steps."""
    return StepSample(
        num_steps=REPORT_STEPS,
        duration_s=0.2,
        num_tokens=BATCH * REPORT_STEPS + 340,
        num_requests=BATCH * REPORT_STEPS,
        num_prompt_steps=2,
        num_prompt_tokens=340,
        num_new_tokens=BATCH * REPORT_STEPS,
        num_missed=10,
        exposed_s=0.002,
        copied_bytes=10**9,
        copy_s=0.018,
        num_preempted=0,
    )


def step(bench: Bench, number: int, demand: Demand, short: int = 0) -> None:
    """Take one step as the scheduler does."""
    adjuster = bench.adjuster
    adjuster.begin_step()
    if short:
        adjuster.rescue(short, demand, lost_tokens=300)
    adjuster.adjust(demand)
    adjuster.drain()
    if number % REPORT_STEPS == 0:
        adjuster.load.add(bench.counts)
        adjuster.learn(measured())


Situation = Callable[[Bench, int], Callable[[], None]]
"""Prepares step `number` outside the clock, returns what is timed."""


def balanced(bench: Bench, number: int) -> Callable[[], None]:
    """Pages are used up to a few, and nothing is to be done."""
    bench.squeeze(left=12)
    return lambda: step(bench, number, RUNNING)


def burst(bench: Bench, number: int) -> Callable[[], None]:
    """Every step a request is short of 8 blocks; once no expert may leave, requests end and all come back."""
    pool = bench.adjuster.table.pool
    bench.use(pool.num_free_blocks)
    if number % 200 == 0:
        bench.let_go(len(bench.used))
        while bench.adjuster.wants_step():
            step(bench, 1, IDLE)
        bench.use(pool.num_free_blocks)
    return lambda: step(bench, number, QUEUED, short=8)


def recovery(bench: Bench, number: int) -> Callable[[], None]:
    """A burst has ended: experts come back each step; when all have, another burst sends them away."""
    if number % 100 == 0:
        pool = bench.adjuster.table.pool
        bench.use(pool.num_free_blocks)
        bench.adjuster.begin_step()
        bench.adjuster.rescue(1500)
        bench.adjuster.drain()
        bench.let_go(len(bench.used))
    return lambda: step(bench, number, IDLE)


def shift(bench: Bench, number: int) -> Callable[[], None]:
    """Routing has changed: each step swaps as many experts as its bytes allow."""
    if number % 100 == 0:
        bench.shift()
        bench.route(8192)
    bench.squeeze(left=12)
    return lambda: step(bench, number, RUNNING)


SITUATIONS: dict[str, Situation] = {"balanced": balanced, "burst": burst, "recovery": recovery, "shift": shift}


def measure(bench: Bench, situation: Situation, num_steps: int) -> Iterator[float]:
    """Seconds of CPU that each step takes, whoever else runs; the first ones, which fill caches, are left out."""
    for number in range(num_steps + 20):
        timed = situation(bench, number)
        started_s = time.thread_time()
        timed()
        if number >= 20:
            yield time.thread_time() - started_s


def main() -> int:
    """Measure every case and write the result; 0 when done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=count, default=128, help="steps of each case (default 128)")
    parser.add_argument("--repeats", type=count, default=3, help="runs of each case, of which a step's fastest counts")
    parser.add_argument("--output", type=new_file, default=RESULT)
    args = parser.parse_args()
    meta, rows = asdict(collect_meta()), []
    for size, policy, name in product(SIZES, POLICIES, SITUATIONS):
        row = measure_case(size, policy, name, args.steps, args.repeats)
        rows.append(asdict(row))
        times = f"{row.us_per_step:8.1f} µs  median {row.median_us:8.1f}  p99 {row.p99_us:8.1f}"
        print(f"{row.case:48} {times}  {row.bytes / 1e6:5.1f} MB", flush=True)
    write_whole(args.output, json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0


def measure_case(size: Size, policy: PolicyName, name: str, num_steps: int, repeats: int) -> Row:
    """One case. Every run takes the same steps; they differ by other work beside them: a step's fastest run counts."""
    repeated = (measure(Bench(size, policy), SITUATIONS[name], num_steps) for _ in range(repeats))
    times = 1e6 * np.min([np.fromiter(times, dtype=np.float64) for times in repeated], axis=0)
    mean, median, p99 = (round(float(us), 1) for us in (times.mean(), np.median(times), np.quantile(times, 0.99)))
    return Row(f"{size.name}, {policy}, {name}", mean, median, p99, count_bytes(size, policy))


@cache
def count_bytes(size: Size, policy: PolicyName) -> int:
    """Bytes that the books of one engine take: pool, table, expert load and policy."""
    tracemalloc.start()
    bench = Bench(size, policy)
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del bench
    return num_bytes


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
