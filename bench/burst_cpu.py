"""Measures one burst of requests on elasticmoe and on stock vLLM, on the CPU, with the same bytes for experts and KV.

Each system gets a fresh server, a short warm-up, and then the burst as often as --repeats says, the systems in turn,
with other prompts each time (the same for both), so that no prefix is cached. All requests of a burst are sent at once.

Per burst: generated tokens/s from the first request sent to the last one finished, that over stock's, preemptions, the
mean requests that a step made a token for, experts evicted and brought back until it is calm again, the median time to
the first token and the mean per later one, and whether every request's greedy tokens equal stock's. On the CPU a step's
time says nothing of a GPU's: compare the counts, and the tokens/s only between the two systems.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/burst_cpu.py` finds `bench`

from bench.serving import needs
from bench.serving.arguments import count, new_file
from bench.serving.burst import BurstResult
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT, collect_meta
from bench.serving.model import ensure_tiny_model
from bench.serving.progress import say
from bench.serving.report import ELASTIC, STOCK, Row, make_row, median_by_system
from bench.serving.scenario import (
    COMMON,
    Load,
    Scenario,
    make_scenario,
    measure,
    start_elastic,
    start_stock,
    wait_both,
    warm_up,
)
from bench.serving.server import Server, exit_on_sigterm
from bench.serving.trace import mean_lengths
from elasticmoe.runtime.cli.staging import write_whole

DEFAULT_LOGS = ROOT / "build" / "burst-cpu"
DEFAULT_OUT = ROOT / "bench" / "results" / "burst-cpu.json"


def run_both(scenario: Scenario, logs: Path, repeats: int) -> tuple[list[BurstResult], list[BurstResult]]:
    """The bursts on a fresh server of each system, in turn: what slows the machine for a while slows both."""
    say(f"Starting elasticmoe and stock vLLM (logs in {logs})")
    with start_elastic(scenario, logs) as elastic, start_stock(scenario, logs) as stock:
        wait_both(elastic, stock, say)
        for server in (elastic, stock):
            warm_up(server, scenario, say)
        pairs = [(run_once(elastic, scenario, repeat), run_once(stock, scenario, repeat)) for repeat in range(repeats)]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def run_once(server: Server, scenario: Scenario, repeat: int) -> BurstResult:
    """One burst, and a line about it."""
    result = measure(server, scenario, repeat, say)
    say(
        f"{server.spec.name} burst {repeat + 1}: {result.tok_s:.1f} tokens/s, "
        f"{result.requests_per_step:.1f} requests a step, {result.preemptions} preemptions, "
        f"{result.evictions} evicted, {result.loads} loaded"
    )
    return result


def make_rows(elastic: list[BurstResult], stock: list[BurstResult]) -> list[Row]:
    """All bursts of both systems, each beside stock's of the same repeat."""
    pairs = list(zip(elastic, stock, strict=True))
    return [
        *(make_row(ELASTIC, repeat, ours, theirs) for repeat, (ours, theirs) in enumerate(pairs)),
        *(make_row(STOCK, repeat, theirs, theirs) for repeat, (_, theirs) in enumerate(pairs)),
    ]


def describe(scenario: Scenario, load: Load) -> dict[str, object]:
    """What was run: enough to run it again."""
    prompt, output = mean_lengths(scenario.lengths)
    return {
        "load": asdict(load),
        "scaling": asdict(scenario.scaling),
        "mean_prompt_tokens": round(prompt, 1),
        "mean_output_tokens": round(output, 1),
        "model": asdict(scenario.shape),
        "sizing": asdict(scenario.sizing),
        "flags": " ".join(COMMON),
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Qwen3-MoE checkpoint (default: the tiny model, made if missing)")
    parser.add_argument("--requests", type=count, default=Load().num_requests, help="requests in a burst (%(default)s)")
    parser.add_argument("--repeats", type=count, default=3, help="bursts per system (%(default)s)")
    parser.add_argument("--out", type=new_file, default=DEFAULT_OUT, help="where the result goes (%(default)s)")
    parser.add_argument("--logs", type=Path, default=DEFAULT_LOGS, help="folder of the servers' logs (%(default)s)")
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict[str, object]:
    """The whole result, as it is written."""
    meta, load = collect_meta(), Load(num_requests=args.requests)
    scenario = make_scenario(args.model or ensure_tiny_model(say), load)
    rows = make_rows(*run_both(scenario, args.logs, args.repeats))
    return {
        "meta": asdict(meta),
        "scenario": describe(scenario, load),
        "rows": [asdict(row) for row in rows],
        "median": median_by_system(rows),
    }


def main() -> int:
    """0 if the result was written."""
    args = parse_args()
    needs.engine()
    exit_on_sigterm()
    write_whole(args.out, json.dumps(run(args), indent=1) + "\n")
    say(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
