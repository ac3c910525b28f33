"""Pinning the host pool on a GPU machine."""

import logging

import pytest
import torch

from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool.layout import HostLayout

pytestmark = pytest.mark.gpu


def _pool() -> HostPool:
    return HostPool(HostLayout(num_layers=2, num_experts=4, rows=64, cols=128, itemsize=2), torch.bfloat16)


def test_a_pool_is_pinned() -> None:
    """After pin, copies from the pool are asynchronous."""
    pool = _pool()
    pool.pin()
    assert pool.is_pinned


def test_a_failing_registration_leaves_a_pageable_pool_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Registering fails (here: twice the same memory), a warning says so, and the next CUDA call works."""
    pool = _pool()
    pool.pin()
    pool.is_pinned = False
    with caplog.at_level(logging.WARNING):
        pool.pin()
    assert not pool.is_pinned
    assert "pinning" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3
