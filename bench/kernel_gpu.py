"""Tunes the paged kernel on the GPU at hand, and times it against vLLM's own fused MoE.

    python -m bench.kernel_gpu tune SHAPE ... --out FILE.json        # configs, and every time measured
    python -m bench.kernel_gpu run SHAPE ... --out bench/results/kernel-h200.json

`run` takes the committed configs, or a tune's with --configs. Shapes: bench/kernel/shapes.py.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.serving import needs

if __name__ == "__main__":
    needs.first("torch", "triton")

from bench.kernel.shapes import SHAPES
from bench.serving.arguments import count, counts, new_file
from bench.serving.errors import BadScenario
from bench.serving.files import end_in_a_sentence, parse_object, read_text
from bench.serving.meta import collect_meta, find_versions
from elasticmoe.kernels.config import Config, parse_config
from elasticmoe.runtime.cli.staging import write_whole

SIZES = tuple(2**power for power in range(14))
MOST_TOKENS = 2**17
"""Of a batch: more than any engine computes in a step."""


def main() -> int:
    """Run what the command line says; 0 if the result was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("tune", "run"))
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--out", type=new_file, required=True)
    parser.add_argument("--sizes", type=counts(1, MOST_TOKENS), default=list(SIZES))
    parser.add_argument("--repeats", type=count, default=15)
    parser.add_argument("--workers", type=count, default=14)
    parser.add_argument("--configs", type=Path, help="a tune's result instead of the committed configs")
    args = parser.parse_args()
    args.tuned = read_tuned(args.configs, args.shapes) if args.configs else {}
    if args.command == "run":
        needs.packages("vllm")
    result: dict[str, Any] = {"meta": meta()}
    run = tune_shapes if args.command == "tune" else run_shapes
    for _ in run(args, result):
        write_whole(args.out, json.dumps(result))
    return 0


def read_tuned(path: Path, shapes: list[str]) -> dict[str, dict[int, Config]]:
    """The configs of each shape by tokens, as a tune has written them; BadScenario if the file has none of one."""
    result = parse_object(read_text(path), str(path))
    try:
        configs = {name: result[name]["configs"].items() for name in shapes}
        return {name: {int(tokens): parse_config(entry) for tokens, entry in configs[name]} for name in shapes}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wanted = f"want a tune's configs of {', '.join(shapes)}"
        message = f"{path}: {wanted}, they can't be read ({error!r}); tune them, or leave out --configs"
        raise BadScenario(message) from error


def tune_shapes(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
    """Add each shape's configs and log."""
    from bench.kernel.tune import compile_all, tune

    shapes = [SHAPES[name] for name in args.shapes]
    started = time.perf_counter()
    failed = compile_all(shapes, args.sizes, args.workers)
    print(f"compiled in {time.perf_counter() - started:.0f} s, {len(failed)} do not fit", flush=True)
    for shape in shapes:
        result[shape.name] = tune(shape, args.sizes, failed)
        yield


def run_shapes(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
    """Add each shape's rows."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.config import VllmConfig, set_current_vllm_config

    from bench.kernel.compare import compare, warm_up

    warm_up([SHAPES[name] for name in args.shapes], args.sizes)
    for name in args.shapes:
        with set_current_vllm_config(VllmConfig()):
            result.setdefault("rows", []).extend(compare(SHAPES[name], args.sizes, args.repeats, args.tuned.get(name)))
        yield


def meta() -> dict[str, Any]:
    """Versions, hardware and commit, which comes by environment where the tree is a bare copy; BenchError if no GPU."""
    needs.gpu()
    import torch

    found = dataclasses.asdict(collect_meta())
    found["commit"] = os.environ.get("ELASTICMOE_COMMIT", found["commit"])
    found["packages"] |= find_versions(("triton",))
    return found | {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
