"""A GPU is one of those described here, or what a JSON file says; anything else is refused with what was wanted."""

import json
from pathlib import Path

import pytest

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.hardware import GPUS, RTX_4090_X2, find_gpu, parse_gpu

LEAST = {"name": "mine", "memory_bytes_s": 1e12, "flops_s": 1e14, "copy_bytes_s": 2e10}


@pytest.mark.parametrize("name", GPUS)
def test_the_described_ones_are_found_by_name(name: str) -> None:
    """Each is found by the name it bears."""
    assert find_gpu(name).name == name


def test_two_cards_are_one_group() -> None:
    """The pair of 4090s is one tensor-parallel group, without peer access."""
    assert RTX_4090_X2.num_gpus == 2
    assert RTX_4090_X2.link_bytes_s < RTX_4090_X2.copy_bytes_s


def test_a_file_describes_one(tmp_path: Path) -> None:
    """Name and three rates are enough."""
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(LEAST))
    assert find_gpu(str(path)) == parse_gpu(LEAST, "here")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (LEAST | {"flop_s": 1}, "unknown keys flop_s; known ones are contention"),
        (LEAST | {"flops_s": "fast"}, "want numbers for flops_s"),
        (LEAST | {"num_gpus": True}, "want numbers for num_gpus"),
        ({"name": "mine"}, "want at least name, memory_bytes_s, flops_s, copy_bytes_s; it has name"),
        ({}, "it has nothing"),
        (LEAST | {"copy_bytes_s": 0}, "GPU mine: copy_bytes_s must be above 0, it is 0"),
        (LEAST | {"memory_share": 0}, "GPU mine: memory_share must be above 0, it is 0"),
        (LEAST | {"flops_s": float("nan")}, "GPU mine: flops_s must be above 0, it is nan"),
        (LEAST | {"link_bytes_s": float("inf")}, "GPU mine: link_bytes_s must be above 0, it is inf"),
        (LEAST | {"layer_s": -1}, "GPU mine: layer_s must be 0 or more, it is -1"),
        (LEAST | {"memory_gib": float("nan")}, "GPU mine: memory_gib must be 0 or more, it is nan"),
        (LEAST | {"num_gpus": 1.5}, "want a whole number for num_gpus, it is 1.5"),
    ],
)
def test_a_wrong_description_is_refused(document: dict[str, object], message: str) -> None:
    """The error names the key and what it should be."""
    with pytest.raises(ConfigError, match=message):
        parse_gpu(document, "gpu.json")


def test_what_is_no_description_is_refused(tmp_path: Path) -> None:
    """Neither a name nor a readable file, or a file with something else."""
    with pytest.raises(ConfigError, match="want one of h200, rtx5090, rtx4090x2, or a JSON file"):
        find_gpu("a100")
    path = tmp_path / "gpu.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="or a JSON file"):
        find_gpu(str(path))
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="want a JSON object that describes a GPU, it is a list"):
        find_gpu(str(path))
