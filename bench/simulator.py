"""Simulates every policy in every cell (GPU, routing, KV room, workload), and the Rimuru paper's case.

    python bench/simulator.py            # all cells, about 15 minutes on one core
    python bench/simulator.py --gpu h200 # those of one GPU

Rows: a policy in a cell, its tokens/s over stock's in the same cell, whether the P99 of TPOT and TTFT keep their SLO
(100 ms, 5 s), requests at peak, steps. `verdict` lists where goodput misses: 0.98 of stock, what threshold reaches
where that keeps the SLO, stock's TPOT SLO, and being home within twice the copies' time.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/simulator.py` finds `bench`

from bench.serving.meta import ROOT, collect_meta
from bench.serving.progress import say
from bench.simulation import rimuru
from bench.simulation.cells import POLICIES, Cell, Row, list_cells, make_row, simulate
from bench.simulation.verdict import dump, judge
from elasticmoe.runtime.simulator.hardware import GPUS

DEFAULT_OUT = ROOT / "bench" / "results" / "simulator.json"
SAY_EVERY = 8


def run_cell(cell: Cell) -> list[Row]:
    """Every policy in one cell."""
    stock = simulate(cell, None)
    return [make_row(cell, policy, stock if policy is None else simulate(cell, policy), stock) for policy in POLICIES]


def run_cells(gpus: tuple[str, ...]) -> list[Row]:
    """All cells, with a line every few of them."""
    cells, rows = list(list_cells(gpus)), []
    for done, cell in enumerate(cells):
        if done % SAY_EVERY == 0:
            say(f"cell {done} of {len(cells)}: {cell.gpu}, {cell.routing}, {cell.kv_gib} GiB, {cell.workload}")
        rows += run_cell(cell)
    return rows


def run_rimuru() -> dict[str, object]:
    """The paper's case: its figures, ours, and what was fitted."""
    fitted = rimuru.fit()
    rows = []
    for design, paper in rimuru.PAPER.items():
        ours = rimuru.simulate(design, fitted)
        rows.append({"design": design, "paper": asdict(paper), "simulated": asdict(ours)})
        say(f"Rimuru's case, {design}: {ours.peak:.0f} requests at peak (paper {paper.peak}), {ours.steps:.0f} steps")
    return {"fitted_to_stock": asdict(fitted), "rows": rows}


def main() -> int:
    """0 if the result was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(GPUS), action="append", help="only cells of this GPU (default: all)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the result goes (%(default)s)")
    args = parser.parse_args()
    meta = collect_meta()
    rows = run_cells(tuple(args.gpu or GPUS))
    verdict = judge(rows)
    result = {"meta": asdict(meta), "rows": dump(rows), "verdict": verdict, "rimuru": run_rimuru()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"goodput misses, of {verdict['num_cells']} cells: {verdict['num_missed']}")
    say(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
