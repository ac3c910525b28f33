"""The serving matrix of one model: stock vLLM, its offloaders, ours, and ours with parts left out.

    python -m bench.serving_h200 run --system ours --model bench/models/qwen3-30b-a3b.json --cells SPEC --out FILE
    python -m bench.serving_h200 combine FILES… --device NAME --commit SHA --out bench/results/serving-h200.json
    python -m bench.serving_h200 report bench/results/serving-h200.json --page docs/performance.md

A run is one process that starts one system with the largest room for KV, warms it up and serves the cells; smaller
rooms are made by withdrawing blocks. Weights are random and the routing is forced (`matrix/routing.py`). SPEC is
`workload:routing:kv_gib[@rate][+logprobs][xREPEATS],…`, such as `closed:skewed:0.5x3,open:skewed:2@0.7`: `kv_gib` of
one GPU, `rate` how many times faster than in the trace requests come; with `+logprobs` each token's logprob is noted,
to compare them, which costs time. Rows are appended to FILE as JSON lines, their tokens to FILE.tokens.jsonl; a
`replay` that is given `--follow FILE` of `ours` decides as that run did, so that it serves the same batches with every
expert resident, in memory beside the pool: no other engine fits its GPU. `report` prints the tables of a result, or
writes them into a page, and draws their plots.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.matrix.cells import FORM
from bench.matrix.combine import combine, refuse_other_rows
from bench.matrix.page import put
from bench.matrix.plots import draw_burst, draw_ratios
from bench.matrix.report import report
from bench.matrix.run import run
from bench.matrix.systems import SYSTEMS
from bench.serving.arguments import amount, count, new_file
from bench.serving.files import end_in_a_sentence, read_part, read_text
from bench.serving.meta import ROOT
from elasticmoe.runtime.cli.staging import write_whole


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run", help="serve cells by one system")
    one.add_argument("--system", choices=SYSTEMS, required=True)
    one.add_argument("--model", required=True, help="a config.json in the shape of the model")
    one.add_argument("--cells", required=True, help=f"{FORM},…")
    one.add_argument("--policy", choices=("goodput", "threshold", "fixed"), default="goodput")
    one.add_argument("--limit", type=int, help="experts of a layer that may leave (default: the runtime's)")
    one.add_argument("--fetch", choices=("host", "device"), help="default: the system's")
    one.add_argument("--eager", action="store_true", help="no graphs, whatever the system")
    one.add_argument("--follow", type=Path, help="file of a run whose policy's plans are followed")
    one.add_argument("--bus-gb-s", type=amount, help="slow fetches down to this rate")
    one.add_argument("--tp", type=count, default=1, help="tensor-parallel GPUs")
    one.add_argument("--max-kv-gib", type=amount, default=8.0, help="room for KV that the engine starts with")
    one.add_argument("--max-model-len", type=count, default=8192)
    one.add_argument("--max-num-seqs", type=count, default=256)
    one.add_argument("--requests", type=count, default=256, help="of a closed batch and of a burst")
    one.add_argument("--seconds", type=amount, default=20.0, help="of the open loop, and of the calm after a burst")
    one.add_argument("--seed", type=int, default=0)
    turns = "a file that runs of other systems on this GPU are given too: they start together, cells take turns"
    one.add_argument("--turns", type=Path, help=turns)
    one.add_argument("--deadline-s", type=amount, default=float("inf"), help="start no cell after so long")
    many = commands.add_parser("combine", help="one result out of the runs")
    many.add_argument("runs", nargs="+", type=Path)
    many.add_argument("--device", required=True, help="the GPU's name, for the result")
    many.add_argument("--commit", help="of the tree that ran, where it is no git checkout")
    many.add_argument("--meta", type=Path, help="a result of the machine that ran, where it isn't this one")
    many.add_argument("--keep", action="store_true", help="a cell that a later file has again is one more repeat")
    shown = commands.add_parser("report", help="tables and a plot out of a result")
    shown.add_argument("result", type=Path)
    shown.add_argument("--page", type=Path, help="a page of Markdown whose part `serving` is written anew")
    shown.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots", help="folder of the plots")
    for command in (one, many):
        command.add_argument("--out", type=new_file, required=True)
    return parser


def main() -> int:
    """Run one system, combine the runs or report of them; returns the exit status."""
    args = make_parser().parse_args()
    {"run": run, "combine": _combine, "report": _report}[args.command](args)
    return 0


def _combine(args: argparse.Namespace) -> None:
    meta = None if args.meta is None else read_part(args.meta, "meta", dict)
    result = combine(args.runs, args.device, args.commit, meta=meta, keep=args.keep)
    write_whole(args.out, json.dumps(result) + "\n")
    print(f"{len(result['rows'])} rows in {args.out}")


def _report(args: argparse.Namespace) -> None:
    rows = read_part(args.result, "rows", list)
    refuse_other_rows(rows, str(args.result))
    text, ratios, burst = report(rows), draw_ratios(rows), draw_burst(rows)
    page = None if args.page is None else put(read_text(args.page), "serving", text)
    write_whole(args.plots / "serving.svg", ratios)
    if burst is not None:
        write_whole(args.plots / "burst-h200.svg", burst)
    else:
        said = "want a burst's series by ours and by stock in one cell, there is none; run both"
        print(f"burst-h200.svg is not drawn: {said}", file=sys.stderr)
    if page is None:
        print(text)
    else:
        write_whole(args.page, page)


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
