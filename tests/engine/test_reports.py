"""The workers' counts reach the scheduler's metrics, also those of steps without tokens."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticmoe.runtime.adjuster.adjuster import Adjuster, Demand
from elasticmoe.runtime.adjuster.sample import StepSample
from tests.engine.engines import BLOCK_SIZE, Engine, Requests, draw_requests, running
from tests.engine.sizes import arena_bytes, read_shape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

pytestmark = pytest.mark.vllm

REPORT_STEPS = 16


def recorded_samples(engine: Engine) -> list[StepSample]:
    """Return a list that grows by every sample which the adjuster learns from."""
    samples: list[StepSample] = []
    model = engine.adjuster.model
    stock = model.learn

    def learn(sample: StepSample, *rest: float) -> None:
        samples.append(sample)
        stock(sample, *rest)

    model.learn = learn
    return samples


def check_samples(samples: list[StepSample], requests: Requests, totals: dict[str, float]) -> None:
    """Check that samples add up to what was served: tokens, fetches, and seconds that a step can have taken."""
    assert samples[0].num_steps == 1
    assert samples[0].copied_bytes > 0
    assert max(sample.num_steps for sample in samples) == REPORT_STEPS
    assert sum(sample.num_new_tokens for sample in samples) >= sum(requests.max_tokens) - REPORT_STEPS * 24
    assert sum(sample.num_missed for sample in samples) == totals["missed"]
    assert sum(sample.num_started for sample in samples) >= len(requests.max_tokens)
    assert sorted(num for sample in samples for num in sample.answers) == sorted(requests.max_tokens)
    for sample in samples:
        assert sample.num_started <= sample.num_requests
        assert 0 <= sample.exposed_s <= sample.duration_s
        assert sample.num_prompt_tokens <= sample.num_tokens
        assert sample.num_requests <= sample.num_tokens


def test_loads_of_an_idle_engine_are_reported(tiny: Path) -> None:
    """Once experts have come back on an idle engine, every load is counted, and vLLM's shared empty output is clean."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    with running(tiny, {"arena_bytes": arena_bytes(tiny, BLOCK_SIZE, 40)}) as engine:
        samples = recorded_samples(engine)
        engine.scheduler._on_limit(read_shape(tiny).num_experts)
        requests = draw_requests(24)
        engine.generate(requests)
        while_busy = engine.adjuster.counts.loaded
        engine.idle()
        totals = engine.scheduler.metrics.totals()
        assert engine.adjuster.counts.loaded > while_busy
        assert totals["planned"] == engine.adjuster.counts.loaded + engine.adjuster.counts.swapped
        assert totals["missed"] > 0
        check_samples(samples, requests, totals)
        assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "elastic")


def test_goodput_learns_from_the_engine_and_evicts_where_that_pays(tiny: Path) -> None:
    """Copies within host memory are cheap: after its first steps a burst that doesn't fit is judged by measurements."""
    with running(tiny, {"policy": "goodput", "arena_bytes": arena_bytes(tiny, BLOCK_SIZE, 40)}) as engine:
        engine.scheduler._on_limit(read_shape(tiny).num_experts)
        causes: list[str] = []
        engine.on_step = lambda _: causes.extend(plan.cause for plan in engine.adjuster.decisions)
        requests = draw_requests(24)
        tokens = engine.generate(requests)
        fit = engine.adjuster.model.fit
        assert fit.is_ready
        assert fit.terms[0] + fit.terms[1] + fit.terms[2] > 0
        assert [len(answer) for answer in tokens] == requests.max_tokens
        assert {"short", "refused"} & set(causes)
        engine.idle()
        assert engine.adjuster.counts.loaded == engine.adjuster.counts.evicted


def test_the_adjuster_hears_of_every_token_of_a_step(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts apart; and where a request is short of blocks, of its own tokens and those scheduled before it."""
    from elasticmoe.runtime.engine.step_clock import Batch

    with running(tiny, {"arena_bytes": arena_bytes(tiny, BLOCK_SIZE, 40)}) as engine:
        engine.scheduler._on_limit(read_shape(tiny).num_experts)
        heard, asked, scheduler_asks = [], [], set()
        rescue, schedule = Adjuster.rescue, engine.scheduler.schedule

        def listen(adjuster: Adjuster, short_blocks: int, demand: Demand, lost_tokens: int = 0) -> bool:
            asked.append((demand, lost_tokens))
            return rescue(adjuster, short_blocks, demand, lost_tokens)

        def compare(*args: Any, **kwargs: Any) -> "SchedulerOutput":
            output: SchedulerOutput = schedule(*args, **kwargs)
            demand, batch = engine.adjuster._demand, Batch.of(output)
            scheduler_asks.update({demand.asked_tokens} - {0})
            if not batch.num_preempted:
                heard.append((demand.num_tokens, demand.prompt_tokens, batch.num_tokens, batch.num_prompt_tokens))
            return output

        monkeypatch.setattr(Adjuster, "rescue", listen)
        engine.scheduler.schedule = compare
        engine.generate(draw_requests(24))
    assert all(told[:2] == told[2:] for told in heard)
    assert any(prompts for _, prompts, _, _ in heard)
    waiting = [demand for demand, lost_tokens in asked if not lost_tokens]
    assert waiting
    assert all(demand.prompt_tokens > 1 for demand in waiting)
    assert all(demand.num_tokens >= demand.prompt_tokens for demand, _ in asked)
    assert all(1 < demand.asked_tokens <= demand.prompt_tokens for demand in waiting)
    assert all(demand.asked_tokens == 1 for demand, lost_tokens in asked if lost_tokens)
    assert not scheduler_asks, "nobody asks for blocks once the step is scheduled"


def test_the_adjuster_hears_how_long_a_first_token_has_been_waited_for(tiny: Path) -> None:
    """By the first that waits for one; who was preempted after its first token, and stands before it, counts not."""
    with running(tiny, {"arena_bytes": arena_bytes(tiny, BLOCK_SIZE, 40)}) as engine:
        scheduler = engine.scheduler
        scheduler._on_limit(0)
        came_s: dict[str, float] = {}
        told: list[tuple[bool, float, float]] = []
        add_request = scheduler.add_request

        def add(request: Any) -> None:
            came_s[request.request_id] = time.monotonic()
            add_request(request)

        def look(_: int) -> None:
            waiting = list(scheduler.waiting)
            if waiting:
                first = next((one.request_id for one in waiting if not one.num_output_tokens), None)
                waited_s = 0.0 if first is None else time.monotonic() - came_s[first]
                told.append((waiting[0].num_output_tokens > 0, waited_s, scheduler._demand().waited_s))

        scheduler.add_request, engine.on_step = add, look
        engine.generate(draw_requests(24))
        assert any(is_preempted and heard_s for is_preempted, _, heard_s in told)
        started_together = Requests([[3 + n] * BLOCK_SIZE for n in range(4)], [200] * 4)
        engine.generate(started_together)
    assert all(heard_s == pytest.approx(waited_s, abs=0.05) for _, waited_s, heard_s in told)
    assert any(is_preempted and not heard_s for is_preempted, _, heard_s in told)
    assert max(heard_s for _, _, heard_s in told) > 0.1
