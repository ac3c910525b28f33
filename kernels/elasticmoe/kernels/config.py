"""How a batch is computed: the committed configs of measured shapes and devices, and what the others get.

Called by `launch`. A config depends on shapes and device alone: a batch gives the same bits wherever its experts lie.
"""

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

FEW_ROWS = 1 / 4
"""Pairs an expert on average, up to which sorting doesn't pay."""
HALF = (torch.bfloat16, torch.float16)
"""What the measured tiles fit the shared memory with."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """How one of the two GEMMs is tiled and compiled."""

    block_n: int
    block_k: int
    group_m: int = 1
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    swap: bool = False
    halvings: int = 0
    """How often a block's height may be halved where the rows it holds leave the rest empty."""
    persistent: bool = False
    """One program a multiprocessor, the whole loop in one pipeline; W2 only, and only with `tma`."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a batch is computed; `block_m` 1 takes the kernels for batches too small to share weights."""

    block_m: int
    gate_up: Gemm
    down: Gemm
    pdl: bool = False
    """Whether each kernel may start while the one before it ends; Hopper and later."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one MoE layer: N experts of three f × d matrices, K of them a token."""

    num_experts: int
    top_k: int
    f: int
    d: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name in the config files; what suits it hardly depends on K."""
        return f"N={self.num_experts},f={self.f},d={self.d},{str(self.dtype).removeprefix('torch.')}"


@functools.cache
def config_for(device: str, shape: Shape, tokens: int, *, is_hopper: bool) -> Config:
    """The measured config that is nearest, or else one by the rows that an expert gets on average."""
    if tuned := tuned_configs(device).get(shape.name):
        return nearest(tuned, tokens)
    rows = tokens * shape.top_k / shape.num_experts
    if is_hopper and shape.dtype in HALF:
        return next(config for limit, config in _HOPPER if rows <= limit)
    return _plain_config(rows, shape.dtype)


def nearest(configs: dict[int, Config], tokens: int) -> Config:
    """The config of the batch size that is nearest by ratio."""
    return configs[min(configs, key=lambda size: (max(size, tokens) / min(size, tokens), size))]


@functools.cache
def tuned_configs(device: str) -> dict[str, dict[int, Config]]:
    """The committed configs of a device by shape and number of tokens; none for a device nobody has measured."""
    file = resources.files("elasticmoe.kernels").joinpath("configs", f"{device}.json")
    if not file.is_file():
        return {}
    shapes: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return {
        shape: {int(tokens): parse_config(entry) for tokens, entry in entries.items()}
        for shape, entries in shapes.items()
    }


def parse_config(entry: dict[str, Any]) -> Config:
    """A config as the files hold it."""
    return Config(**{**entry, "gate_up": Gemm(**entry["gate_up"]), "down": Gemm(**entry["down"])})


def _plain_config(rows: float, dtype: torch.dtype) -> Config:
    """One that needs no special hardware and at most 96 KiB of shared memory."""
    if rows <= FEW_ROWS:
        return _FEW
    block_m = next((size for size in (16, 32, 64) if rows <= size), 128)
    gemm = Gemm(64, 128 // dtype.itemsize, group_m=1 if rows <= block_m else 8)
    return Config(block_m, gemm, gemm)


_FEW = Config(1, Gemm(4, 1024), Gemm(4, 1024))
_TMA = Gemm(64, 128, tma=True)
_TALL = Gemm(128, 64, num_warps=8, num_stages=4, tma=True, halvings=1)
_HOPPER = (
    (FEW_ROWS, replace(_FEW, pdl=True)),
    (8, Config(16, replace(_TMA, swap=True), _TMA, pdl=True)),
    (16, Config(32, _TMA, replace(_TMA, block_n=128), pdl=True)),
    (48, Config(64, Gemm(64, 64, tma=True, swap=True, halvings=2), Gemm(128, 64, tma=True), pdl=True)),
    (math.inf, Config(128, _TALL, replace(_TALL, block_n=256), pdl=True)),
)
"""What won most often on an H200 over all shapes measured, by the most rows an expert that it is for."""
