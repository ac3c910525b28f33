"""The workers' counts reach the scheduler's metrics, also those of steps without tokens."""

from pathlib import Path

import pytest

from tests.engine.engines import BLOCK_SIZE, draw_requests, running
from tests.engine.sizes import arena_bytes, read_shape

pytestmark = pytest.mark.vllm


def test_loads_of_an_idle_engine_are_reported(tiny: Path) -> None:
    """Once experts have come back on an idle engine, every load is counted, and vLLM's shared empty output is clean."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    with running(tiny, {"arena_bytes": arena_bytes(tiny, BLOCK_SIZE, 40)}) as engine:
        engine.scheduler._on_limit(read_shape(tiny).num_experts)
        engine.generate(draw_requests(24))
        while_busy = engine.adjuster.counts.loaded
        engine.idle()
        totals = engine.scheduler.metrics.totals()
        assert engine.adjuster.counts.loaded > while_busy
        assert totals["planned"] == engine.adjuster.counts.loaded
        assert totals["missed"] > 0
        assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "elastic")
