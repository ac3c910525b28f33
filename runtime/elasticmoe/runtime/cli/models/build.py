"""Builds a test model as transformers objects: config, weights and generation config. Called by `make_model`."""

from typing import TYPE_CHECKING, Any

from elasticmoe.runtime.cli.models.presets import Preset
from elasticmoe.runtime.cli.models.weights import fill_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def build_model(preset: Preset, tokenizer: "PreTrainedTokenizerFast", seed: int) -> "PreTrainedModel":
    """Return the preset's model in float32 with weights of that seed, ready for `save_pretrained`."""
    from transformers import GenerationConfig, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM

    model_class = {"qwen3_moe": Qwen3MoeForCausalLM, "qwen2_moe": Qwen2MoeForCausalLM}[preset.model_type]
    model = model_class(model_class.config_class(**_config_fields(preset, tokenizer))).eval()
    fill_weights(model, preset, tokenizer, seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def _config_fields(preset: Preset, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return the fields of the transformers config; every layer is an MoE layer."""
    fields = {
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": preset.hidden_size,
        "intermediate_size": preset.moe_intermediate_size * preset.num_experts_per_tok,
        "moe_intermediate_size": preset.moe_intermediate_size,
        "num_hidden_layers": preset.num_layers,
        "num_attention_heads": preset.num_heads,
        "num_key_value_heads": preset.num_kv_heads,
        "head_dim": preset.head_dim,
        "num_experts": preset.num_experts,
        "num_experts_per_tok": preset.num_experts_per_tok,
        "norm_topk_prob": preset.norm_topk_prob,
        "max_position_embeddings": preset.max_position,
        "tie_word_embeddings": False,
    }
    if preset.shared_intermediate_size is None:
        return fields
    return fields | {"shared_expert_intermediate_size": preset.shared_intermediate_size}
