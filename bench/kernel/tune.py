"""Finds the fastest config of each batch size of a shape: both GEMMs alone, then the whole call."""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any

import torch

from bench.kernel.shapes import SHAPES, Shape, Weights, make_weights, route
from bench.kernel.space import FEW, block_sizes, gemms
from bench.kernel.timing import median_us
from elasticmoe.kernels.align import align
from elasticmoe.kernels.config import Config, Gemm
from elasticmoe.kernels.launch import Batch, down, gate_up, paged_moe

REPEATS = 5
FEW_TOKENS = 8
"""Batches up to which the kernels without sharing are tried."""
FEW_BASE = Gemm(16, 256)
KEPT = 2
"""Configs of each GEMM that are tried in the whole call."""

Job = tuple[str, int, Gemm, bool]
"""One compilation: shape, block height, GEMM, and whether it is the second."""


def tune(shape: Shape, sizes: Sequence[int], failed: set[Job]) -> dict[str, Any]:
    """Return {"configs": {tokens: config}, "log": every time measured}."""
    started = time.perf_counter()
    weights = make_weights(shape, num_offloaded=0, contiguous=False)
    result: dict[str, Any] = {"configs": {}, "log": []}
    for tokens in sizes:
        us, best, log = tune_size(shape, tokens, weights, failed)
        result["configs"][str(tokens)] = asdict(best)
        result["log"] += log
        took = time.perf_counter() - started
        print(f"{shape.name} {tokens}: {us:.1f} us {best.block_m} {astuple(best)[1:]} {took:.0f} s", flush=True)
    return result


def tune_size(
    shape: Shape, tokens: int, weights: Weights, failed: set[Job]
) -> tuple[float, Config, list[dict[str, Any]]]:
    """Return the time and the config of the fastest whole call, and the log."""
    inputs = _batches(shape, tokens, weights)
    log: list[dict[str, Any]] = []
    finals: list[Config] = []
    for block_m in block_sizes(tokens * shape.top_k / shape.num_experts):
        best = []
        for is_down in (False, True):
            jobs = [(shape.name, block_m, gemm, is_down) for gemm in gemms(block_m, is_down=is_down, f=shape.f)]
            times = {job[2]: median_us(_calls(inputs, job), REPEATS) for job in jobs if job not in failed}
            log += [
                {"tokens": tokens, "block_m": block_m, "is_down": is_down, "us": us, **asdict(gemm)}
                for gemm, us in times.items()
            ]
            best.append(sorted(times, key=times.__getitem__)[:KEPT])
        finals += [Config(block_m, first, second, pdl=True) for first, second in zip(*best, strict=True)]
    if tokens <= FEW_TOKENS:
        finals += _few_configs(inputs)
    whole = {config: median_us(_whole(inputs, config), 3 * REPEATS) for config in finals}
    log += [{"tokens": tokens, "us": us, **asdict(config)} for config, us in whole.items()]
    winner = min(whole, key=whole.__getitem__)
    return whole[winner], winner, log


def _batches(shape: Shape, tokens: int, weights: Weights) -> list[Batch]:
    """As many batches as it takes to defeat the cache, every other one with skewed routing."""
    made = []
    for index in range(8 if tokens <= 64 and shape.d * shape.f < 2**22 else 2):
        gen = torch.Generator("cuda").manual_seed(index)
        hidden = torch.randn((tokens, shape.d), generator=gen, device="cuda").bfloat16()
        routing = route(shape, tokens, skewed=index % 2 == 0, seed=index)
        made.append(Batch(hidden, *routing, weights.up_pages, weights.down_pages, weights.resident))
    return made


def _few_configs(inputs: list[Batch]) -> list[Config]:
    """The kernels without sharing, each half the fastest with the other fixed."""

    def fastest(configs: Iterable[Config]) -> Config:
        times = {config: median_us(_whole(inputs, config), REPEATS) for config in configs}
        return min(times, key=times.__getitem__)

    first = fastest(Config(1, gemm, FEW_BASE, pdl=True) for gemm in FEW)
    return [fastest(replace(first, down=gemm) for gemm in FEW)]


def _whole(inputs: list[Batch], config: Config) -> list[Callable[[], object]]:
    return [
        partial(paged_moe, b.hidden, b.topk_weights, b.topk_ids, b.up_pages, b.down_pages, b.table, config)
        for b in inputs
    ]


def _calls(inputs: list[Batch], job: Job) -> list[Callable[[], object]]:
    """One GEMM alone over each batch, its alignment made before."""
    _, block_m, gemm, is_down = job
    config = Config(block_m, gemm, gemm)
    if block_m == 1:
        few = replace(config, gate_up=FEW_BASE) if is_down else replace(config, down=FEW_BASE)
        return _whole(inputs, replace(few, pdl=True))
    calls: list[Callable[[], object]] = []
    for batch in inputs:
        _, f, d = batch.up_pages.shape
        order = align(batch.topk_ids, batch.table, block_m)
        act = torch.randn((order.sorted_token_ids.shape[0], f), device="cuda").bfloat16()
        if is_down:
            products = torch.empty((act.shape[0], d), dtype=torch.bfloat16, device="cuda")
            calls.append(partial(down, batch, config, order, act, products))
        else:
            calls.append(partial(gate_up, batch, config, order, act))
    return calls


def compile_all(shapes: Sequence[Shape], sizes: Sequence[int], workers: int) -> set[Job]:
    """Compile in processes of their own, into Triton's cache; return what does not fit the device."""
    jobs = list(dict.fromkeys(job for shape in shapes for job in _work(shape, sizes)))
    chunks = [jobs[start::workers] for start in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return {job for failed in pool.map(_compile, chunks) for job in failed}


def _work(shape: Shape, sizes: Sequence[int]) -> Iterator[Job]:
    """Every GEMM that tuning will time."""
    for is_down in (False, True):
        yield from ((shape.name, 1, gemm, is_down) for gemm in FEW)
        for tokens in sizes:
            for block_m in block_sizes(tokens * shape.top_k / shape.num_experts):
                for gemm in gemms(block_m, is_down=is_down, f=shape.f):
                    yield shape.name, block_m, gemm, is_down


def _compile(jobs: list[Job]) -> list[Job]:
    """Run each GEMM once on a batch of a few pages; return those that failed."""
    failed = []
    for job in jobs:
        shape = SHAPES[job[0]]
        pages = torch.zeros((8, shape.f * shape.d), dtype=torch.bfloat16, device="cuda")
        batch = Batch(
            torch.zeros((4, shape.d), dtype=torch.bfloat16, device="cuda"),
            torch.full((4, shape.top_k), 0.5, device="cuda"),
            torch.zeros((4, shape.top_k), dtype=torch.int32, device="cuda"),
            pages.view(8, shape.f, shape.d),
            pages.view(8, shape.d, shape.f),
            torch.zeros((shape.num_experts, 3), dtype=torch.int32, device="cuda"),
        )
        try:
            _calls([batch], job)[0]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 (Triton has no common base for what a device or compiler refuses)
            print(f"{job}: {type(error).__name__} {str(error)[:80]}", file=sys.stderr)
            failed.append(job)
    return failed
