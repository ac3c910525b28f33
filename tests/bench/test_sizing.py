"""The arena's size follows from the model's config and the burst, in whole pages."""

import json
from pathlib import Path

import pytest

from bench.serving.errors import BadScenario
from bench.serving.scenario import FLAGS, Load, make_scenario
from bench.serving.sizing import Flags, MoEShape, count_peak_blocks, find_least_limit, net_bytes, read_shape, size_arena
from bench.serving.trace import Lengths
from elasticmoe.runtime.errors import UnsupportedError

KIB = 1024
SHAPE = MoEShape(
    num_layers=4, num_experts=32, top_k=4, hidden=128, intermediate=128, num_kv_heads=2, head_dim=32, vocab_size=1024
)
FOUR = Flags(block_size=16, max_model_len=64, max_num_seqs=4)
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts_per_tok": 4,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}


def write_config(folder: Path, **more: int) -> Path:
    """A model folder with a config only."""
    (folder / "config.json").write_text(json.dumps(CONFIG | more))
    return folder


def test_pages_and_blocks_have_their_bytes() -> None:
    """E is one matrix; S is one block over all layers, keys and values."""
    assert SHAPE.expert_page_bytes == 64 * KIB
    assert SHAPE.block_bytes(16) == 32 * KIB
    assert SHAPE.expert_bytes == 4 * 32 * 3 * 64 * KIB


def test_a_config_is_read_in_either_spelling(tmp_path: Path) -> None:
    """Transformers 5 writes num_local_experts; a head's size may be left to the default."""
    assert read_shape(write_config(tmp_path, num_experts=32, head_dim=32)) == SHAPE
    assert read_shape(write_config(tmp_path, num_local_experts=32)) == SHAPE


def test_the_peak_is_the_longest_requests_that_may_run_at_once() -> None:
    """Blocks are whole, and only max_num_seqs requests run."""
    lengths = [Lengths(16, 16), Lengths(16, 17), Lengths(1, 1), Lengths(1, 1), Lengths(8, 9), Lengths(1, 1)]
    assert count_peak_blocks(lengths, FOUR) == 3 + 2 + 2 + 1


def test_offloading_gains_nothing_for_the_layers_that_pay_for_the_slots() -> None:
    """With two buffers of four layers, half of what is evicted goes into loading slots."""
    assert net_bytes(SHAPE, 10, 2) == 2 * 10 * 3 * 64 * KIB
    assert net_bytes(SHAPE, 10, 4) == net_bytes(SHAPE, 10, 5) == 0


def test_the_least_limit_covers_the_shortage() -> None:
    """One expert a layer less would not do; a top-k is never given up."""
    assert find_least_limit(SHAPE, FOUR, 0) == 0
    assert find_least_limit(SHAPE, FOUR, 384 * KIB) == 1
    assert find_least_limit(SHAPE, FOUR, 384 * KIB + 1) == 2
    assert find_least_limit(SHAPE, FOUR, 28 * 384 * KIB) == 28
    assert find_least_limit(SHAPE, FOUR, 28 * 384 * KIB + 1) is None


def test_the_arena_holds_all_experts_and_the_held_requests_in_whole_pages() -> None:
    """Stock gets what the experts leave."""
    sizing = size_arena(SHAPE, FOUR, [Lengths(40, 20)] * 8, num_held=2)  # 4 blocks a request
    assert sizing is not None
    assert sizing.arena_bytes == SHAPE.expert_bytes + sizing.stock_kv_bytes
    assert (sizing.stock_blocks, sizing.peak_blocks) == (8, 16)
    assert sizing.arena_bytes % SHAPE.expert_page_bytes == 0


def test_stock_can_hold_the_longest_request_it_admits() -> None:
    """VLLM refuses to start with less than max_model_len tokens and its null block."""
    sizing = size_arena(SHAPE, FOUR, [Lengths(4, 4)] * 8, num_held=1)
    assert sizing is not None
    assert sizing.stock_blocks >= 64 // 16 + 1


def test_a_burst_that_offloading_cannot_hold_has_no_arena() -> None:
    """The caller takes shorter requests then."""
    flags = Flags(block_size=16, max_model_len=512, max_num_seqs=64)
    assert size_arena(SHAPE, flags, [Lengths(400, 100)] * 64, num_held=4) is None


@pytest.mark.parametrize("num_requests", [48, 288])
def test_a_scenario_is_too_much_for_stock_and_fits_ours(tmp_path: Path, num_requests: int) -> None:
    """Stock holds at most a quarter of what may run at once; the limit stays in its bounds."""
    load = Load(num_requests=num_requests)
    scenario = make_scenario(write_config(tmp_path, num_experts=32), load)
    sizing = scenario.sizing
    assert len(scenario.lengths) == num_requests
    assert sizing.stock_blocks * 4 < sizing.peak_blocks
    assert 0 < sizing.limit <= load.max_offloaded * SHAPE.num_experts
    gained = net_bytes(SHAPE, sizing.limit, FLAGS.loading_depth)
    assert sizing.stock_kv_bytes + gained > sizing.peak_blocks * SHAPE.block_bytes(FLAGS.block_size)


def test_a_model_without_layers_to_spare_is_refused(tmp_path: Path) -> None:
    """With as many loading buffers as layers, offloading makes no room."""
    with pytest.raises(BadScenario, match="makes no room"):
        make_scenario(write_config(tmp_path, num_hidden_layers=2, num_experts=32), Load())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**6}, "has 1000000 for num_hidden_layers"),
        ({"num_experts": 3}, "has 4 experts a token of 3"),
        ({"num_key_value_heads": 0}, "lacks num_key_value_heads"),
        ({"num_attention_heads": 129}, "has 129 heads for a hidden size of 128 and no head_dim"),
    ],
)
def test_a_config_of_no_model_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    """As the command refuses it."""
    with pytest.raises(UnsupportedError, match=message):
        read_shape(write_config(tmp_path, **{"num_experts": 32} | change))
