"""Models and reference tokens that the engine tests share; an engine's environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import ENVIRONMENT, Requests, Tokens, draw_requests, running

NUM_REQUESTS = 64


@pytest.fixture(scope="session", autouse=True)
def vllm_environment() -> Iterator[None]:
    """Set what the engines need, and compile nothing: else every start compiles the sampler, for twenty seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"TORCH_COMPILE_DISABLE": "1"}).items():
            patch.setenv(name, value)
        yield


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
