"""Times our kernel and vLLM's own fused MoE on the same inputs, in turns, in one process."""

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from bench.kernel.shapes import Shape, Weights, make_weights, route
from bench.kernel.timing import capture, interleaved_us
from elasticmoe.kernels.config import Config, nearest
from elasticmoe.kernels.launch import Batch, choose, paged_moe

NUM_OFFLOADED = 10
TOLERANCE = 0.03
"""Of the largest output; both sides round to bf16 at different places."""


def compare(
    shape: Shape, sizes: Sequence[int], repeats: int, configs: dict[int, Config] | None = None
) -> list[dict[str, Any]]:
    """Rows of {tokens, routing, shape, offloaded, ours_us, vllm_us, limit_us, …} with every run, in sizes' order."""
    weights = make_weights(shape, num_offloaded=NUM_OFFLOADED, contiguous=True)
    rows = []
    for tokens in sizes:
        for routing in ("skewed", "flat"):
            rows += compare_size(shape, tokens, weights, (routing, repeats, configs))
            print_row(rows[-2])
    return rows


def compare_size(
    shape: Shape, tokens: int, weights: Weights, how: tuple[str, int, dict[int, Config] | None]
) -> list[dict[str, Any]]:
    """Two rows: every expert resident, and some in loading buffers."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    routing, repeats, configs = how
    num_sets = 16 if tokens <= 16 else 4
    inputs = []
    for index in range(num_sets):
        gen = torch.Generator("cuda").manual_seed(1000 + index)
        hidden = torch.randn((tokens, shape.d), generator=gen, device="cuda").bfloat16()
        inputs.append((hidden, *route(shape, tokens, skewed=routing == "skewed", seed=1000 + index)))
    theirs: list[Callable[[], torch.Tensor]] = [
        partial(fused_experts, i[0], weights.w13, weights.w2, i[1], i[2]) for i in inputs
    ]
    config = nearest(configs, tokens) if configs else None
    tables = {0: weights.resident, NUM_OFFLOADED: weights.offloaded}
    ours = {
        offloaded: [_ours(Batch(*i, weights.up_pages, weights.down_pages, table), config) for i in inputs]
        for offloaded, table in tables.items()
    }
    errors = [_error(call(), theirs[0]()) for call in (ours[0][0], ours[NUM_OFFLOADED][0])]
    assert torch.equal(ours[0][0](), ours[NUM_OFFLOADED][0]()), "pages elsewhere, other bits"
    graphs = [capture(calls) for calls in (theirs, *ours.values())]
    vllm_runs, *our_runs = interleaved_us(graphs, num_sets, repeats)
    limit = statistics.fmean(shape.limit_us(len(i[2].unique()), tokens) for i in inputs)
    return [
        {
            "shape": shape.name, "tokens": tokens, "routing": routing, "offloaded": offloaded,
            "ours_us": statistics.median(runs), "vllm_us": statistics.median(vllm_runs), "limit_us": round(limit, 1),
            "error": error, "ours_runs": runs, "vllm_runs": vllm_runs,
        }
        for offloaded, runs, error in zip(tables, our_runs, errors, strict=True)
    ]  # fmt: skip


def warm_up(shapes: Sequence[Shape], sizes: Sequence[int]) -> None:
    """Compile vLLM's kernels of each shape in a process of its own, into Triton's cache."""
    with ProcessPoolExecutor(len(shapes), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_warm_up, shapes, [sizes] * len(shapes)))


def _warm_up(shape: Shape, sizes: Sequence[int]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts

    w13 = torch.empty((shape.num_experts, 2 * shape.f, shape.d), dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty((shape.num_experts, shape.d, shape.f), dtype=torch.bfloat16, device="cuda")
    with set_current_vllm_config(VllmConfig()):
        for tokens in sizes:
            hidden = torch.zeros((tokens, shape.d), dtype=torch.bfloat16, device="cuda")
            fused_experts(hidden, w13, w2, *route(shape, tokens, skewed=False, seed=0))
    torch.cuda.synchronize()


def _ours(batch: Batch, config: Config | None) -> Callable[[], torch.Tensor]:
    chosen = config or choose(batch)
    return lambda: paged_moe(
        batch.hidden, batch.topk_weights, batch.topk_ids, batch.up_pages, batch.down_pages, batch.table, chosen
    )


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, as a share of the largest output."""
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= TOLERANCE, f"differs from vLLM by {error:.3f} of the largest output"
    return round(error, 5)


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    ratio, share = row["ours_us"] / row["vllm_us"], row["limit_us"] / row["ours_us"]
    print(
        f"{row['shape']:16} {row['tokens']:5} {row['routing']:6} {row['offloaded']:2}  ours {row['ours_us']:7.1f}  "
        f"vllm {row['vllm_us']:7.1f}  {100 * (ratio - 1):+6.1f} %  roof {100 * share:3.0f} %",
        flush=True,
    )
