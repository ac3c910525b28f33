"""Greedy tokens equal stock vLLM's whatever is resident, in real engines on the CPU in float32."""

from pathlib import Path

import pytest

from tests.engine.engines import BLOCK_SIZE, Requests, Tokens, running
from tests.engine.sizes import arena_bytes, read_shape, read_tiers

pytestmark = pytest.mark.vllm

TIGHT_BLOCKS = 40
"""KV room beside all experts: about six of the requests, of the 64 that want to run."""


def test_everything_resident(model: Path, requests: Requests, stock_tokens: Tokens) -> None:
    """With room for all, nothing is evicted and the tokens are stock's."""
    with running(model, {"arena_bytes": arena_bytes(model, BLOCK_SIZE, 2000)}) as engine:
        assert engine.generate(requests) == stock_tokens
        assert engine.adjuster.counts.evicted == 0
        shape = read_shape(model)
        assert engine.adjuster.table.num_resident == shape.num_layers * shape.num_experts


def test_a_burst_with_evictions_and_reloads(model: Path, requests: Requests, stock_tokens: Tokens) -> None:
    """A burst evicts instead of preempting, the experts come back, a second one hits cached prefixes: same tokens."""
    with running(model, {"arena_bytes": arena_bytes(model, BLOCK_SIZE, TIGHT_BLOCKS)}) as engine:
        engine.adjuster.requested_limit = read_shape(model).num_experts
        home = engine.adjuster.table.num_resident
        assert engine.generate(requests) == stock_tokens
        assert engine.preemptions == 0
        assert engine.adjuster.counts.evicted > 0
        engine.idle()
        engine.adjuster.table.check_integrity()
        assert engine.adjuster.table.num_resident >= home
        assert engine.adjuster.counts.loaded > 0
        evicted = engine.adjuster.counts.evicted
        engine.prefix_hits = 0
        assert engine.generate(requests) == stock_tokens
        assert engine.prefix_hits > 0
        assert engine.adjuster.counts.evicted > evicted
        engine.adjuster.table.check_integrity()


def test_the_elastic_pool_runs_more_at_once(model: Path, requests: Requests, stock_tokens: Tokens) -> None:
    """With the same bytes stock preempts; the elastic pool doesn't, and at least twice as many requests run at once."""
    room = TIGHT_BLOCKS * read_tiers(model, BLOCK_SIZE).raw_block_bytes
    with running(model, kv_cache_memory_bytes=room) as stock:
        assert stock.generate(requests) == stock_tokens
    with running(model, {"arena_bytes": arena_bytes(model, BLOCK_SIZE, TIGHT_BLOCKS)}) as elastic:
        elastic.adjuster.requested_limit = read_shape(model).num_experts
        assert elastic.generate(requests) == stock_tokens
    assert stock.preemptions > 0
    assert elastic.preemptions == 0
    assert elastic.peak >= 2 * stock.peak


def test_any_number_of_resident_experts(model: Path, requests: Requests, stock_tokens: Tokens) -> None:
    """With 0, 1, top_k - 1 and all experts of every layer resident, changed while the engine lives: same tokens."""
    shape = read_shape(model)
    sizes = {"arena_bytes": arena_bytes(model, BLOCK_SIZE, 800), "policy": "fixed"}
    with running(model, sizes) as engine:
        for resident in (shape.num_experts, 0, 1, shape.top_k - 1):
            engine.scheduler._on_limit(shape.num_experts - resident)
            engine.idle()
            assert engine.adjuster.table.num_resident == resident * shape.num_layers
            assert engine.generate(requests) == stock_tokens
            engine.adjuster.table.check_integrity()


def test_through_preemption(model: Path, requests: Requests, stock_tokens: Tokens) -> None:
    """Where the limit forbids to evict, requests are preempted as in stock, and the tokens stay the same."""
    with running(model, {"arena_bytes": arena_bytes(model, BLOCK_SIZE, TIGHT_BLOCKS)}) as engine:
        engine.scheduler._on_limit(0)
        assert engine.generate(requests) == stock_tokens
        assert engine.preemptions > 0
        engine.adjuster.table.check_integrity()


def test_the_limit_going_up_and_down(model: Path, requests: Requests, stock_tokens: Tokens) -> None:
    """The limit changes every few steps while requests run: same tokens, and the last limit is in force."""
    shape = read_shape(model)
    limits = [shape.num_experts, 2, 5, 0, shape.num_experts // 2, 1]
    with running(model, {"arena_bytes": arena_bytes(model, BLOCK_SIZE, TIGHT_BLOCKS)}) as engine:
        engine.on_step = lambda step: (
            engine.scheduler._on_limit(limits[step // 7 % len(limits)]) if step % 7 == 0 else None
        )
        assert engine.generate(requests) == stock_tokens
        engine.on_step = lambda _: None
        assert engine.adjuster.counts.evicted > 0
        engine.scheduler._on_limit(3)
        engine.idle()
        assert engine.adjuster.requested_limit == 3
        engine.adjuster.table.check_integrity()
