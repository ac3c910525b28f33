"""CUDA's runtime is there to be called wherever torch was built for it, and says itself what it can't do."""

import pytest
import torch

from elasticmoe.runtime.device import cudart

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA runtime"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused here is tested without a GPU"),
]


def test_without_a_device_the_real_runtime_refuses() -> None:
    """By a code of its own, which is told."""
    assert cudart.set_device(0) > 0
    assert cudart.register(2**21, 4096, 0) > 0
    assert cudart.unregister(2**21) > 0
