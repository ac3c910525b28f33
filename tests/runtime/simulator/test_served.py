"""Bytes that a config.json implies, against the published sizes of the models."""

import json
from pathlib import Path

import pytest

from elasticmoe.runtime.errors import ConfigError, UnsupportedError
from elasticmoe.runtime.simulator.served import parse_served, read_served
from tests.runtime.simulator.models import TINY, qwen3, read_config

GIB, MIB = 2**30, 2**20


def test_qwen3_30b_a3b() -> None:
    """30.5 billion weights in bf16, 96 KiB of KV a token, expert pages of 3 MiB, blocks of 1.5 MiB."""
    model = qwen3()
    assert model.weight_bytes == pytest.approx(30.53e9 * 2, rel=0.005)
    assert model.kv_bytes == 96 * 1024
    assert (model.matrix_bytes, model.tiers.block_bytes) == (3 * MIB, 3 * MIB // 2)
    assert model.expert_bytes == 9 * MIB


def test_qwen15_moe_has_shared_experts() -> None:
    """14.3 billion weights, 192 KiB of KV a token, expert pages of 5.5 MiB; more kernels a layer than Qwen3."""
    model = parse_served(read_config("qwen1.5-moe-a2.7b"), "qwen1.5")
    assert model.weight_bytes == pytest.approx(14.3e9 * 2, rel=0.01)
    assert model.kv_bytes == 192 * 1024
    assert model.matrix_bytes == 5.5 * MIB
    assert model.num_launches > qwen3().num_launches


def test_two_gpus_hold_half_each() -> None:
    """Experts, KV and attention split; the gates don't."""
    whole, half = qwen3(), qwen3(2)
    assert half.all_expert_bytes * 2 == whole.all_expert_bytes
    assert half.kv_bytes * 2 == whole.kv_bytes
    assert whole.dense_bytes / 2 < half.dense_bytes < whole.dense_bytes * 0.51


def test_layers_without_experts_and_tied_embeddings_count() -> None:
    """A dense layer adds three matrices of its own; a tied embedding is there once."""
    plain = parse_served(TINY | {"intermediate_size": 64}, "plain")
    mixed = parse_served(TINY | {"intermediate_size": 64, "mlp_only_layers": [0]}, "mixed")
    gate = 16 * 128 * 4
    assert mixed.dense_bytes - plain.dense_bytes == 3 * 128 * 64 * 4 - gate
    tied = parse_served(TINY | {"tie_word_embeddings": True}, "tied")
    assert plain.embedding_bytes == 1000 * 128 * 4
    assert tied.embedding_bytes == 0


def test_heads_without_a_size_of_their_own_share_the_hidden_size() -> None:
    """head_dim may be missing: it is hidden_size / num_attention_heads then."""
    config = {key: value for key, value in TINY.items() if key != "head_dim"}
    assert parse_served(config, "x").kv_bytes == 2 * 4 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("change", "num_gpus", "message"),
    [
        ({"vocab_size": None}, 1, "its config.json lacks vocab_size"),
        ({"vocab_size": "many"}, 1, "has 'many' for vocab_size, want a whole number from 1 on"),
        ({"num_key_value_heads": 1.5}, 1, "has 1.5 for num_key_value_heads"),
        ({"head_dim": -1}, 1, "has -1 for head_dim, want a whole number from 0 on"),
        ({"torch_dtype": ["bfloat16"]}, 1, "its dtype .* is not one that is paged"),
        ({"torch_dtype": "int8"}, 1, "its dtype int8 is not one that is paged"),
        ({}, 3, "can't be split over 3 GPUs"),
        ({"architectures": ["LlamaForCausalLM"]}, 1, "not one that elasticmoe pages"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, object], num_gpus: int, message: str) -> None:
    """The error says which key or number is at fault."""
    with pytest.raises(UnsupportedError, match=message):
        parse_served(TINY | change, "tiny", num_gpus)


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    """A checkpoint's folder and its config.json give the same model, but for the name."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert read_served(path).dense_bytes == read_served(tmp_path).dense_bytes
    assert read_served(tmp_path).name == tmp_path.name


def test_no_model_there_is_refused(tmp_path: Path) -> None:
    """A missing file, or one with something else."""
    with pytest.raises(ConfigError, match="or a folder with one"):
        read_served(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="or a folder with one"):
        read_served(tmp_path)
    (tmp_path / "config.json").write_text("3")
    with pytest.raises(ConfigError, match="want a JSON object, it is a int"):
        read_served(tmp_path)
