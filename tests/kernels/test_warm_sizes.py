"""The batch sizes that an engine runs at start launch every kernel that a later batch could launch."""

import pytest
import torch

from elasticmoe.kernels import launch
from elasticmoe.kernels.align import align_width
from elasticmoe.kernels.config import Shape, config_for

CPU = torch.device("cpu")
SHAPES = [(128, 8, 768), (60, 4, 1408), (512, 10, 512), (32, 6, 128), (16, 2, 128)]


@pytest.mark.parametrize("device", ["NVIDIA_H200", "a device that nobody measured"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "f"), [(128, 8, 768), (60, 4, 1408), (512, 10, 512), (32, 6, 128), (16, 2, 128)]
)
def test_no_batch_launches_a_kernel_for_the_first_time(
    monkeypatch: pytest.MonkeyPatch, device: str, num_experts: int, top_k: int, f: int
) -> None:
    """Of each size up to the largest, config and sorting have been launched; no size is there in vain."""
    monkeypatch.setattr(launch, "_device_name", lambda _: device)
    monkeypatch.setattr(launch, "_capability", lambda _: launch.HOPPER)
    shape = Shape(num_experts, top_k, f, 2048, torch.bfloat16)

    def kernels(tokens: int) -> tuple[object, ...]:
        is_whole = tokens <= launch.FEW_TOKENS
        return config_for(device, shape, tokens, is_hopper=True), align_width(tokens * top_k), is_whole

    sizes = launch.warm_sizes(shape, CPU, 9000)
    warm = [kernels(tokens) for tokens in sizes]
    assert {kernels(tokens) for tokens in range(1, 9001)} == set(warm)
    assert len(set(warm)) == len(warm)
    assert sizes == sorted(sizes)
    assert max(sizes) <= 9000
