"""A host pool over memory of its own, and over a pool that came full from elsewhere."""

import os
from collections.abc import Callable
from ctypes import c_void_p

import pytest
import torch

from elasticmoe.runtime.device import cudart, host_pool
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool import memory, shared
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import ExpertKey

LAYOUT = HostLayout(num_layers=2, num_experts=3, rows=4, cols=8, itemsize=4)


def _fill(pool: HostPool) -> None:
    for layer in range(LAYOUT.num_layers):
        size = pool.gate_up(layer).numel()
        pool.gate_up(layer).copy_(torch.arange(size).view(3, 8, 8) + 1000 * layer)
        pool.down(layer).copy_(-torch.arange(pool.down(layer).numel()).view(3, 8, 4) - 1000 * layer)


def test_a_mapped_pool_reads_what_was_filled_in() -> None:
    """The same bytes, seen through the same views, from sealed memory that is larger than the pool."""
    own = HostPool(LAYOUT, torch.float32)
    _fill(own)
    fd = shared.create("elasticmoe-test", LAYOUT.pool_bytes + 4096)
    filled = shared.map_writable(fd)
    filled[: LAYOUT.pool_bytes] = own._bytes.numpy().tobytes()
    filled.close()
    shared.seal(fd)
    mapped = HostPool(LAYOUT, torch.float32, shared.map_sealed(fd))
    os.close(fd)
    assert mapped.is_mapped
    assert not own.is_mapped
    for layer in range(LAYOUT.num_layers):
        assert torch.equal(mapped.gate_up(layer), own.gate_up(layer))
        assert torch.equal(mapped.down(layer), own.down(layer))
    key = ExpertKey(1, 2)
    for have, want in zip(mapped.matrices(key), own.matrices(key), strict=True):
        assert torch.equal(have, want)


class _Runtime:
    """Stands for CUDA's runtime, which is not here: writes down its calls, and may refuse the last chunk."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.last_chunk: int | None = None

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: c_void_p) -> int:
            self.calls.append((name, *(arg.value for arg in args)))
            return 2 * (name == "cudaHostRegister" and args[0].value == self.last_chunk)

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    """Return what stands for CUDA's runtime; pages are made by it too, and pools are pinned in three chunks."""
    stands = _Runtime()

    def populate(*args: object, is_writable: bool) -> None:
        stands.calls.append(("populate", *args, is_writable))

    monkeypatch.setattr(host_pool, "MAX_REGISTER_BYTES", -(-LAYOUT.pool_bytes // 3))
    monkeypatch.setattr(memory, "populate", populate)
    monkeypatch.setattr(cudart, "library", lambda: stands)
    return stands


def _chunks(pool: HostPool) -> list[tuple[int, int]]:
    start, size = pool._bytes.data_ptr(), host_pool.MAX_REGISTER_BYTES
    end = start + LAYOUT.pool_bytes
    return [(at, min(size, end - at)) for at in range(start, end, size)]


def _mapped_pool() -> HostPool:
    fd = shared.create("elasticmoe-test", LAYOUT.pool_bytes)
    shared.seal(fd)
    mapped = shared.map_sealed(fd)
    os.close(fd)
    return HostPool(LAYOUT, torch.float32, mapped)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_pages_exist_before_they_are_pinned(runtime: _Runtime, is_mapped: bool) -> None:  # noqa: FBT001
    """All of the pool's, to be written or only read; CUDA would make them one after the other."""
    pool = _mapped_pool() if is_mapped else HostPool(LAYOUT, torch.float32)
    assert pool.pin() == 0
    assert pool.is_pinned
    flags = cudart.READ_ONLY if is_mapped else 0
    registered = [("cudaHostRegister", *chunk, flags) for chunk in _chunks(pool)]
    assert runtime.calls == [("populate", pool._bytes.data_ptr(), LAYOUT.pool_bytes, not is_mapped), *registered]


def test_a_pool_is_unpinned_once(runtime: _Runtime) -> None:
    """By whoever asks for it, or as it goes; a pool that isn't pinned has nothing to be."""
    pool = HostPool(LAYOUT, torch.float32)
    unregistered = [("cudaHostUnregister", start) for start, _ in _chunks(pool)]
    pool.unpin()
    assert runtime.calls == []
    pool.pin()
    runtime.calls.clear()
    pool.unpin()
    assert not pool.is_pinned
    assert runtime.calls == unregistered
    pool.unpin()
    del pool
    assert runtime.calls == unregistered


def test_a_refused_chunk_leaves_a_pageable_pool_and_no_error(runtime: _Runtime) -> None:
    """What was pinned before it is given back, and CUDA's last error taken: the next launch would have got it."""
    pool = HostPool(LAYOUT, torch.float32)
    *others, (runtime.last_chunk, _) = _chunks(pool)
    assert pool.pin() == 2
    assert not pool.is_pinned
    assert runtime.calls[-3:] == [("cudaGetLastError",), *(("cudaHostUnregister", start) for start, _ in others)]
