"""A worker waits for the host pool's pinning before whatever mustn't run beside it, and no sooner. Without a device."""

import logging
from ctypes import c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode

from elasticmoe.runtime.device import cudart
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.pinning import FAULT, Pinned
from elasticmoe.runtime.engine.worker import ElasticWorkerMixin
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.hostpool.layout import HostLayout

pytestmark = pytest.mark.vllm
_TIERS = SimpleNamespace(expert_bytes=2, block_bytes=2, huge_bytes=2, waste=0.0)


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

    def __init__(self, kv_cache_memory_bytes: int | None, error: int | Exception = 0, fetch: str | None = None) -> None:
        super().__init__()
        self.rank = 0
        given: Any = SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes)
        self.cache_config = given
        graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        own = {"elasticmoe": {"fetch": fetch}}
        self.vllm_config = SimpleNamespace(additional_config=own, compilation_config=graphs)
        pool = HostPool(HostLayout(num_layers=1, num_experts=2, rows=4, cols=8, itemsize=4), torch.float32)
        self.experts = SimpleNamespace(pool=pool, drive=self.calls.append)  # type: ignore[assignment]
        self._error = error
        self._pinning = self

    def wait(self) -> Pinned:
        self.calls.append("pinned")
        if isinstance(self._error, Exception):
            raise self._error
        return Pinned(self._error or self.experts.pool.pin(), 1.5)

    def _elastic_tiers(self) -> Any:
        return SimpleNamespace(block_bytes=2, raw_block_bytes=2)

    def _elastic_geometry(self, *_: object) -> Any:
        return SimpleNamespace(least_offload=lambda: 0)


class _Runtime:
    """Stands for CUDA's runtime: pins whatever it is asked to, and knows how much that is."""

    def __init__(self) -> None:
        self.pinned: dict[int | None, int] = {}

    def cudaHostRegister(self, start: c_void_p, num_bytes: c_size_t, _: object) -> int:  # noqa: N802 -- CUDA's name
        self.pinned[start.value] = num_bytes.value
        return 0

    def cudaHostUnregister(self, start: c_void_p) -> int:  # noqa: N802 -- CUDA's name
        del self.pinned[start.value]
        return 0


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    """Return what pins here."""
    stands = _Runtime()
    monkeypatch.setattr(cudart, "library", lambda: stands)
    return stands


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device drive fetches, which is refused where there is none; the rank is alone."""
    monkeypatch.setattr("elasticmoe.runtime.engine.worker.fetch_kind", lambda config: config.fetch or "device")
    monkeypatch.setattr("elasticmoe.runtime.engine.worker.get_world_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr("elasticmoe.runtime.device.pinning.worst_error", lambda error, _: error)
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
    assert worker.pin_waited_s is not None
    assert worker.pin_waited_s < 1.5
    assert worker.experts.pool.is_pinned


@pytest.mark.parametrize("fetch", [None, "host"])
@pytest.mark.parametrize(
    ("given", "order"),
    [(2**30, ["measure", "pinned", "host", "arena"]), (None, ["pinned", "host", "measure", "arena"])],
    ids=["given", "measured"],
)
def test_where_pinning_is_refused_the_host_drives_fetches(
    given: int | None, order: list[str], fetch: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without graphs, which are neither measured nor captured by then; one warning, of one sentence."""
    worker = _Worker(given, error=2, fetch=fetch)
    config: Any = SimpleNamespace(num_blocks=4)
    with caplog.at_level(logging.INFO, "vllm.elasticmoe.worker"):
        worker.determine_available_memory()
        with pytest.raises(InterruptedError):
            worker.initialize_from_config(config)
    assert worker.calls == order
    assert worker.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert "of host memory was refused" in warning.getMessage()
    assert worker.pin_s is worker.pin_waited_s is None  # nothing was pinned in them


def test_where_another_rank_is_refused_this_one_gives_its_pinned_pages_back(
    monkeypatch: pytest.MonkeyPatch, runtime: _Runtime
) -> None:
    """All serve from pageable memory, say so in their start lines, and tell no seconds of pinning."""
    worker = _Worker(None)
    seen = list[int]()

    def refused_elsewhere(error: int, _: object) -> int:
        seen.extend((error, sum(runtime.pinned.values())))
        return 2

    monkeypatch.setattr("elasticmoe.runtime.device.pinning.worst_error", refused_elsewhere)
    worker.determine_available_memory()
    pool = worker.experts.pool
    assert seen == [0, pool.layout.pool_bytes]
    assert not runtime.pinned
    geometry: Any = SimpleNamespace(tiers=_TIERS, arena_bytes=8, num_blocks=4, num_layers=1, num_experts=2)
    *_, told = worker._elastic_report(geometry, 2, 0).lines()
    assert told.endswith(", pageable")
    assert worker.pin_s is worker.pin_waited_s is None


def test_what_pinning_raises_is_raised_once_the_other_ranks_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for this rank's word."""
    said = list[int]()
    monkeypatch.setattr("elasticmoe.runtime.device.pinning.worst_error", lambda error, _: said.append(error))
    with pytest.raises(MemoryError, match="no thread"):
        _Worker(None, MemoryError("no thread")).determine_available_memory()
    assert said == [FAULT]


def test_a_device_that_was_asked_for_is_not_replaced() -> None:
    """What the user asked for is refused, never dropped; a pool that is pinned keeps its graphs."""
    with pytest.raises(ConfigError, match="of host memory was refused"):
        _Worker(None, error=2, fetch="device").determine_available_memory()
    worker = _Worker(None, fetch="device")
    worker.determine_available_memory()
    assert worker.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
