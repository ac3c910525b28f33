"""Draws the simulator's plots for the docs from its result, and simulates the two that need more than that.

python -m bench.simulation.plots    # docs/plots/*.svg, about a minute
"""

import argparse
import sys
from typing import Any

from bench.serving.files import end_in_a_sentence, read_part
from bench.serving.meta import ROOT
from bench.simulation.cells import Cell, serve, simulate
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.contract.config import PolicyName
from elasticmoe.runtime.simulator.svg import Points, chart, stack, thin

RESULT = ROOT / "bench" / "results" / "simulator.json"
FOLDER = ROOT / "docs" / "plots"
GPUS = ("h200", "rtx5090", "rtx4090x2")
POLICIES = ("stock", "threshold", "fixed", "goodput")
ELASTIC: tuple[PolicyName, ...] = ("threshold", "goodput")
SWEEP = (0, 1, 2, 4, 6, 8, 10, 14, 20, 28, 40, 60, 80, 110)
BURST = Cell("h200", "skewed", 1.0, "burst")
CLOSED = Cell("h200", "skewed", 0.5, "closed")

Rows = list[dict[str, Any]]


def by_room(rows: Rows, cell: Cell, field: str) -> dict[str, list[tuple[float, float]]]:
    """A field of every policy by KV room; the cell's own room does not matter."""
    place = (cell.gpu, cell.routing, cell.workload)
    found = [row for row in rows if (row["gpu"], row["routing"], row["workload"]) == place]
    return {name: [(row["kv_gib"], row[field]) for row in found if row["policy"] == name] for name in POLICIES}


def draw_throughput(rows: Rows) -> str:
    """Tokens/s of the closed batch by KV room, for each GPU and routing."""
    return stack(
        [
            chart(f"tokens/s by GiB of KV room: closed batch, {gpu}, {routing}", by_room(rows, cell, "tok_s"))
            for gpu in GPUS
            for routing in ("skewed", "flat")
            for cell in [Cell(gpu, routing, 0.0, "closed")]
        ]
    )


def draw_latency(rows: Rows) -> str:
    """P99 of TTFT and TPOT of the conversations by KV room, on the H200."""
    cell = Cell("h200", "skewed", 0.0, "conversation")
    fields = {"ttft_p99_ms": "P99 TTFT, ms", "tpot_p99_ms": "P99 TPOT, ms"}
    return stack(
        [
            chart(f"{name}, by GiB of KV room: conversation, skewed", by_room(rows, cell, field))
            for field, name in fields.items()
        ]
    )


def draw_pool() -> str:
    """Experts away and requests running over time, through a burst and the calm after it."""
    outcomes = {policy: simulate(BURST, policy) for policy in ELASTIC}
    share = serve(BURST.gpu).shape.num_layers * serve(BURST.gpu).shape.num_experts
    away: dict[str, Points] = {}
    running: dict[str, Points] = {}
    for policy, outcome in outcomes.items():
        trail = outcome.trail
        away[policy] = thin([(at, 100 * num / share) for at, num in zip(trail.at_s, trail.away, strict=True)])
        running[policy] = thin([(at, float(num)) for at, num in zip(trail.at_s, trail.running, strict=True)])
    return stack(
        [chart("experts away, % by second: burst at 0 s", away), chart("requests running, by second", running)]
    )


def draw_sweep() -> str:
    """Tokens/s and P99 TPOT by the offload limit."""
    outcomes = {policy: [(limit, simulate(CLOSED, policy, limit)) for limit in SWEEP] for policy in ELASTIC}
    rates: dict[str, Points] = {name: [(float(n), one.tok_s) for n, one in found] for name, found in outcomes.items()}
    tpot: dict[str, Points] = {
        name: [(float(n), 1e3 * one.tpot_s(0.99)) for n, one in found] for name, found in outcomes.items()
    }
    return stack(
        [chart("tokens/s by limit: closed batch, 0.5 GiB, skewed", rates), chart("P99 TPOT, ms, by limit", tpot)]
    )


def main() -> int:
    """0 if all plots were written."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows: Rows = read_part(RESULT, "rows", list)
    plots = {
        "throughput.svg": draw_throughput(rows),
        "latency.svg": draw_latency(rows),
        "pool.svg": draw_pool(),
        "limit.svg": draw_sweep(),
    }
    for name, text in plots.items():
        write_whole(FOLDER / name, text)
    print(f"wrote {', '.join(plots)} to {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
