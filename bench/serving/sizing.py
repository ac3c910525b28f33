"""How large an arena makes a burst short of KV on stock vLLM and not on ours, computed from the model's config.

Pure but for reading config.json. Called by the demo and the benches before they start a flags.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.serving.model_config import read_model_config
from bench.serving.trace import Lengths

MATRICES = 3  # gate, up, down
ITEMSIZE = 4  # float32
NUM_SPARE = 2  # experts a layer that may be offloaded beyond what the burst needs


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The sizes of a Mixture-of-Experts model that decide about memory."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def expert_page_bytes(self) -> int:
        """E: one matrix of one expert."""
        return self.hidden * self.intermediate * ITEMSIZE

    @property
    def expert_bytes(self) -> int:
        """All experts of all layers."""
        return self.num_layers * self.num_experts * MATRICES * self.expert_page_bytes

    def block_bytes(self, block_size: int) -> int:
        """S: one block id over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size * ITEMSIZE


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of a server that decide about memory."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    loading_depth: int = 2


@dataclass(frozen=True, slots=True)
class Sizing:
    """The bytes both systems get, and how many experts a layer the elastic one may have to offload for the burst."""

    arena_bytes: int
    stock_kv_bytes: int
    stock_blocks: int
    peak_blocks: int
    limit: int


def read_shape(model: Path) -> MoEShape:
    """The shape in a checkpoint's config.json."""
    config, _ = read_model_config(model / "config.json")
    return MoEShape(
        num_layers=config["num_hidden_layers"],
        num_experts=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        hidden=config["hidden_size"],
        intermediate=config["moe_intermediate_size"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
    )


def count_peak_blocks(lengths: Sequence[Lengths], flags: Flags) -> int:
    """The most blocks that requests running at once can hold: the longest ones, each at its end."""
    blocks = sorted((math.ceil(one.total_tokens / flags.block_size) for one in lengths), reverse=True)
    return sum(blocks[: flags.max_num_seqs])


def net_bytes(shape: MoEShape, limit: int, loading_depth: int) -> int:
    """Bytes that KV gains with `limit` experts of every layer offloaded, net of their loading slots."""
    lent_layers = max(shape.num_layers - loading_depth, 0)
    return lent_layers * limit * MATRICES * shape.expert_page_bytes


def find_least_limit(shape: MoEShape, flags: Flags, short_bytes: int) -> int | None:
    """The fewest offloaded experts a layer whose net bytes cover a shortage; None if a top-k of each must go too."""
    limits = range(shape.num_experts - shape.top_k + 1)
    return next((limit for limit in limits if net_bytes(shape, limit, flags.loading_depth) >= short_bytes), None)


def size_arena(shape: MoEShape, flags: Flags, lengths: Sequence[Lengths], num_held: int) -> Sizing | None:
    """The arena of all experts and `num_held` mean requests; None if offloading makes too little room."""
    block = shape.block_bytes(flags.block_size)
    mean_blocks = statistics.mean(math.ceil(one.total_tokens / flags.block_size) for one in lengths)
    least_blocks = math.ceil(flags.max_model_len / flags.block_size) + 1  # and the null block
    unit = math.lcm(block, shape.expert_page_bytes)
    kv_bytes = math.ceil(max(num_held * mean_blocks, least_blocks) * block / unit) * unit
    peak_blocks = count_peak_blocks(lengths, flags)
    limit = find_least_limit(shape, flags, (peak_blocks + 1) * block - kv_bytes)
    if limit is None:
        return None
    spare_limit = min(limit + NUM_SPARE, shape.num_experts)
    return Sizing(shape.expert_bytes + kv_bytes, kv_bytes, kv_bytes // block, peak_blocks, spare_limit)
