"""A MoE model as its config.json describes it: the sizes that paging needs, for the architectures that we page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticmoe.runtime.errors import UnsupportedError
from elasticmoe.runtime.units import MATRICES

NEEDED_KEYS = ("num_hidden_layers", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts")
ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


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
    names = list(map(str, architectures if isinstance(architectures, list | tuple) else [architectures]))
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        message = (
            f"the model's architecture {', '.join(names) or '(none)'} is not one that elasticmoe pages "
            f"({', '.join(ARCHITECTURES)}); serve it with plain vLLM"
        )
        raise UnsupportedError(message)
    missing = [key for key in NEEDED_KEYS if config.get(key) is None]
    if missing:
        message = f"the model's config.json lacks {', '.join(missing)}, which every {known[0]} has; repair it"
        raise UnsupportedError(message)
    refuse_wrong_sizes(config, COUNTS, least=0)
    refuse_wrong_sizes(config, (*NEEDED_KEYS[1:], "decoder_sparse_step"), least=1)
    layers = _find_moe_layers(config)
    num_experts = config.get("num_experts") or config.get("num_local_experts")  # the name since transformers 5
    if not layers or not num_experts:
        message = f"the model's config.json describes no routed experts ({known[0]}); serve it with plain vLLM"
        raise UnsupportedError(message)
    if config["num_experts_per_tok"] > num_experts:
        message = (
            f"the model's config.json has {config['num_experts_per_tok']} experts a token of {num_experts}; repair it"
        )
        raise UnsupportedError(message)
    return ModelShape(
        moe_layers=layers,
        num_experts=num_experts,
        top_k=config["num_experts_per_tok"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
    )


def refuse_wrong_sizes(config: Mapping[str, Any], keys: Sequence[str], *, least: int) -> None:
    """Raise UnsupportedError for the first of these keys that has a value other than a whole number from `least` on."""
    for key in keys:
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            message = f"the model's config.json has {value!r} for {key}, want a whole number from {least} on; repair it"
            raise UnsupportedError(message)


def _find_moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        message = f"the model's config.json has {dense!r} for mlp_only_layers, want a list of layers; repair it"
        raise UnsupportedError(message)
    return tuple(n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0)
