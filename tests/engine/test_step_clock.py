"""What the engine core measures of its steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm


def make_report(**counts: Any) -> Any:
    """Return a worker's report."""
    from elasticmoe.runtime.device.report import StepReport

    whole = dict.fromkeys(("routed_resident", "missed", "predicted", "foreseen", "planned", "copied_bytes"), 0)
    fields: dict[str, Any] = whole | {"exposed_s": 0.0, "copy_s": 0.0}
    return StepReport(routed=np.zeros((1, 1)), **(fields | counts))


def make_batch(tokens: int, requests: int = 1, prompt: int = 0, preempted: int = 0, started: int = 0) -> Any:
    """Return a step's tokens."""
    from elasticmoe.runtime.engine.step_clock import Batch

    return Batch(tokens, requests, prompt, preempted, started)


def test_a_step_lasts_from_the_end_of_the_one_before_it_or_from_its_own_begin() -> None:
    """Two steps under way at once don't count a second twice, and idle time counts for none."""
    from elasticmoe.runtime.engine.step_clock import StepClock

    clock = StepClock()
    clock.begin(1.0)
    clock.begin(2.0)
    clock.end(make_batch(5), 5, 3.0)
    clock.end(make_batch(5), 5, 4.5)
    clock.begin(10.0)
    clock.end(make_batch(5), 5, 11.0)
    assert clock.take(make_report()).duration_s == pytest.approx(2.0 + 1.5 + 1.0)


def test_a_sample_adds_up_what_ran_since_the_last_one() -> None:
    """Tokens, requests, prompts and preemptions are summed with what the worker reports; then all starts anew."""
    from elasticmoe.runtime.engine.step_clock import StepClock

    clock = StepClock()
    clock.begin(0.0)
    clock.end(make_batch(40, requests=4, prompt=37, preempted=1, started=2), 3, 1.0)
    clock.end_answer(9)
    clock.begin(1.0)
    clock.end(make_batch(4, requests=4, started=1), 4, 2.0)
    clock.end_answer(1)
    sample = clock.take(make_report(missed=4, predicted=5, foreseen=3, exposed_s=0.5, copied_bytes=70, copy_s=0.6))
    assert (sample.num_steps, sample.num_tokens, sample.num_requests, sample.num_new_tokens) == (2, 44, 8, 7)
    assert (sample.num_prompt_steps, sample.num_prompt_tokens, sample.num_preempted) == (1, 37, 1)
    assert (sample.num_missed, sample.exposed_s, sample.copied_bytes, sample.copy_s) == (7, 0.5, 70, 0.6)
    assert (sample.num_started, sample.answers) == (3, (9, 1))
    again = clock.take(make_report())
    assert (again.num_steps, again.answers) == (0, ())


def test_steps_without_tokens_are_no_steps() -> None:
    """An idle engine that brings experts back says nothing of what a step costs."""
    from elasticmoe.runtime.engine.step_clock import StepClock

    clock = StepClock()
    clock.begin(0.0)
    clock.end(make_batch(0, requests=0), 0, 5.0)
    sample = clock.take(make_report(exposed_s=1.0))
    assert (sample.num_steps, sample.duration_s, sample.exposed_s) == (0, 0.0, 0.0)


def test_requests_with_several_tokens_compute_prompts_unless_they_are_drafts() -> None:
    """One decodes, one computes 30 tokens of its prompt, one checks two drafts."""
    from elasticmoe.runtime.engine.step_clock import Batch

    output = SimpleNamespace(
        num_scheduled_tokens={"decodes": 1, "prompt": 30, "drafts": 3},
        scheduled_spec_decode_tokens={"drafts": [4, 5]},
        total_num_scheduled_tokens=34,
        preempted_req_ids={"gone"},
        scheduled_new_reqs=["prompt"],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"again", "once more"}),
    )
    expected = Batch(num_tokens=34, num_requests=3, num_prompt_tokens=30, num_preempted=1, num_started=3)
    assert Batch.of(output) == expected
