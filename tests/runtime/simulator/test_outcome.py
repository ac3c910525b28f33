"""Figures of a run, computed by hand."""

import math
from dataclasses import replace

import pytest

from elasticmoe.runtime.simulator.outcome import Load, Outcome, Trail, find_quantile
from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.step_cost import StepCost

COST = StepCost(1.0, 0.5, 1.25)


def finished(at_s: float, answers: int, first_s: float, last_s: float) -> Request:
    """Return a request that is done."""
    return Request(Arrival(at_s, 5, answers), 0, 5 + answers, first_token_s=first_s, finished_s=last_s)


def make(away: list[int], free_pages: list[int], *requests: Request) -> Outcome:
    """Return an outcome with a step a second, so many experts away and pages free after each."""
    trail = Trail()
    for n, num in enumerate(away):
        trail.add(float(n), Load(n % 3, 0, num, free_pages[n]), COST)
    return Outcome(requests, 0, trail, (0, 0, 0))


def test_rates_and_latencies() -> None:
    """Two requests, 11 and 21 tokens in 10 s: 3.2 tokens/s; TTFT and TPOT by request."""
    outcome = make([0, 0, 0], [0, 0, 0], finished(0.0, 11, 1.0, 6.0), finished(2.0, 21, 5.0, 10.0))
    assert outcome.tok_s == pytest.approx(3.2)
    assert (outcome.ttft_s(0.5), outcome.ttft_s(0.99)) == (1.0, 3.0)
    assert (outcome.tpot_s(0.99), outcome.tpot_s(0.5)) == (0.5, 0.25)
    assert (outcome.num_steps, outcome.peak) == (2, 2)
    assert (outcome.trail.exposed_s, outcome.trail.copied_s) == (0.75, 1.5)


def test_nothing_happened() -> None:
    """Without requests every figure is zero; a single token has no time per token."""
    outcome = make([], [])
    assert (outcome.tok_s, outcome.wall_s, outcome.peak, outcome.ttft_s(0.5)) == (0, 0, 0, 0)
    assert make([0], [0], finished(0.0, 1, 1.0, 1.0)).tpot_s(0.5) == 0


def test_recovery_counts_from_when_there_is_room() -> None:
    """Six are away at most; five fit again after 3 s, with 9 pages to spare; all are home at 5 s."""
    recovery = make([0, 3, 6, 5, 2, 0], [50, 20, 20, 24, 30, 50]).recovery(0.5)
    assert recovery is not None
    assert (recovery.num_away, recovery.took_s, recovery.copy_s) == (5, 2.0, 2.5)


def test_home_is_as_many_as_at_the_start() -> None:
    """With two away from the start, being home again is two away."""
    recovery = replace(make([2, 3, 2, 2], [50] * 4), num_away_at_start=2).recovery(1.0)
    assert recovery is not None
    assert (recovery.num_away, recovery.took_s, recovery.copy_s) == (1, 1.0, 1.0)


def test_without_need_or_room_there_is_no_recovery() -> None:
    """Nobody left; or pages for them were never free."""
    assert make([0, 0], [9, 9]).recovery(1.0) is None
    assert make([0, 2, 0], [9, 9, 8]).recovery(1.0) is None


def test_experts_that_stay_away_never_recover() -> None:
    """The time is infinite."""
    recovery = make([0, 2, 2], [50] * 3).recovery(1.0)
    assert recovery is not None
    assert math.isinf(recovery.took_s)


def test_quantiles_are_values_that_occurred() -> None:
    """The nearest rank: of ten values the 90th percentile is the ninth."""
    values = [float(n) for n in range(1, 11)]
    assert [find_quantile(values, q) for q in (0.0, 0.5, 0.9, 0.91, 1.0)] == [1, 5, 9, 10, 10]
