"""A burst's numbers come from its completions and from the series around it."""

import pytest

from bench.serving.burst import BurstResult, Watch, has_recovered, run_burst
from bench.serving.errors import RequestFailed
from bench.serving.metrics import Snapshot
from bench.serving.trace import Lengths, make_requests
from tests.bench.results import make_result, make_snapshot
from tests.fakes.openai_server import FakeOpenAIServer, Script

REQUESTS = make_requests([Lengths(3, 5), Lengths(4, 2), Lengths(6, 1)], 64, 0)
QUICK = Watch(request_timeout_s=60, sample_every_s=0.01, calm_timeout_s=0.1)


def ignore(_: str) -> None:
    """Say nothing."""


def test_answers_stand_in_the_order_of_the_requests() -> None:
    """Every request is sent and its tokens kept in its place."""
    with FakeOpenAIServer(Script(metrics="elasticmoe_resident_experts 4.0\n")) as server:
        result = run_burst(server.base_url, "tiny", REQUESTS, ignore, QUICK)
    assert result.token_ids == ((3, 4, 5, 6, 7), (4, 5), (6,))
    assert result.tok_s == pytest.approx(8 / result.wall_s)
    assert result.is_calm


def test_one_failed_request_fails_the_burst() -> None:
    """The error is the request's own."""
    with FakeOpenAIServer(Script(status=500)) as server, pytest.raises(RequestFailed, match="got 500"):
        run_burst(server.base_url, "tiny", REQUESTS, ignore, QUICK)


def test_counters_are_those_gained_until_calm() -> None:
    """What was counted before the burst is not the burst's."""
    result = make_result(
        before=make_snapshot(evicted=5, loaded=3), calm=make_snapshot(evicted=9, loaded=10, preempted=2)
    )
    assert (result.evictions, result.loads, result.preemptions) == (4, 7, 2)


def test_the_peak_is_where_the_fewest_experts_are() -> None:
    """Of samples with equally few, the one with the most requests."""
    samples = (
        make_snapshot(running=9, resident=30),
        make_snapshot(running=7, resident=20),
        make_snapshot(running=8, resident=20),
    )
    assert make_result(samples=samples).peak is samples[2]


def test_requests_per_step_and_time_per_token_are_the_servers_counters() -> None:
    """They hold when no sample fell into the burst; what was counted before it is not the burst's."""
    result = make_result(
        before=make_snapshot(tokens=100, steps=90, tpots_s=(9.0, 9.0)),
        calm=make_snapshot(tokens=220, steps=100, tpots_s=(9.0, 9.0, 0.02, 0.04)),
    )
    assert result.requests_per_step == 12
    assert result.tpot_ms == pytest.approx(30)
    assert (make_result().requests_per_step, make_result().tpot_ms) == (0, 0)


def test_calm_means_as_many_experts_as_before() -> None:
    """A server without experts is calm at once."""
    assert has_recovered(make_snapshot(resident=30), make_snapshot(resident=30))
    assert not has_recovered(make_snapshot(resident=30), make_snapshot(resident=29))
    assert has_recovered(Snapshot(0, {}), Snapshot(1, {}))


def test_giving_up_on_calm_is_said() -> None:
    """The result tells that the experts did not come back."""
    result: BurstResult = make_result(before=make_snapshot(resident=30), calm=make_snapshot(resident=12))
    assert not result.is_calm
