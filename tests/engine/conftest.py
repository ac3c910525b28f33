"""Models and reference tokens that the engine tests share; an engine's environment."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import Requests, Tokens, draw_requests, running

NUM_REQUESTS = 64


@pytest.fixture(scope="session", autouse=True)
def vllm_environment() -> Iterator[None]:
    """Keep vLLM's engine in this process, offline, on its first model runner."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # else every start compiles the sampler, for twenty seconds
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3-MoE checkpoint whose expert pages are whole blocks."""
    return _make("tiny", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen2-MoE checkpoint with shared experts whose pages and blocks don't divide."""
    return _make("tiny-qwen2", tmp_path_factory)


def _make(preset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from elasticmoe.runtime.cli.main import main

    folder = tmp_path_factory.mktemp("models") / preset
    assert main(["make-model", preset, str(folder)]) == 0
    return folder


@pytest.fixture(scope="session", params=["tiny", "tiny_qwen2"])
def model(request: pytest.FixtureRequest) -> Path:
    """Return each of the two checkpoints in turn."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="session")
def requests() -> Requests:
    """Return the requests that every equality test sends."""
    return draw_requests(NUM_REQUESTS)


@pytest.fixture(scope="session")
def stock_tokens(model: Path, requests: Requests) -> Tokens:
    """Return stock vLLM's greedy tokens for those requests, with ample KV room."""
    with running(model, kv_cache_memory_bytes=2**28) as engine:
        tokens = engine.generate(requests)
        assert not hasattr(engine.scheduler, "adjuster")
    return tokens
