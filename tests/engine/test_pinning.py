"""A worker waits for the host pool's pinning before whatever mustn't run beside it, and no sooner. Without a device."""

from types import SimpleNamespace
from typing import Any

import pytest

from elasticmoe.runtime.device.pinning import Pinned
from elasticmoe.runtime.engine.worker import ElasticWorkerMixin
from elasticmoe.runtime.errors import ConfigError

pytestmark = pytest.mark.vllm


class _Stock:
    """Stands for vLLM's worker, which needs a GPU to start: writes down when it is asked for what."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def determine_available_memory(self) -> int:
        self.calls.append("measure")
        return 8

    def initialize_from_config(self, _: object) -> None:
        self.calls.append("arena")
        raise InterruptedError  # what follows isn't of interest here


class _Worker(ElasticWorkerMixin, _Stock):
    """A worker whose pool is being pinned."""

    def __init__(self, kv_cache_memory_bytes: int | None, error: int = 0, fetch: str = "device") -> None:
        super().__init__()
        given: Any = SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes)
        self.cache_config = given
        self.vllm_config = SimpleNamespace(additional_config={"elasticmoe": {"fetch": fetch}})
        self.experts = SimpleNamespace(pool=SimpleNamespace(layout=SimpleNamespace(pool_bytes=2**20)))  # type: ignore[assignment]
        self._error = error
        self._pinning = self

    def wait(self) -> Pinned:
        self.calls.append("pinned")
        return Pinned(self._error, 1.5)

    def _elastic_tiers(self) -> Any:
        return SimpleNamespace(block_bytes=2, raw_block_bytes=2)

    def _elastic_geometry(self, *_: object) -> Any:
        return SimpleNamespace(least_offload=lambda: 0)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device drive fetches, which is refused where there is none."""
    monkeypatch.setattr("elasticmoe.runtime.engine.worker.fetch_kind", lambda config: config.fetch)
    monkeypatch.setattr("elasticmoe.runtime.engine.worker.packed", lambda config, _: config)


@pytest.mark.parametrize(
    ("given", "order"),
    [(2**30, ["measure", "pinned", "arena"]), (None, ["pinned", "measure", "arena"])],
    ids=["given", "measured"],
)
def test_pinning_ends_before_the_arena_and_before_memory_is_measured(given: int | None, order: list[str]) -> None:
    """Where the arena's size is given vLLM compiles meanwhile; where it isn't, vLLM captures graphs to measure."""
    worker = _Worker(given)
    worker.determine_available_memory()
    config: Any = SimpleNamespace(num_blocks=4)
    with pytest.raises(InterruptedError):
        worker.initialize_from_config(config)
    assert worker.calls == order
    assert worker.pin_s == 1.5


def test_a_failure_refuses_where_the_device_would_fetch() -> None:
    """And is a warning where the host does."""
    with pytest.raises(ConfigError, match="of host memory failed"):
        _Worker(None, error=2).determine_available_memory()
    assert _Worker(None, error=2, fetch="host").determine_available_memory() == 8
