"""Serves a closed batch on one device by stock vLLM, by the elastic pool, and by a replay with every expert resident.

    python -m bench.serving_gpu run --system stock|elastic|replay --model CONFIG.json --out FILE
    python -m bench.serving_gpu combine STOCK ELASTIC REPLAY --out bench/results/serving-h200-eager.json

Weights are random, in the shape of the model's config. The replay runs the elastic scheduler once more, decision for
decision, over weights that never leave the device, so its tokens are those of an all-resident run of the same batches
(bf16 results differ with the batch). A result holds every run's raw figures.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.serving import needs
from bench.serving.arguments import amount, count, new_file
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import collect_meta
from bench.serving.model_config import read_model_config
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.simulator.served import find_dtype

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `reseed` is sent to the workers as a function
    "HF_HUB_OFFLINE": "1",
}
SYSTEMS = ("stock", "elastic", "replay")
WEIGHT_RANGE = 0.05
"""Dummy weights are uniform in ± this: with norms of one, activations stay near one and routing varies by token."""


def draw_lengths(num: int, mean_in: float, mean_out: float, limit: int, seed: int) -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of each request: lognormal with the given means, clamped to 4 … limit / 2."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return round(min(max(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), 4), limit // 2 - 1))

    return [(draw(mean_in, 1.0), draw(mean_out, 0.8)) for _ in range(num)]


def make_engine(args: argparse.Namespace, folder: str) -> Any:
    """Return vLLM's LLM, in this process, for the system asked for."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    widen_dummy_weights()
    shutil.copy(args.model, Path(folder) / "config.json")
    room = int(args.kv_gib * 2**30)
    extra: dict[str, Any] = {"kv_cache_memory_bytes": room}
    if args.system != "stock":
        arena = room + expert_bytes(Path(args.model)) // args.tp
        extra = {"additional_config": {"elasticmoe": {"arena_bytes": arena}}}
    if args.utilization is not None:
        extra = {"gpu_memory_utilization": args.utilization}
        extra |= {} if args.system == "stock" else {"additional_config": {"elasticmoe": {}}}
    if args.system == "replay":
        from bench.serving.resident import keep_all_resident

        keep_all_resident()
    llm = LLM(
        model=folder,
        dtype=str(find_dtype(read_model_config(Path(args.model))[0])),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=args.max_model_len,
        max_num_seqs=args.requests,
        enable_prefix_caching=False,
        block_size=16,
        tensor_parallel_size=args.tp,
        **extra,
    )
    llm.collective_rpc(reseed)
    return llm


def widen_dummy_weights() -> None:
    """Have this process draw vLLM's dummy weights, and so the elastic pool's, from ± WEIGHT_RANGE."""
    from vllm.model_executor.model_loader import weight_utils

    inner = weight_utils.initialize_single_dummy_weight.__wrapped__  # under torch.no_grad, which passes no defaults on
    _, _, seed = inner.__defaults__
    inner.__defaults__ = (-WEIGHT_RANGE, WEIGHT_RANGE, seed)


def reseed(worker: Any) -> None:
    """Set every norm's weight to one and give each other parameter a seed of its own.

    vLLM seeds all dummy weights alike, which makes the output head equal to the embedding: each request would repeat
    its last token whatever the experts do.
    """
    import torch

    for index, (name, parameter) in enumerate(worker.model_runner.model.named_parameters()):
        if "norm" in name:
            parameter.data.fill_(1)
        else:
            generator = torch.Generator(parameter.device).manual_seed(index)
            parameter.data.uniform_(-WEIGHT_RANGE, WEIGHT_RANGE, generator=generator)


def expert_bytes(config: Path) -> int:
    """Return the bytes of all routed experts of a model config (bf16 or as its dtype says)."""
    return read_model_config(config)[1].all_expert_bytes


class Recorder:
    """Notes what each step scheduled, by wrapping the scheduler's own method."""

    def __init__(self, scheduler: Any) -> None:
        """Start to record."""
        self.steps: list[tuple[float, dict[str, int]]] = []
        self.preemptions = 0
        self.peak = 0
        stock = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            self.steps.append((time.perf_counter(), dict(output.num_scheduled_tokens)))
            self.preemptions += len(output.preempted_req_ids or ())
            self.peak = max(self.peak, len(scheduler.running))
            return output

        scheduler.schedule = schedule


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the batch once after a short warm-up; return figures, schedule and tokens."""
    needs.engine()
    from vllm import SamplingParams

    lengths = draw_lengths(args.requests, args.mean_in, args.mean_out, args.max_model_len, args.seed)
    rng = random.Random(args.seed + 1)
    vocab = read_model_config(Path(args.model))[0]["vocab_size"]
    prompts = [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(prompt)]} for prompt, _ in lengths]
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        llm = make_engine(args, folder)
        ready_s = time.perf_counter() - start_s
        params = [
            SamplingParams(max_tokens=out, ignore_eos=True, temperature=0, detokenize=False) for _, out in lengths
        ]
        warm = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0, detokenize=False)
        llm.generate(prompts[:8], warm, use_tqdm=False)
        result = serve(args, llm, prompts, params) | {"ready_s": ready_s}
        write_whole(args.out, json.dumps(result) + "\n")
        if args.then_vllm_kernel:
            use_vllm_kernel()
            llm.generate(prompts[:8], warm, use_tqdm=False)
            result["vllm_kernel"] = serve(args, llm, prompts, params)
    return result


def serve(args: argparse.Namespace, llm: Any, prompts: list[Any], params: list[Any]) -> dict[str, Any]:
    """Serve the batch; return figures, schedule and tokens."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    stock = scheduler.schedule
    recorder = Recorder(scheduler)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    scheduler.schedule = stock
    return describe(args, scheduler, recorder, outputs, {"wall_s": wall_s})


