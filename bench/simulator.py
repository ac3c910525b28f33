"""Simulates every policy in every cell (GPU, routing, KV room, workload), and the Rimuru paper's case.

    python bench/simulator.py            # all cells, about 4 minutes on one core
    python bench/simulator.py --gpu h200 --out FILE  # those of one GPU
    python bench/simulator.py --again goodput  # one policy anew in the result that is there

Rows: a policy in a cell, its tokens/s over stock's in the same cell, whether the P99 of TPOT and TTFT keep their SLO
(100 ms, 5 s), requests at peak, steps. `verdict` lists where goodput misses: 0.98 of stock, what threshold reaches
where that keeps the SLO, stock's TPOT SLO, and being home within twice the copies' time.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that `python bench/simulator.py` finds `bench`

from bench.serving.arguments import new_file
from bench.serving.errors import BadScenario
from bench.serving.files import end_in_a_sentence, parse_object, read_text, take_part
from bench.serving.meta import ROOT, collect_meta
from bench.serving.progress import say
from bench.simulation import rimuru
from bench.simulation.cells import POLICIES, Cell, Row, list_cells, make_rows
from bench.simulation.verdict import dump, judge
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.contract.config import PolicyName
from elasticmoe.runtime.simulator.hardware import GPUS

DEFAULT_OUT = ROOT / "bench" / "results" / "simulator.json"
SAY_EVERY = 8


def run_cells(gpus: tuple[str, ...]) -> list[Row]:
    """All cells, with a line every few of them."""
    cells, rows = list(list_cells(gpus)), []
    for done, cell in enumerate(cells):
        _tell(done, len(cells), cell)
        rows += make_rows(cell, POLICIES)
    return rows


def rerun_policy(policy: PolicyName, earlier: list[Row]) -> list[Row]:
    """The rows of an earlier result with those of one policy simulated anew."""
    stock = [row for row in earlier if row.policy == "stock"]
    rows = [row for row in earlier if row.policy != policy]
    for done, row in enumerate(stock):
        cell = Cell(row.gpu, row.routing, row.kv_gib, row.workload)
        _tell(done, len(stock), cell)
        rows += make_rows(cell, (policy,), row.tok_s)
    return rows


def _tell(done: int, num: int, cell: Cell) -> None:
    if done % SAY_EVERY == 0:
        say(f"cell {done} of {num}: {cell.gpu}, {cell.routing}, {cell.kv_gib} GiB, {cell.workload}")


def run_rimuru() -> dict[str, object]:
    """The paper's case: its figures, ours, and what was fitted."""
    fitted = rimuru.fit()
    rows = []
    for design, paper in rimuru.PAPER.items():
        ours = rimuru.simulate(design, fitted)
        rows.append({"design": design, "paper": asdict(paper), "simulated": asdict(ours)})
        say(f"Rimuru's case, {design}: {ours.peak:.0f} requests at peak (paper {paper.peak}), {ours.steps:.0f} steps")
    return {"fitted_to_stock": asdict(fitted), "rows": rows}


def read_earlier(path: Path) -> tuple[list[Row], dict[str, Any], dict[str, Any]]:
    """The rows of an earlier result, where those came from, and the paper's case; BadScenario if it is none."""
    result = parse_object(read_text(path), str(path))
    kinds = (("rows", list), ("meta", dict), ("rimuru", dict))
    rows, meta, case = (take_part(result, key, kind, str(path)) for key, kind in kinds)
    try:
        found = [Row(**row) for row in rows]
    except TypeError as error:
        raise BadScenario(f"{path}: want rows of this bench ({error}); leave out --again to make them anew") from error
    return found, result.get("meta_of_other_rows", meta), case


def main() -> int:
    """0 if the result was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(GPUS), action="append", help="only cells of this GPU (default: all)")
    again = "simulate this policy alone anew, and keep the other rows of the result that is there"
    parser.add_argument("--again", choices=[name for name in POLICIES if name], help=again)
    parser.add_argument("--out", type=new_file, default=DEFAULT_OUT, help="where the result goes (%(default)s)")
    args = parser.parse_args()
    if args.gpu and (args.again or args.out == DEFAULT_OUT):
        parser.error(
            "--gpu wants another --out: a part of the cells would replace all; --again takes those of the result"
        )
    result: dict[str, Any] = {"meta": asdict(collect_meta())}
    if args.again:
        earlier, meta, case = read_earlier(args.out)
        result |= {"again": args.again, "meta_of_other_rows": meta}
        rows = rerun_policy(args.again, earlier)
    else:
        rows, case = run_cells(tuple(dict.fromkeys(args.gpu or GPUS))), run_rimuru()
    verdict = judge(rows)
    result |= {"rows": dump(rows), "verdict": verdict, "rimuru": case}
    write_whole(args.out, json.dumps(result, indent=1) + "\n")
    say(f"goodput misses, of {verdict['num_cells']} cells: {verdict['num_missed']}")
    say(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
