"""Simulates goodput on the H200 with a time to the first token promised (5 s), without one, and stock vLLM beside them.

    python bench/ttft.py  # about a minute on one core

Rows: a system in a cell, its tokens/s over stock's, the share of requests that keep both promises (first token within
5 s, 100 ms a token after it), the P99 of both, preemptions, experts evicted and loaded. Workloads: those of the
simulator's table, and 12 requests a second for 150 s, more than the smaller rooms can serve.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/ttft.py` finds `bench`

from bench.serving.arguments import new_file
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT, collect_meta
from bench.serving.progress import say
from bench.simulation.cells import NUM_BURST, ROUTINGS, SLO, WORKLOADS, Cell, make_system, offer, route
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.contract.config import RuntimeConfig, Slo
from elasticmoe.runtime.simulator.hardware import H200
from elasticmoe.runtime.simulator.outcome import Outcome
from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.simulation import Simulation
from elasticmoe.runtime.simulator.workload import burst_then_calm, closed_batch

DEFAULT_OUT = ROOT / "bench" / "results" / "ttft.json"
KV_GIB = (0.5, 1.0, 2.0)
OVERLOAD, OVERLOAD_S, OVERLOAD_RATE_S = "overload", 150.0, 12.0
SYSTEMS: dict[str, RuntimeConfig | None] = {
    "stock": None,
    "goodput": RuntimeConfig(),
    "goodput, ttft": RuntimeConfig(slo=Slo(ttft_ms=1000 * SLO.ttft_s)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one cell."""

    routing: str
    kv_gib: float
    workload: str
    system: str
    tok_s: float
    ratio_to_stock: float
    kept_share: float
    """Of all requests, those that keep both promises."""
    ttft_p99_s: float
    tpot_p99_ms: float
    preemptions: int
    evicted: int
    loaded: int


def list_cells() -> Iterator[Cell]:
    """Return every cell."""
    for routing, kv_gib, workload in product(ROUTINGS, KV_GIB, (*WORKLOADS, OVERLOAD)):
        yield Cell(H200.name, routing, kv_gib, workload)


def arrivals(workload: str) -> tuple[Arrival, ...]:
    """Return the requests of a workload."""
    if workload != OVERLOAD:
        return offer(workload, H200.name)
    return burst_then_calm(closed_batch(NUM_BURST), OVERLOAD_S, OVERLOAD_RATE_S)[NUM_BURST:]


def is_kept(request: Request) -> bool:
    """Return whether a request that is done kept both promises."""
    after_s = request.finished_s - request.first_token_s
    is_early = request.first_token_s - request.arrival.at_s <= SLO.ttft_s
    return is_early and after_s <= SLO.tpot_s * (request.arrival.output_tokens - 1)


def simulate(cell: Cell, config: RuntimeConfig | None) -> Outcome:
    """Return what a system does in a cell."""
    system = replace(make_system(cell, None), config=config)
    return Simulation(system, arrivals(cell.workload), route(cell.routing)).run()


def make_rows(cell: Cell) -> list[Row]:
    """Return the row of each system in a cell, stock's first."""
    rows: list[Row] = []
    for name, config in SYSTEMS.items():
        outcome = simulate(cell, config)
        tok_s = round(outcome.tok_s, 1)
        row = Row(
            routing=cell.routing,
            kv_gib=cell.kv_gib,
            workload=cell.workload,
            system=name,
            tok_s=tok_s,
            ratio_to_stock=round(tok_s / (rows[0].tok_s if rows else tok_s), 4),
            kept_share=round(sum(map(is_kept, outcome.requests)) / len(outcome.requests), 4),
            ttft_p99_s=round(outcome.ttft_s(0.99), 3),
            tpot_p99_ms=round(1000 * outcome.tpot_s(0.99), 1),
            preemptions=outcome.num_preemptions,
            evicted=outcome.moved[0],
            loaded=outcome.moved[1],
        )
        rows.append(row)
    return rows


def describe(cell: Cell, rows: list[Row]) -> str:
    """Return what a cell's systems kept, and their tokens/s over stock's, in a line."""
    figures = "; ".join(f"{row.system} {row.kept_share:.0%} kept, {row.ratio_to_stock:.3f}" for row in rows)
    return f"{cell.routing}, {cell.kv_gib} GiB, {cell.workload}: {figures}"


def main() -> int:
    """0 if the result was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, default=DEFAULT_OUT, help="where the result goes (%(default)s)")
    args = parser.parse_args()
    meta, rows = asdict(collect_meta()), []
    for cell in list_cells():
        found = make_rows(cell)
        say(describe(cell, found))
        rows += found
    result = {"meta": meta, "rows": [asdict(row) for row in rows]}
    write_whole(args.out, json.dumps(result, indent=1) + "\n")
    say(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
