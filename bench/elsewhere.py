"""Simulates goodput elsewhere than the table of bench/simulator.py: another seed, other requests of the same traces.

    python bench/elsewhere.py  # about 2 minutes on two cores

Rows: stock, threshold and goodput in each run, with the table's figures; `later` counts requests from the table's
excerpt to this one. `verdict` counts the promises that goodput misses, as the table's does, lists the misses, and has
the worst P99 of TPOT where stock keeps that SLO (null: goodput keeps it too, wherever stock does).
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/elsewhere.py` finds `bench`

from bench.serving.arguments import new_file
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import ROOT, collect_meta
from bench.serving.progress import say
from bench.simulation.cells import ROUTINGS, Cell, Row, make_rows
from bench.simulation.verdict import find_misses, tally
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.contract.config import PolicyName
from elasticmoe.runtime.simulator.hardware import GPUS

DEFAULT_OUT = ROOT / "bench" / "results" / "elsewhere.json"
POLICIES: tuple[PolicyName | None, ...] = (None, "threshold", "goodput")
TRACES = ("code", "conversation")
KV_GIB = (0.5, 1.0, 2.0, 4.0)
ELSEWHERE = ((1, 0), (0, 700), (0, -900))
"""Seeds, and how many requests later."""
PROMISES = ("ratio_to_stock", "ratio_to_threshold", "tpot_p99_ms")
FIGURES = ("ratio_to_stock", "tpot_ok", "ttft_ok", "tpot_p99_ms", "ttft_p99_ms", "preemptions")

Rows = dict[str, Row]


def list_cells() -> Iterator[Cell]:
    """Return every run's cell, GPU by GPU."""
    for gpu, routing, kv_gib, trace, (seed, later) in product(GPUS, ROUTINGS, KV_GIB, TRACES, ELSEWHERE):
        yield Cell(gpu, routing, kv_gib, trace, seed, later)


def run_cell(cell: Cell) -> Rows:
    """Return the row of each policy in one cell."""
    return {row.policy: row for row in make_rows(cell, POLICIES)}


def run_cells(cells: Sequence[Cell]) -> list[Rows]:
    """Return the rows of each cell, simulated on all cores, with a line for each."""
    workers, context, found = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn"), []
    ignore = (signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to tell of
    with ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=ignore) as pool:
        for cell, rows in zip(cells, pool.map(run_cell, cells), strict=True):
            found.append(rows)
            say(f"{len(found)} of {len(cells)}: {describe(cell, rows)}")
    return found


def describe(cell: Cell, rows: Rows) -> str:
    """Return where a run was and what goodput did there, in a line."""
    where = f"{cell.gpu}, {cell.routing}, {cell.kv_gib} GiB, {cell.workload}, seed {cell.seed}, {cell.later:+} requests"
    missed = ", ".join(find_misses(rows)) or "nothing"
    return f"{where}: {rows['goodput'].ratio_to_stock:.2f} of stock, misses {missed}"


def judge(cells: Sequence[Cell], found: Sequence[Rows]) -> dict[str, object]:
    """Return how often goodput misses each promise, every miss with its place, and the worst TPOT among them."""
    judged = [(asdict(cell), find_misses(rows)) for cell, rows in zip(cells, found, strict=True)]
    tpots_ms = [misses["tpot_p99_ms"] for _, misses in judged if "tpot_p99_ms" in misses]
    return {"num_runs": len(judged), "worst_tpot_p99_ms": max(tpots_ms, default=None)} | tally(judged, PROMISES)


def dump(cells: Sequence[Cell], found: Sequence[Rows]) -> list[dict[str, object]]:
    """Return the rows as JSON-able data."""
    return [
        asdict(cell) | {"policy": row.policy} | {name: getattr(row, name) for name in FIGURES}
        for cell, rows in zip(cells, found, strict=True)
        for row in rows.values()
    ]


def main() -> int:
    """0 if the result was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, default=DEFAULT_OUT, help="where the result goes (%(default)s)")
    args = parser.parse_args()
    meta, cells = asdict(collect_meta()), list(list_cells())
    found = run_cells(cells)
    verdict = judge(cells, found)
    result = {"meta": meta, "rows": dump(cells, found), "verdict": verdict}
    write_whole(args.out, json.dumps(result, indent=1) + "\n")
    say(f"goodput misses, of {verdict['num_runs']} runs: {verdict['num_missed']}")
    say(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
