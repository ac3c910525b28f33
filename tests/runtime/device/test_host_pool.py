"""A host pool over memory of its own, and over a pool that came full from elsewhere."""

import os

import torch

from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool import shared
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
    memory = shared.map_writable(fd)
    memory[: LAYOUT.pool_bytes] = own._bytes.numpy().tobytes()
    memory.close()
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
