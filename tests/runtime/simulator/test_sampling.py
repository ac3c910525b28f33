"""What the simulated engine measures is what a real one could: sums of its own clocks and counters."""

from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.sampling import REPORT_STEPS, Meter
from elasticmoe.runtime.simulator.step_cost import StepCost


def make_meter() -> Meter:
    """Return a meter of two groups, experts of 100 bytes that take 2 s to copy."""
    return Meter(2, 100, 2.0)


def running(group: int, num_tokens: int, computed: int) -> Request:
    """Return a request that has some of its tokens computed."""
    return Request(Arrival(0.0, num_tokens, 9), group, num_tokens, computed)


def test_a_step_is_counted_by_its_parts() -> None:
    """A prompt's first chunk of 10, a prompt's last 5 and a decode: 16 tokens, 15 of prompts, 2 that come out."""
    meter = make_meter()
    scheduled = [(running(0, 30, 0), 10), (running(1, 20, 15), 5), (running(1, 8, 7), 1)]
    assert meter.add_batch(scheduled, 3).tolist() == [10, 6]
    meter.add_cost(StepCost(1.0, 4.0, 5.5), num_missed=2)
    meter.add_copies(1)
    meter.add_answers([running(0, 8, 7), running(1, 30, 0)])
    sample = meter.drain()
    assert (sample.num_started, sample.answers) == (1, (9, 9))
    assert (sample.num_steps, sample.num_requests, sample.num_tokens) == (1, 3, 16)
    assert (sample.num_prompt_steps, sample.num_prompt_tokens, sample.num_new_tokens) == (1, 15, 2)
    assert (sample.duration_s, sample.exposed_s, sample.num_missed) == (5.5, 4.5, 2)
    assert (sample.copied_bytes, sample.copy_s, sample.num_preempted) == (300, 6.0, 3)


def steps_to_report(meter: Meter) -> int:
    """Return the steps with tokens until a report is due, and take that report."""
    for num in range(1, 2 * REPORT_STEPS):
        meter.add_batch([(running(0, 8, 7), 1)], 0)
        if meter.is_due(has_tokens=True):
            meter.drain()
            return num
    return 0


def test_a_report_is_due_at_the_engines_pace() -> None:
    """With the first step, then ever less often, at last every 16; without tokens as soon as something was copied."""
    meter = make_meter()
    assert not meter.is_due(has_tokens=True)
    assert not meter.is_due(has_tokens=False)
    paces = [steps_to_report(meter) for _ in range(7)]
    assert paces[0] == 1
    assert paces == sorted(paces)
    assert paces[-2:] == [REPORT_STEPS, REPORT_STEPS]
    assert not meter.is_due(has_tokens=False)
    meter.add_copies(1)
    assert meter.is_due(has_tokens=False)


def test_nothing_is_reported_twice() -> None:
    """After a report all sums start at zero."""
    meter = make_meter()
    meter.add_batch([(running(0, 8, 0), 8)], 1)
    meter.add_answers([running(0, 8, 7)])
    meter.drain()
    sample = meter.drain()
    assert (sample.num_steps, sample.num_tokens, sample.num_preempted, sample.copied_bytes) == (0, 0, 0, 0)
    assert (sample.num_started, sample.answers) == (0, ())
