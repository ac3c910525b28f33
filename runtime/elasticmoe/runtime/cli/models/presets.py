"""The shapes that `elasticmoe make-model` can write, and the sizes in bytes that follow from them.

Sizes are chosen for their arithmetic: `tiny` has E = 2 S as Qwen3-30B-A3B, `tiny-qwen2` has E = 11/6 S as
Qwen1.5-MoE-A2.7B, where neither size divides the other. `medium` is for times that depend on the checkpoint's size: it
has 6 GiB of experts. An expert's width is a multiple of 32, as the grouped kernel of vLLM 0.26.0's CPU backend needs.
No torch here, so that the command line stays quick.
"""

from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 16  # vLLM's block_size that the sizes were chosen for
ITEM_BYTES: Final = 4  # float32
VOCAB_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of one test model; d, f and K are the hidden size, an expert's width and top-k."""

    name: str
    model_type: str
    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_topk_prob: bool
    moe_gain: float  # makes the routed experts' output about as large as the attention's
    shared_intermediate_size: int | None = None
    max_position: int = 4096

    @property
    def expert_page_bytes(self) -> int:
        """E: the bytes of one matrix of one expert."""
        return self.moe_intermediate_size * self.hidden_size * ITEM_BYTES

    @property
    def block_bytes(self) -> int:
        """S: the bytes of one vLLM block over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES * BLOCK_TOKENS

    @property
    def expert_bytes(self) -> int:
        """The bytes of all routed experts of all layers."""
        return self.num_layers * self.num_experts * 3 * self.expert_page_bytes


_TINY: Final = Preset(
    name="tiny",
    model_type="qwen3_moe",
    num_layers=4,
    num_experts=32,
    num_experts_per_tok=4,
    hidden_size=128,
    moe_intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_topk_prob=True,
    moe_gain=2.0,
)
_TINY_QWEN2: Final = Preset(
    name="tiny-qwen2",
    model_type="qwen2_moe",
    num_layers=6,
    num_experts=24,
    num_experts_per_tok=4,
    hidden_size=64,
    moe_intermediate_size=352,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    norm_topk_prob=False,
    moe_gain=4.0,
    shared_intermediate_size=1408,
)
_MEDIUM: Final = Preset(
    name="medium",
    model_type="qwen3_moe",
    num_layers=8,
    num_experts=64,
    num_experts_per_tok=4,
    hidden_size=1024,
    moe_intermediate_size=1024,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    norm_topk_prob=True,
    moe_gain=2.0,
)
PRESETS: Final = {preset.name: preset for preset in (_TINY, _TINY_QWEN2, _MEDIUM)}
