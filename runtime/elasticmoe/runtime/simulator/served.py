"""A model as it is served: what its config.json says of experts, of everything else, and of KV, per GPU of a group."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticmoe.runtime.contract.model import ModelShape, parse_model_shape, refuse_wrong_sizes
from elasticmoe.runtime.errors import ConfigError, UnsupportedError
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers
from elasticmoe.runtime.units import MATRICES

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
ATTENTION_KEYS = ("num_attention_heads", "num_key_value_heads", "vocab_size")
OPTIONAL_KEYS = ("head_dim", "intermediate_size", "shared_expert_intermediate_size")
LAYER_LAUNCHES, SHARED_LAUNCHES = 16, 5
"""Kernels of a layer without, and more of one with a shared expert (and then without norms of queries and keys)."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Bytes and FLOPs of one GPU's part; FLOPs of a token are twice the weights that it meets."""

    name: str
    shape: ModelShape
    num_layers: int
    """All layers, with experts or without."""
    itemsize: int
    num_gpus: int
    block_size: int
    dense_bytes: int
    """Weights outside the routed experts that a forward reads: attention, gates, shared experts, the output head."""
    embedding_bytes: int
    """The input embedding, of which a forward reads a few rows."""
    kv_bytes: int
    """Keys and values of one token over all layers."""
    attention_width: int
    """Query heads times their size: the FLOPs of attending to one token are 4 times this a layer."""
    has_shared_expert: bool = False

    @property
    def num_launches(self) -> int:
        """Return the kernels of one layer, counted in vLLM's model code; what is launched without CUDA graphs."""
        return LAYER_LAUNCHES + SHARED_LAUNCHES * self.has_shared_expert

    @property
    def matrix_bytes(self) -> int:
        """Return E."""
        return self.shape.matrix_bytes(self.itemsize, self.num_gpus)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert of one layer."""
        return MATRICES * self.matrix_bytes

    @property
    def all_expert_bytes(self) -> int:
        """Return the bytes of all routed experts."""
        return self.shape.expert_bytes_total(self.itemsize, self.num_gpus)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return self.all_expert_bytes + self.dense_bytes + self.embedding_bytes

    @property
    def tiers(self) -> Tiers:
        """Return the page sizes."""
        return fit_tiers(self.matrix_bytes, self.kv_bytes * self.block_size)


def parse_served(config: Mapping[str, Any], name: str, num_gpus: int = 1, block_size: int = 16) -> ServedModel:
    """Return the model that a config.json describes, as `num_gpus` tensor-parallel GPUs serve it."""
    shape = parse_model_shape(config.get("architectures") or [], config)
    missing = [key for key in ATTENTION_KEYS if not config.get(key)]
    if missing:
        raise UnsupportedError(f"{name}: its config.json lacks {', '.join(missing)}; repair it")
    refuse_wrong_sizes(config, ATTENTION_KEYS, least=1)
    refuse_wrong_sizes(config, OPTIONAL_KEYS, least=0)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or shape.hidden_size // heads
    if shape.intermediate_size % num_gpus or heads % num_gpus:
        raise UnsupportedError(f"{name}: its experts and heads can't be split over {num_gpus} GPUs; use fewer")
    itemsize = _itemsize(config, name)
    num_layers = config["num_hidden_layers"]
    kv_width = max(1, kv_heads // num_gpus) * head_dim
    width = heads // num_gpus * head_dim
    attention = num_layers * shape.hidden_size * (2 * width + 2 * kv_width)
    gates = shape.num_layers * shape.num_experts * shape.hidden_size
    embedding = config["vocab_size"] * shape.hidden_size
    tied = bool(config.get("tie_word_embeddings"))
    dense = attention + gates + (_dense_weights(config, shape) + embedding) // num_gpus
    return ServedModel(
        name=name,
        shape=shape,
        num_layers=num_layers,
        itemsize=itemsize,
        num_gpus=num_gpus,
        block_size=block_size,
        dense_bytes=dense * itemsize,
        embedding_bytes=0 if tied else embedding // num_gpus * itemsize,
        kv_bytes=2 * num_layers * kv_width * itemsize,
        attention_width=width,
        has_shared_expert=bool(config.get("shared_expert_intermediate_size")),
    )


def read_served(path: Path, num_gpus: int = 1) -> ServedModel:
    """Return the model of a config.json, or of the checkpoint folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {path}: want a config.json or a folder with one ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {path}: want a JSON object, it is a {type(config).__name__}")
    return parse_served(config, path.stem if file == path else path.name, num_gpus)


def find_dtype(config: Mapping[str, Any]) -> object:
    """Return what a config.json has for its dtype, under either of the key's two names; bfloat16 if for neither."""
    return config.get("torch_dtype") or config.get("dtype") or "bfloat16"


def _itemsize(config: Mapping[str, Any], name: str) -> int:
    dtype = find_dtype(config)
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise UnsupportedError(f"{name}: its dtype {dtype} is not one that is paged ({', '.join(ITEMSIZES)})")
    return ITEMSIZES[dtype]


def _dense_weights(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Return the weights of shared experts and of layers without experts."""
    shared = shape.num_layers * (config.get("shared_expert_intermediate_size") or 0)
    dense = (config["num_hidden_layers"] - shape.num_layers) * (config.get("intermediate_size") or 0)
    return MATRICES * shape.hidden_size * int(shared + dense)
