"""The simulator and the real engine do the same with the same burst: steps, evictions and preemptions within 15 %.

Prefix caching is off, and no prompt shares a prefix, since the simulator knows neither. It is told sizes only; how long
steps take on this CPU doesn't matter, as all requests come at once.
"""

from pathlib import Path
from typing import Any

import pytest

from elasticmoe.runtime.contract.config import PolicyName, RuntimeConfig
from elasticmoe.runtime.simulator.hardware import H200
from elasticmoe.runtime.simulator.requests import Arrival
from elasticmoe.runtime.simulator.scheduler import Limits
from elasticmoe.runtime.simulator.served import ServedModel, parse_served
from elasticmoe.runtime.simulator.simulation import Simulation
from elasticmoe.runtime.simulator.system import System
from tests.engine.engines import BLOCK_SIZE, MAX_MODEL_LEN, Engine, Requests, draw_requests, running
from tests.engine.sizes import arena_bytes, read_config, read_tiers

pytestmark = pytest.mark.vllm

KV_BLOCKS = 60
NUM_REQUESTS = 96
TOLERANCE = 0.15
FLAGS: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}


@pytest.fixture(scope="module")
def burst() -> Requests:
    """Return requests that all come at once."""
    return draw_requests(NUM_REQUESTS, seed=3)


def simulate(model: Path, burst: Requests, policy: PolicyName | None, limit: int | None) -> dict[str, int]:
    """Return the counts of a simulated run with the test engine's flags."""
    served: ServedModel = parse_served(read_config(model), model.name)
    system = System(
        model=served,
        gpu=H200,
        kv_bytes=KV_BLOCKS * read_tiers(model, BLOCK_SIZE).block_bytes,
        config=None if policy is None else RuntimeConfig(policy=policy),
        limit=limit,
        max_model_len=MAX_MODEL_LEN,
        limits=Limits(FLAGS["max_num_seqs"], FLAGS["max_num_batched_tokens"], BLOCK_SIZE),
    )
    lengths = zip(burst.prompts, burst.max_tokens, strict=True)
    outcome = Simulation(system, [Arrival(0.0, len(prompt), num) for prompt, num in lengths]).run()
    evicted, loaded, _ = outcome.moved
    return {
        "steps": outcome.num_steps,
        "preemptions": outcome.num_preemptions,
        "peak": outcome.peak,
        "evicted": evicted,
        "loaded": loaded,
    }


def serve(engine: Engine, burst: Requests) -> dict[str, int]:
    """Return the same counts of the real engine."""
    steps = 0

    def count(_: int) -> None:
        nonlocal steps
        steps += bool(engine.scheduler.waiting or engine.scheduler.running)

    engine.on_step = count
    engine.generate(burst)
    counts = {"steps": steps, "preemptions": engine.preemptions, "peak": engine.peak}
    if hasattr(engine.scheduler, "adjuster"):
        engine.idle()
        moved = engine.adjuster.counts
        return counts | {"evicted": moved.evicted, "loaded": moved.loaded}
    return counts | {"evicted": 0, "loaded": 0}


def test_stock(tiny: Path, burst: Requests) -> None:
    """Without the pool: as many steps and preemptions, for lack of KV."""
    room = KV_BLOCKS * read_tiers(tiny, BLOCK_SIZE).block_bytes
    with running(tiny, kv_cache_memory_bytes=room, **FLAGS) as engine:
        real = serve(engine, burst)
    assert real["preemptions"] > 10
    assert simulate(tiny, burst, None, None) == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("limit", [6, 28])
def test_threshold(model: Path, burst: Requests, limit: int) -> None:
    """With the pool: as many evictions and loads, whether the limit stops them or not."""
    config = {"arena_bytes": arena_bytes(model, BLOCK_SIZE, KV_BLOCKS), "policy": "threshold"}
    with running(model, config, **FLAGS) as engine:
        engine.scheduler._on_limit(min(limit, engine.adjuster.geometry.num_experts))
        real = serve(engine, burst)
    assert real["evicted"] > 10
    simulated = simulate(model, burst, "threshold", min(limit, 24 if "qwen2" in model.name else 32))
    assert simulated == pytest.approx(real, rel=TOLERANCE)
