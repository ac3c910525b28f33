"""A host pool over memory of its own, and over a pool that came full from elsewhere."""

import os

import pytest
import torch

from elasticmoe.runtime.device import host_pool
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


@pytest.mark.parametrize("is_mapped", [False, True])
def test_pages_exist_before_they_are_pinned(monkeypatch: pytest.MonkeyPatch, is_mapped: bool) -> None:  # noqa: FBT001
    """All of the pool's, to be written or only read; CUDA, which is not here, would make them one after the other."""
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(memory, "populate", lambda *args, is_writable: done.append((*args, is_writable)))

    def register(*args: int) -> int:
        done.append(args)
        return 0

    monkeypatch.setattr(host_pool, "_register", register)
    monkeypatch.setattr(host_pool, "_unregister", lambda _: None)
    mapped = None
    if is_mapped:
        fd = shared.create("elasticmoe-test", LAYOUT.pool_bytes)
        shared.seal(fd)
        mapped = shared.map_sealed(fd)
        os.close(fd)
    pool = HostPool(LAYOUT, torch.float32, mapped)
    assert pool.pin() == 0
    assert pool.is_pinned
    start, flags = pool._bytes.data_ptr(), host_pool.READ_ONLY if is_mapped else 0
    assert done == [(start, LAYOUT.pool_bytes, not is_mapped), (start, LAYOUT.pool_bytes, flags)]
