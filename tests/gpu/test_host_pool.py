"""Pinning the host pool on a GPU machine."""

import os

import pytest
import torch

from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.pinning import Pinning
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import ExpertKey

pytestmark = pytest.mark.gpu


def _pool() -> HostPool:
    return HostPool(HostLayout(num_layers=2, num_experts=4, rows=64, cols=128, itemsize=2), torch.bfloat16)


def test_a_pool_is_pinned() -> None:
    """After pin, copies from the pool are asynchronous."""
    pool = _pool()
    assert pool.pin() == 0
    assert pool.is_pinned


def test_a_pool_is_pinned_beside_other_work() -> None:
    """The device computes meanwhile; afterwards copies from the pool are asynchronous."""
    pool = _pool()
    pinning = Pinning(pool, torch.device("cuda", torch.cuda.current_device()))
    ones = torch.ones((512, 512), device="cuda")
    for _ in range(100):
        ones = ones @ ones / 512
    assert pinning.wait().error == 0
    assert pool.is_pinned
    assert ones.mean().item() == 1.0


def test_a_mapped_pool_is_pinned_though_it_can_only_be_read() -> None:
    """A sealed pool that a coordinator would hand over is registered, and a copy to the GPU has its bytes."""
    num_bytes = _pool().layout.pool_bytes
    fd = shared.create("elasticmoe-test", num_bytes)
    memory = shared.map_writable(fd)
    memory[:] = os.urandom(num_bytes)
    memory.close()
    shared.seal(fd)
    pool = HostPool(_pool().layout, torch.bfloat16, shared.map_sealed(fd))
    os.close(fd)
    pool.pin()
    assert pool.is_pinned
    master = pool.matrices(ExpertKey(1, 3))[2]
    on_gpu = torch.empty(master.shape, dtype=torch.uint8, device="cuda")
    on_gpu.copy_(master, non_blocking=True)
    assert torch.equal(on_gpu.cpu(), master)


def test_a_pool_can_be_unpinned() -> None:
    """Its memory is the system's to move again, and can be pinned anew, which pinned memory can't."""
    pool = _pool()
    pool.pin()
    pool.unpin()
    assert not pool.is_pinned
    assert pool.pin() == 0
    assert pool.is_pinned


def test_a_failing_registration_leaves_a_pageable_pool_and_no_error() -> None:
    """Registering fails (here: twice the same memory), the result says so, and the next CUDA call works."""
    pool = _pool()
    pool.pin()
    pool.is_pinned = False
    assert pool.pin() > 0
    assert not pool.is_pinned
    assert torch.ones(3, device="cuda").sum().item() == 3