def use_vllm_kernel() -> None:
    """Have this process compute the paged MoE by vLLM's Triton kernel, the fallback, from now on."""
    from elasticmoe.runtime.engine import moe_method
    from elasticmoe.runtime.engine.paged_kernel import paged_moe_vllm

    def compute(*operands: Any) -> Any:
        *tensors, late, _ = operands
        if late is not None:
            late.join()
        return paged_moe_vllm(*tensors)

    patched: Any = moe_method
    patched.paged_moe_triton = compute


def describe(
    args: argparse.Namespace, scheduler: Any, recorder: Recorder, outputs: list[Any], times: dict[str, float]
) -> dict[str, Any]:
    """Return the run as JSON-able data."""
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    names = {name: index for index, name in enumerate(sorted({n for _, s in recorder.steps for n in s}, key=_number))}
    result: dict[str, Any] = {
        "system": args.system,
        "kv_gib": args.kv_gib if args.utilization is None else None,
        "gpus": args.tp,
        "requests": args.requests,
        "async_scheduling": bool(scheduler.scheduler_config.async_scheduling),
        **times,
        "tok_s": sum(map(len, tokens)) / times["wall_s"],
        "steps": sum(1 for _, scheduled in recorder.steps if scheduled),
        "peak": recorder.peak,
        "preemptions": recorder.preemptions,
        "tokens": tokens,
        "schedule": [
            [[names[n], count] for n, count in scheduled.items()] for _, scheduled in recorder.steps if scheduled
        ],
    }
    if args.system != "stock":
        counts, table = scheduler.adjuster.counts, scheduler.adjuster.table
        table.check_integrity()
        result |= {"evictions": counts.evicted, "loads": counts.loaded, "resident_at_end": table.num_resident}
        result |= {"limit": scheduler.adjuster.limit, "worker": scheduler.metrics.totals()}
    return result


def _number(request_id: str) -> tuple[int, str]:
    head = request_id.split("-", maxsplit=1)[0]
    return (int(head) if head.isdigit() else -1, request_id)


def combine(paths: list[str], device: str, commit: str | None) -> dict[str, Any]:
    """Return one result out of the three runs: raw figures, ratios, and whether tokens and schedules agree."""
    runs = {run["system"]: run for run in (json.loads(Path(path).read_text(encoding="utf-8")) for path in paths)}
    stock, elastic, replay = (runs[name] for name in SYSTEMS)
    meta = {**asdict(collect_meta()), "gpu": device}
    rows = [{k: v for k, v in runs[name].items() if k not in ("tokens", "schedule")} for name in SYSTEMS]
    return {
        "meta": meta | ({"commit": commit} if commit else {}),
        "rows": rows,
        "ratio_tok_s": elastic["tok_s"] / stock["tok_s"],
        "ratio_peak": elastic["peak"] / stock["peak"],
        "same_schedule": elastic["schedule"] == replay["schedule"],
        "tokens_equal": elastic["tokens"] == replay["tokens"],
        "distinct_tokens": len({token for tokens in elastic["tokens"] for token in tokens}),
        "num_tokens": sum(map(len, elastic["tokens"])),
    }


def main() -> int:
    """Run one system, or combine the runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run")
    one.add_argument("--system", choices=SYSTEMS, required=True)
    one.add_argument("--model", required=True, help="a config.json in the shape of the model")
    one.add_argument("--then-vllm-kernel", action="store_true", help="serve once more, by the fallback kernel")
    one.add_argument("--kv-gib", type=amount, default=1.0)
    one.add_argument("--utilization", type=amount, help="size memory as vLLM does by default, instead of --kv-gib")
    one.add_argument("--tp", type=count, default=1, help="tensor-parallel GPUs")
    one.add_argument("--requests", type=count, default=256)
    one.add_argument("--mean-in", type=amount, default=168)
    one.add_argument("--mean-out", type=amount, default=205)
    one.add_argument("--max-model-len", type=count, default=2048)
    one.add_argument("--seed", type=int, default=0)
    three = commands.add_parser("combine")
    three.add_argument("runs", nargs=3)
    three.add_argument("--device", required=True, help="the GPU's name, for the result")
    three.add_argument("--commit", help="of the tree that ran, where it is no git checkout")
    for command in (one, three):
        command.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args()
    result = run(args) if args.command == "run" else combine(args.runs, args.device, args.commit)
    write_whole(args.out, json.dumps(result) + "\n")
    print({k: v for k, v in result.items() if k not in ("tokens", "schedule", "vllm_kernel")})
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
