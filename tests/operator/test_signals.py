"""What the autotuner reads out of two readings of the workers' metrics."""

from dataclasses import replace

import pytest

from elasticmoe.operator.autotuner import Signals, goodput, keeps_slo, measure, share_within
from elasticmoe.operator.observed import PodSample
from tests.fakes.readings import CALM, FAST, SLO, SLOW, SPEC


def test_rates_are_between_two_readings_of_all_workers() -> None:
    """Tokens add up; of exposure and recovery the worst counts."""
    before = {
        "a": PodSample(10.0, generated_tokens=100.0, exposed_s=1.0, tpot_buckets={0.1: 1.0}),
        "b": PodSample(10.0, generated_tokens=0.0),
    }
    after = {
        "a": PodSample(20.0, 2.0, 200.0, 3.0, 7.0, 1.0, tpot_buckets={0.1: 4.0}),
        "b": PodSample(20.0, 1.0, 50.0, 0.0, 9.0, 4.0, tpot_buckets={0.1: 2.0}),
    }
    assert measure(before, after) == Signals(3.0, 4.0, 15.0, 0.2, 9.0, {0.1: 5.0})


@pytest.mark.parametrize(
    "before",
    [{}, {"b": PodSample(0.0)}, {"a": PodSample(5.0)}, {"a": PodSample(0.0, generated_tokens=9.0)}],
    ids=["none", "another", "no time passed", "started anew"],
)
def test_readings_of_other_workers_say_nothing(before: dict[str, PodSample]) -> None:
    """A rate over a restart would be a lie."""
    assert measure(before, {"a": PodSample(5.0, generated_tokens=1.0)}) is None
    assert measure({}, {}) is None


def test_a_share_is_read_at_the_next_buckets_edge() -> None:
    """Past the last edge everything counts; an empty histogram has kept every promise."""
    assert share_within({0.05: 80.0, 0.1: 100.0}, 0.04) == 0.8
    assert share_within({0.05: 80.0, 0.1: 100.0}, 9.0) == 1.0
    assert share_within({}, 0.04) == 1.0


def test_goodput_counts_what_keeps_the_slo() -> None:
    """Without an SLO all tokens do."""
    slow = replace(CALM, tpot_buckets=SLOW)
    assert goodput(slow, SPEC) == 100.0
    assert goodput(slow, SLO) == 80.0


def test_nine_of_ten_keep_the_slo() -> None:
    """Or there is none."""
    assert keeps_slo(replace(CALM, tpot_buckets=SLOW), SPEC)
    assert not keeps_slo(replace(CALM, tpot_buckets=SLOW), SLO)
    assert keeps_slo(replace(CALM, tpot_buckets=FAST), SLO)
