"""`elasticmoe plan`: says from a day of a vLLM deployment's metrics whether the pool would help, and what to expect.

    elasticmoe plan --model config.json --gpu h200 --usage kv.json --usage running.json --usage waiting.json

Simulates; needs no GPU, no torch and no vLLM.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elasticmoe.runtime.cli import plan_report
from elasticmoe.runtime.cli.progress import progress
from elasticmoe.runtime.cli.refuse import refuse_output
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.advice import Advice, Lengths, advise
from elasticmoe.runtime.simulator.hardware import GPUS, Gpu, find_gpu
from elasticmoe.runtime.simulator.outcome import Slo
from elasticmoe.runtime.simulator.scheduler import Limits
from elasticmoe.runtime.simulator.served import ServedModel, read_served
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.usage import Usage, read_usage

USABLE_MEMORY = 0.9
"""vLLM's default --gpu-memory-utilization."""
ACTIVATIONS_BYTES = 2**30
"""What vLLM leaves for activations, roughly, where it isn't told how much room KV has."""

MOST_BLOCKS = 10**7
"""Of a simulated pool, some hundred times what models and GPUs come to: it has a row of its books for each."""
MOST = 10**9
"""Of any number on the command line: no deployment has more, and it is far from where arithmetic ends."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan` to the command's subparsers."""
    parser = subparsers.add_parser("plan", help="say from a deployment's metrics whether the pool would help")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="config.json, or the folder that holds it")
    add("--gpu", required=True, help=f"{', '.join(GPUS)}, or a JSON file that describes one")
    usage = "Prometheus' answers to range queries of KV use, running and waiting (JSON, repeat), or one CSV file"
    add("--usage", type=Path, action="append", required=True, help=usage)
    add("--kv-gib", type=float, help="KV room of one GPU, as vLLM's log says (default: from the GPU's memory)")
    add("--prompt-tokens", type=int, default=1000, help="mean of a request (default: %(default)s)")
    add("--answer-tokens", type=int, default=200, help="mean of a request (default: %(default)s)")
    add("--max-model-len", type=int, default=8192, help="the deployment's (default: %(default)s)")
    add("--max-num-seqs", type=int, default=256, help="the deployment's (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=8192, help="the deployment's (default: %(default)s)")
    add("--tpot-ms", type=float, default=100.0, help="P99 of the time per token to keep (default: %(default)s)")
    add("--ttft-ms", type=float, help="time to the first token for which goodput gives up tokens/s (default: none)")
    add("--routing", choices=("skewed", "flat"), default="skewed", help="of the experts (default: %(default)s)")
    add("--json", action="store_true", help="print everything as JSON instead of a table")
    add("--plot", type=Path, help="write the day and the sweep of the limit as SVG into this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 whether the pool would help or not."""
    _check(args)
    gpu = find_gpu(args.gpu)
    model = read_served(args.model, gpu.num_gpus)
    usage = read_usage(args.usage)
    system = System(
        model=model,
        gpu=gpu,
        kv_bytes=find_kv_bytes(args.kv_gib, model, gpu),
        routing=args.routing,
        max_model_len=args.max_model_len,
        limits=Limits(args.max_num_seqs, args.max_num_batched_tokens, model.block_size),
    )
    _refuse_many_blocks(system)
    lengths = Lengths(args.prompt_tokens, args.answer_tokens)
    slo = Slo(math.inf if args.ttft_ms is None else args.ttft_ms / 1000, args.tpot_ms / 1000)
    with progress("plan") as shown:
        advice = advise(usage, system, lengths, slo, shown.begin)
    if args.json:
        print(json.dumps(to_json(usage, system, advice), indent=1), flush=True)
    else:
        print(plan_report.table(usage, system, advice, slo), flush=True)
    if args.plot is not None:
        write_whole(args.plot, plan_report.draw(usage, advice))
        print(f"plan: wrote {args.plot}", file=sys.stderr)
    return 0


def find_kv_bytes(kv_gib: float | None, model: ServedModel, gpu: Gpu) -> int:
    """Return the KV room of one GPU: as told, or what weights leave; raises ConfigError where that is nothing."""
    if kv_gib is not None:
        return int(kv_gib * 2**30)
    room = int(gpu.memory_gib * USABLE_MEMORY * 2**30) - model.weight_bytes - ACTIVATIONS_BYTES
    if room <= 0:
        message = (
            f"--kv-gib: {gpu.name} has {gpu.memory_gib} GiB a GPU, {model.name}'s weights take "
            f"{model.weight_bytes / 2**30:.1f}; say how much room KV has"
        )
        raise ConfigError(message)
    return room


def _refuse_many_blocks(system: System) -> None:
    """Raise ConfigError for a pool so large beside its blocks that its books would take all memory."""
    model, gib = system.model, 2**30
    num = (model.all_expert_bytes + system.kv_bytes) // (model.kv_bytes * model.block_size)
    if num > MOST_BLOCKS:
        message = (
            f"--kv-gib: {system.kv_bytes / gib:g} GiB beside {model.all_expert_bytes / gib:.1f} of experts have {num} "
            f"blocks of KV, want at most {MOST_BLOCKS}; check {model.name}'s config.json, or give less"
        )
        raise ConfigError(message)


def to_json(usage: Usage, system: System, advice: Advice) -> dict[str, Any]:
    """Return the whole plan as JSON-able data."""
    return {
        "usage": {
            "hours": round(usage.hours, 2),
            "kv_usage_median": usage.kv_usage(0.5),
            "kv_usage_p99": usage.kv_usage(0.99),
            "waiting_share": usage.waiting_share,
            "full_share": usage.full_share,
            "short_share": usage.short_share,
        },
        "system": {"model": system.model.name, "gpu": system.gpu.name, "kv_bytes": system.kv_bytes},
        "advice": asdict(advice),
    }


def _check(args: argparse.Namespace) -> None:
    names = ("prompt_tokens", "answer_tokens", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tpot_ms")
    for name in (*names, *(name for name in ("kv_gib", "ttft_ms") if getattr(args, name) is not None)):
        if not 0 < getattr(args, name) <= MOST:
            flag, given = name.replace("_", "-"), getattr(args, name)
            raise ConfigError(f"--{flag}: want a number above 0 and at most {MOST}, it is {given}")
    if args.plot is not None:
        refuse_output("--plot", args.plot)
