"""Which config a batch gets."""

import itertools
import json
import math
from importlib import resources

import pytest
import torch

from elasticmoe.kernels.align import max_blocks
from elasticmoe.kernels.config import Config, Gemm, Shape, config_for, nearest, tuned_configs

QWEN3 = Shape(128, 8, 768, 2048, torch.bfloat16)
H200 = "NVIDIA_H200"
SHARED_BYTES = {H200: 227 * 1024, "any": 99 * 1024}
SIZES = [2**power for power in range(14)]


def _shared_bytes(block_m: int, gemm: Gemm, itemsize: int, matrices: int) -> int:
    """What the operands of all stages in flight take; one stage fewer where its result stays in registers."""
    stages = gemm.num_stages if gemm.swap or block_m >= 64 else gemm.num_stages - 1
    return stages * (block_m + matrices * gemm.block_n) * gemm.block_k * itemsize


def test_a_measured_shape_gets_the_nearest_size_by_ratio() -> None:
    """Ties go to the smaller size; sizes beyond the measured ones get the last."""
    configs = {size: Config(size, Gemm(16, 16), Gemm(16, 16)) for size in (2, 8, 32)}
    assert [nearest(configs, tokens).block_m for tokens in (1, 4, 5, 16, 17, 9999)] == [2, 2, 8, 8, 32, 32]


def test_a_measured_device_has_configs_that_fit_it() -> None:
    """Every committed entry parses and keeps to the shared memory of its device."""
    names = [file.name for file in resources.files("elasticmoe.kernels").joinpath("configs").iterdir()]
    assert names == [f"{H200}.json"]
    for shape, configs in tuned_configs(H200).items():
        assert shape.endswith("bfloat16")
        assert set(configs) <= set(SIZES)
        for config in configs.values():
            if config.block_m > 1:
                assert _shared_bytes(config.block_m, config.gate_up, 2, 2) <= SHARED_BYTES[H200]
                assert _shared_bytes(config.block_m, config.down, 2, 1) <= SHARED_BYTES[H200]


def test_the_configs_are_taken_for_their_shape_and_device() -> None:
    """The measured device and shape get what the file says, and any other shape or device something else."""
    text = resources.files("elasticmoe.kernels").joinpath("configs", f"{H200}.json").read_text(encoding="utf-8")
    entry = json.loads(text)[QWEN3.name]["64"]
    got = config_for(H200, QWEN3, 64, is_hopper=True)
    assert (got.block_m, got.gate_up.block_k) == (entry["block_m"], entry["gate_up"]["block_k"])
    assert not config_for("Some_GPU", QWEN3, 64, is_hopper=False).gate_up.tma


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_unknown_device_gets_what_any_device_has(dtype: torch.dtype) -> None:
    """No descriptors, no dependent launch, and little shared memory, at every batch size."""
    for tokens in SIZES:
        config = config_for("Some_GPU", Shape(128, 8, 768, 2048, dtype), tokens, is_hopper=False)
        assert not config.pdl
        for gemm, matrices in ((config.gate_up, 2), (config.down, 1)):
            assert not gemm.tma
            if config.block_m > 1:
                assert _shared_bytes(config.block_m, gemm, dtype.itemsize, matrices) <= SHARED_BYTES["any"]


def test_an_unmeasured_shape_on_hopper_gets_descriptors_where_they_fit() -> None:
    """Half precision only: the tiles were measured with it and would not fit the shared memory with float32."""
    for tokens in SIZES:
        half = config_for("NVIDIA_H100", QWEN3, tokens, is_hopper=True)
        assert half.pdl
        assert half.gate_up.tma == (half.block_m > 1)
        assert not config_for("NVIDIA_H100", Shape(128, 8, 768, 2048, torch.float32), tokens, is_hopper=True).pdl


@pytest.mark.parametrize("block_m", [1, 2, 3])
def test_no_routing_needs_more_blocks_than_the_bound(block_m: int) -> None:
    """Over every way to deal pairs to three experts the bound holds, and some way reaches it."""
    for pairs in range(1, 9):
        deals = [counts for counts in itertools.product(range(pairs + 1), repeat=3) if sum(counts) == pairs]
        needed = max(sum(math.ceil(count / block_m) for count in counts) for counts in deals)
        assert max_blocks(pairs, 3, block_m) == needed
