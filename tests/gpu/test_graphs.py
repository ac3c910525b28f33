"""Real engines on a GPU with compiled layers and CUDA graphs: experts come and go between replays, and no bit changes.

On a GPU results differ with the batch, so each run is compared with a replay of the same schedule, step by step, over
experts that never leave the device. The requests ask for log-probabilities, which would show any other logit.
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import BLOCK_SIZE, ENVIRONMENT, Engine, Requests, draw_requests, running
from tests.engine.sizes import arena_bytes, read_shape

pytestmark = pytest.mark.gpu

NUM_REQUESTS = 48
ROOM_BLOCKS = 60
"""KV room beside all experts: a few of the requests that want to run."""
LIMITS = {5: 0, 15: 100, 40: 3, 60: 100}
"""By step, the limit that is asked for: up and down while requests run."""
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "dtype": "bfloat16",
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.05,
}


@pytest.fixture(scope="module", autouse=True)
def vllm_environment() -> Iterator[None]:
    """Set what the engines need; the GPU machine has no sampler of FlashInfer's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a Qwen3-MoE checkpoint, and a Qwen2-MoE one with shared experts and pages that blocks don't divide."""
    from elasticmoe.runtime.cli.main import main

    folder = tmp_path_factory.mktemp("models")
    for preset in ("tiny", "tiny-qwen2"):
        assert main(["make-model", preset, str(folder / preset)]) == 0
    return {preset: folder / preset for preset in ("tiny", "tiny-qwen2")}


@dataclass(slots=True)
class Run:
    """What one engine did."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    schedule: list[dict[str, int]]
    evicted: int
    loaded: int
    missed: float
    predicted: float
    syncs: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    """What vLLM's log says of kernels that were compiled while requests waited."""


def _generate(engine: Engine, requests: Requests) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False, logprobs=1)
        for num in requests.max_tokens
    ]
    prompts = [{"prompt_token_ids": ids} for ids in requests.prompts]
    outputs = [output.outputs[0] for output in engine.llm.generate(prompts, params, use_tqdm=False)]
    tokens = [list(output.token_ids) for output in outputs]
    return tokens, [[step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]


def _watch_syncs(engine: Engine) -> list[str]:
    """Return a list that grows by every wait for the device that the worker's part of a step makes."""
    import torch

    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    worker, seen = executor.driver_worker.worker, list[str]()
    stock = worker.execute_model

    def execute_model(output: object) -> object:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return stock(output)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                seen.extend(text for each in caught if "called a synchron" in (text := str(each.message)))

    worker.execute_model = execute_model
    return seen


def _serve(model: Path, requests: Requests, case: "Case", caplog: pytest.LogCaptureFixture) -> Run:
    """Serve the requests while the limit goes up and down; the schedule is of the steps that had tokens."""
    sizes = {"arena_bytes": arena_bytes(model, BLOCK_SIZE, ROOM_BLOCKS, itemsize=2), "lookahead": case.lookahead}
    with running(model, sizes, **GRAPHS, **case.flags) as engine:
        num_experts, schedule = read_shape(model).num_experts, list[dict[str, int]]()
        engine.generate(draw_requests(2, seed=9))  # whatever runs for the first time may wait
        engine._steps = 0
        engine.on_step = lambda step: (
            engine.scheduler._on_limit(min(LIMITS[step], num_experts)) if step in LIMITS else None
        )
        stock = engine.scheduler.schedule

        def schedule_step(*args: Any) -> Any:
            output = stock(*args)
            if output.num_scheduled_tokens:
                schedule.append({name.split("-")[0]: num for name, num in output.num_scheduled_tokens.items()})
            return output

        engine.scheduler.schedule = schedule_step
        syncs = _watch_syncs(engine)
        caplog.clear()
        tokens, logprobs = _generate(engine, requests)
        engine.on_step = lambda _: None
        engine.idle()
        engine.adjuster.table.check_integrity()
        counts, totals = engine.adjuster.counts, engine.scheduler.metrics.totals()
        told = [record.getMessage() for record in caplog.records]
        compiled = [text for text in told if "JIT compilation during inference" in text]
        moved = counts.evicted, counts.loaded, totals["missed"], totals["predicted"]
        return Run(tokens, logprobs, schedule, *moved, syncs, compiled)


KERNELS = (
    "gate_up_kernel", "down_kernel", "sum_kernel", "gate_up_few_kernel", "down_few_kernel", "_place_experts",
    "_place_tile", "_count_tile", "_fetch", "_stamp",
)  # fmt: skip
"""Ours, by the names that vLLM's log says when one is compiled while requests wait."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve."""

    preset: str = "tiny"
    flags: dict[str, Any] = field(default_factory=dict)
    most_tokens: int = 48
    """That a request asks for."""
    lookahead: int = 0


CASES = {
    "decode": Case(),
    "ahead": Case(lookahead=1),
    "prompts": Case(flags={"enable_prefix_caching": False}, most_tokens=2),
    "ngram": Case(flags={"speculative_config": NGRAM}),
    "synchronous": Case(flags={"async_scheduling": False}),
    "shared experts": Case("tiny-qwen2", lookahead=1),
}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings(r"ignore:(.|\n)*scheduled for deprecation")  # numba, of vLLM's n-gram drafts
@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_are_those_of_the_same_batches_with_everything_resident(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Bit for bit under evictions, misses and reloads, without a wait for the device or the compiler in a step.

    An engine that compiles the model's other layers differs in its last bits from the later ones, which have them from
    vLLM's cache, with everything resident too: so the two that are compared come after one more.
    """
    from bench.serving.resident import ResidentExperts
    from elasticmoe.runtime.engine import worker

    wanted, drawn = CASES[case], draw_requests(NUM_REQUESTS)
    model = models[wanted.preset]
    requests = Requests(drawn.prompts, [min(num, wanted.most_tokens) for num in drawn.max_tokens])
    first = _serve(model, requests, wanted, caplog)
    assert not [text for text in first.compiled if any(f" {name}." in text for name in KERNELS)]
    elastic = _serve(model, requests, wanted, caplog)
    assert elastic.evicted > 0
    assert elastic.loaded > 0
    assert elastic.missed > 0
    assert (elastic.predicted > 0) == bool(wanted.lookahead)
    if case != "ngram":  # vLLM's own drafts make its worker wait
        assert elastic.syncs == []
    monkeypatch.setattr(worker, "Experts", ResidentExperts)
    resident = _serve(model, requests, wanted, caplog)
    assert resident.missed == 0
    assert elastic.schedule == resident.schedule
    assert elastic.tokens == resident.tokens
    assert elastic.logprobs == resident.logprobs


def test_graphs_are_used(models: dict[str, Path]) -> None:
    """Without a flag the engine captures full graphs for decoding and pieces for the rest; driven by the host, none."""
    from vllm.config import CUDAGraphMode

    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        pytest.skip("TORCH_COMPILE_DISABLE=1 takes vLLM's pieces away")
    model = models["tiny"]
    sizes = {"arena_bytes": arena_bytes(model, BLOCK_SIZE, ROOM_BLOCKS, itemsize=2)}
    with running(model, sizes, **GRAPHS) as engine:
        compilation = engine.llm.llm_engine.vllm_config.compilation_config
        assert compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    with running(model, sizes | {"fetch": "host"}, **GRAPHS) as engine:
        compilation = engine.llm.llm_engine.vllm_config.compilation_config
        assert compilation.cudagraph_mode == CUDAGraphMode.NONE
