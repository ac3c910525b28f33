"""Sizes of a MoE model out of its config.json."""

from typing import Any

import pytest

from elasticmoe.runtime.contract.model import ModelShape, parse_model_shape
from elasticmoe.runtime.errors import UnsupportedError

QWEN3_30B: dict[str, Any] = {
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_the_shape_of_qwen3_30b() -> None:
    """48 MoE layers of 128 experts; a matrix is 3 MiB in bf16, and half of that with two ranks."""
    shape = parse_model_shape(["Qwen3MoeForCausalLM"], QWEN3_30B)
    assert shape == ModelShape(tuple(range(48)), 128, 8, 2048, 768)
    assert shape.num_layers == 48
    assert (shape.matrix_bytes(2), shape.matrix_bytes(2, tensor_parallel=2)) == (3 * 2**20, 3 * 2**19)
    assert shape.expert_bytes_total(2) == 54 * 2**30
    assert shape.expert_bytes_total(2, tensor_parallel=2) == 27 * 2**30


def test_dense_layers_are_not_counted() -> None:
    """Every second layer is sparse, and one of them is named dense: layers 1, 5 and 7 of 8 remain."""
    config = QWEN3_30B | {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert parse_model_shape(["Qwen2MoeForCausalLM"], config).moe_layers == (1, 5, 7)


def test_keys_that_have_defaults_may_be_missing() -> None:
    """Without a sparse step and dense layers every layer is a MoE layer."""
    config = {k: v for k, v in QWEN3_30B.items() if k not in ("decoder_sparse_step", "mlp_only_layers")}
    assert parse_model_shape(["Qwen3MoeForCausalLM"], config).num_layers == 48


def test_the_other_name_for_the_number_of_experts() -> None:
    """`num_local_experts` is read where there is no `num_experts`."""
    config = {k: v for k, v in QWEN3_30B.items() if k != "num_experts"} | {"num_local_experts": 64}
    assert parse_model_shape(["Qwen3MoeForCausalLM"], config).num_experts == 64


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["A", "B"], []])
def test_an_architecture_that_is_not_paged_is_refused(architectures: list[str]) -> None:
    """The message names it, and those that are paged."""
    named = ", ".join(architectures) or r"\(none\)"
    with pytest.raises(UnsupportedError, match=f"architecture {named} is not one that elasticmoe pages .*Qwen3Moe"):
        parse_model_shape(architectures, QWEN3_30B)


def test_one_architecture_may_stand_without_its_list() -> None:
    """A name alone is taken."""
    name: Any = "Qwen3MoeForCausalLM"
    assert parse_model_shape(name, QWEN3_30B).num_experts == 128


@pytest.mark.parametrize(("architectures", "named"), [([1, 2], "1, 2"), (5, "5")])
def test_architectures_that_are_no_names_are_refused(architectures: object, named: str) -> None:
    """As they are."""
    given: Any = architectures
    with pytest.raises(UnsupportedError, match=f"architecture {named} is not one"):
        parse_model_shape(given, QWEN3_30B)


@pytest.mark.parametrize(
    "change",
    [{"num_experts": 0}, {"num_experts": None}, {"mlp_only_layers": list(range(48))}, {"num_hidden_layers": 0}],
)
def test_a_model_without_routed_experts_is_refused(change: dict[str, Any]) -> None:
    """No experts or no MoE layers: nothing to page."""
    with pytest.raises(UnsupportedError, match=r"no routed experts \(Qwen3MoeForCausalLM\); serve it with plain vLLM"):
        parse_model_shape(["Qwen3MoeForCausalLM"], QWEN3_30B | change)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts_per_tok", "hidden_size", "moe_intermediate_size"])
def test_a_config_that_lacks_a_size_is_refused_by_key(key: str) -> None:
    """The key is named."""
    config = {k: v for k, v in QWEN3_30B.items() if k != key}
    with pytest.raises(UnsupportedError, match=f"config.json lacks {key}, which every Qwen3MoeForCausalLM has"):
        parse_model_shape(["Qwen3MoeForCausalLM"], config)


@pytest.mark.parametrize("value", [-1, 1.5, "8", True, [8], float("nan")])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "hidden_size", "decoder_sparse_step"])
def test_a_size_that_is_no_count_is_refused_by_key(key: str, value: object) -> None:
    """Key and value are named."""
    with pytest.raises(
        UnsupportedError, match=rf"config.json has .* for {key}, want a whole number from [01] on, 10+ at most;"
    ):
        parse_model_shape(["Qwen3MoeForCausalLM"], QWEN3_30B | {key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 0}, "has 0 for decoder_sparse_step, want a whole number from 1 on, 10000000 at most"),
        ({"mlp_only_layers": 3}, "has 3 for mlp_only_layers, want a list of layers"),
        ({"mlp_only_layers": [[1]]}, r"has \[\[1\]\] for mlp_only_layers, want a list of layers"),
        ({"num_experts_per_tok": 129}, "has 129 experts a token of 128"),
        ({"num_hidden_layers": 1001}, "has 1001 for num_hidden_layers, want a whole number from 0 on, 1000 at most;"),
        ({"hidden_size": 10**7 + 1}, "has 10000001 for hidden_size, want a whole number from 1 on, 10000000 at most;"),
        ({"num_hidden_layers": 1000, "num_experts": 263}, "has 1000 layers of 263 experts, want at most 262144"),
        ({"num_attention_heads": 2049}, "has 2049 heads for a hidden size of 2048 and no head_dim"),
        ({"num_attention_heads": 10**9}, "has 1000000000 for num_attention_heads, want a whole number from 1 on"),
    ],
)
def test_sizes_that_no_model_has_are_refused(change: dict[str, Any], message: str) -> None:
    """The message says what they are."""
    with pytest.raises(UnsupportedError, match=message):
        parse_model_shape(["Qwen3MoeForCausalLM"], QWEN3_30B | change)


def test_the_largest_sizes_are_taken() -> None:
    """A model of all that is allowed; heads of a size of their own may be more than the hidden size has room for."""
    change = {"num_hidden_layers": 1000, "num_experts": 262, "num_attention_heads": 4096, "head_dim": 128}
    assert parse_model_shape(["Qwen3MoeForCausalLM"], QWEN3_30B | change).num_layers == 1000


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 10**4000},
        {"hidden_size": "8" * 10**6},
        {"mlp_only_layers": ["8"] * 10**6},
        {"architectures": ["A" * 10**6]},
        {"architectures": [["A"] * 10**6]},
    ],
)
def test_what_is_wrong_is_told_in_short(change: dict[str, Any]) -> None:
    """However long it is."""
    config = {"architectures": ["Qwen3MoeForCausalLM"]} | QWEN3_30B | change
    with pytest.raises(UnsupportedError) as refused:
        parse_model_shape(config["architectures"], config)
    assert len(str(refused.value)) < 500
