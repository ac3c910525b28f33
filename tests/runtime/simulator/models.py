"""Models that the simulator's tests serve: two real ones by their configs, and a tiny one."""

import json
from pathlib import Path
from typing import Any

from elasticmoe.runtime.simulator.served import ServedModel, parse_served

CONFIGS = Path(__file__).resolve().parents[3] / "bench" / "models"

TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}


def read_config(name: str) -> dict[str, Any]:
    """Return the config.json of a real model."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def qwen3(num_gpus: int = 1) -> ServedModel:
    """Return Qwen3-30B-A3B."""
    return parse_served(read_config("qwen3-30b-a3b"), "qwen3-30b-a3b", num_gpus)


def tiny() -> ServedModel:
    """Return a model whose expert is twelve blocks of 16 tokens."""
    return parse_served(TINY, "tiny")
