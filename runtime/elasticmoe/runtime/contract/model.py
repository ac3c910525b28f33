"""A MoE model as its config.json describes it: the sizes that paging needs, for the architectures that we page."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticmoe.runtime.errors import UnsupportedError
from elasticmoe.runtime.units import MATRICES

NEEDED_KEYS = ("num_hidden_layers", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts")
ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
MOST_SIZE: Final = 10**7
"""Of any size; the largest of today's models is a vocabulary of some 10⁵."""
MOST: Final = {"num_hidden_layers": 1000}
"""Of a size that isn't far below MOST_SIZE in every model."""
MOST_EXPERTS: Final = 2**18
"""Of all layers together, some ten times what the largest of today's models have: tables have a row for each."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the routed experts of one model."""

    moe_layers: tuple[int, ...]
    """Which of the model's layers have routed experts, ascending."""
    num_experts: int
    top_k: int
    hidden_size: int
    """d."""
    intermediate_size: int
    """f, before tensor parallelism splits it."""

    @property
    def num_layers(self) -> int:
        """Return the number of MoE layers."""
        return len(self.moe_layers)

    def matrix_bytes(self, itemsize: int, tensor_parallel: int = 1) -> int:
        """Return E, one expert matrix on one rank, in bytes."""
        return self.intermediate_size // tensor_parallel * self.hidden_size * itemsize

    def expert_bytes_total(self, itemsize: int, tensor_parallel: int = 1) -> int:
        """Return the bytes of all routed experts on one rank."""
        return MATRICES * self.num_layers * self.num_experts * self.matrix_bytes(itemsize, tensor_parallel)


def parse_model_shape(architectures: Sequence[str], config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes; raises UnsupportedError for a model that we don't page."""
    listed = architectures if isinstance(architectures, list | tuple) else [architectures]
    names = [name if isinstance(name, str) else reprlib.repr(name) for name in listed]
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        message = (
            f"the model's architecture {', '.join(names) or '(none)':.200} is not one that elasticmoe pages "
            f"({', '.join(ARCHITECTURES)}); serve it with plain vLLM"
        )
        raise UnsupportedError(message)
    missing = [key for key in NEEDED_KEYS if config.get(key) is None]
    if missing:
        message = f"the model's config.json lacks {', '.join(missing)}, which every {known[0]} has; repair it"
        raise UnsupportedError(message)
    refuse_wrong_sizes(config, COUNTS, least=0)
    refuse_wrong_sizes(config, (*NEEDED_KEYS[1:], "decoder_sparse_step"), least=1)
    _refuse_empty_heads(config)
    layers = _find_moe_layers(config)
    num_experts = config.get("num_experts") or config.get("num_local_experts")  # the name since transformers 5
    if not layers or not num_experts:
        message = f"the model's config.json describes no routed experts ({known[0]}); serve it with plain vLLM"
        raise UnsupportedError(message)
    _refuse_wrong_experts(len(layers), num_experts, config["num_experts_per_tok"])
    return ModelShape(
        moe_layers=layers,
        num_experts=num_experts,
        top_k=config["num_experts_per_tok"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
    )


def refuse_wrong_sizes(config: Mapping[str, Any], keys: Sequence[str], *, least: int) -> None:
    """Raise UnsupportedError for the first of these keys that has no whole number from `least` to what models have."""
    for key in keys:
        value, most = config.get(key), MOST.get(key, MOST_SIZE)
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_count and least <= value <= most):
            message = (
                f"the model's config.json has {reprlib.repr(value)} for {key}, "
                f"want a whole number from {least} on, {most} at most; repair it"
            )
            raise UnsupportedError(message)


def _refuse_empty_heads(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where heads that share the hidden size would get nothing of it."""
    refuse_wrong_sizes(config, ("num_attention_heads",), least=1)
    hidden, heads = config["hidden_size"], config.get("num_attention_heads") or 1
    if not config.get("head_dim") and heads > hidden:
        message = f"the model's config.json has {heads} heads for a hidden size of {hidden} and no head_dim; repair it"
        raise UnsupportedError(message)


def _refuse_wrong_experts(num_layers: int, num_experts: int, top_k: int) -> None:
    if top_k > num_experts:
        message = f"the model's config.json has {top_k} experts a token of {num_experts}; repair it"
        raise UnsupportedError(message)
    if num_layers * num_experts > MOST_EXPERTS:
        message = (
            f"the model's config.json has {num_layers} layers of {num_experts} experts, "
            f"want at most {MOST_EXPERTS} experts in all; repair it"
        )
        raise UnsupportedError(message)


def _find_moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        message = (
            f"the model's config.json has {reprlib.repr(dense)} for mlp_only_layers, want a list of layers; repair it"
        )
        raise UnsupportedError(message)
    left_out = frozenset(dense)
    return tuple(n for n in range(config["num_hidden_layers"]) if n not in left_out and (n + 1) % step == 0)
