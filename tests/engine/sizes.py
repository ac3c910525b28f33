"""Sizes of the test models' pages, and arenas with a given room for KV beside all experts."""

import json
from pathlib import Path
from typing import Any

from elasticmoe.runtime.contract.model import ModelShape, parse_model_shape
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers

ITEMSIZE = 4


def read_config(model: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config


def read_shape(model: Path) -> ModelShape:
    """Return the sizes of a checkpoint's experts."""
    config = read_config(model)
    return parse_model_shape(config["architectures"], config)


def read_tiers(model: Path, block_size: int, itemsize: int = ITEMSIZE) -> Tiers:
    """Return the page sizes of a checkpoint served in float32, or in the dtype of `itemsize` bytes."""
    config = read_config(model)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * itemsize
    return fit_tiers(read_shape(model).matrix_bytes(itemsize), token_bytes * block_size)


def arena_bytes(model: Path, block_size: int, kv_blocks: int, itemsize: int = ITEMSIZE) -> int:
    """Return an arena that holds every expert and `kv_blocks` blocks."""
    tiers = read_tiers(model, block_size, itemsize)
    return read_shape(model).expert_bytes_total(itemsize) + kv_blocks * tiers.block_bytes
