"""Experts that a step misses, and how many of them its layers wait for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticmoe.runtime.adjuster.misses import Floats, Misses, expected_misses, touched_share
from elasticmoe.runtime.expert_load import log_spared


def floats(*values: float) -> Floats:
    """Return an array of these."""
    return np.array(values)


def beyond(chances: list[float], room: float) -> float:
    """Return E[max(0, misses - room)] of independent experts, each missed with its chance, by every case there is."""
    number: Floats = np.ones(1)
    for chance in chances:
        number = np.convolve(number, [1 - chance, chance])
    return float(number @ np.maximum(0, np.arange(len(number)) - room))


def of(chances: list[float]) -> Misses:
    """Return the misses of such experts."""
    each = np.array(chances)
    return Misses(each.sum(), (each * (1 - each)).sum())


# Routing


def test_one_token_touches_an_expert_with_its_chance_and_many_almost_surely() -> None:
    """1 - (1 - share)^tokens; a share of one is touched by any token, no token touches nothing."""
    assert touched_share(floats(0, 1, 2), log_spared(0.25)).tolist() == pytest.approx([0, 0.25, 1 - 0.75**2])
    assert touched_share(floats(1), log_spared(1.0)).tolist() == pytest.approx([1])


def test_misses_add_up_over_the_coldest_experts_and_between_whole_depths() -> None:
    """At depth 0 none, at 2 the two coldest, at 1.5 the coldest and half of the next, at most all."""
    spared = log_spared(floats(0.1, 0.2, 1.0))
    missed = expected_misses(spared, floats(0, 1, 1.5, 2, 3), np.ones(5))
    assert missed.mean.tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 1.3])


def test_misses_count_an_expert_once_however_many_tokens_want_it() -> None:
    """Of two tokens at even odds three quarters of the time at least one wants it."""
    assert expected_misses(log_spared(floats(0.5, 0.5)), floats(1), floats(2)).mean.tolist() == pytest.approx([0.75])


def test_misses_vary_by_chance_and_by_how_many_a_layer_has_away() -> None:
    """Each expert is missed or not; at depth 1.5 half of the layers may miss the second one, the others never."""
    spared = log_spared(floats(0.1, 0.4))
    missed = expected_misses(spared, floats(1, 1.5, 2), np.ones(3))
    halves = 0.1 * 0.9 + (0.5 * 0.4) * (1 - 0.5 * 0.4)
    assert missed.variance.tolist() == pytest.approx([0.09, halves, 0.09 + 0.24])


def test_experts_that_every_step_wants_do_not_vary() -> None:
    """A thousand tokens touch them all: as many misses in every layer and step."""
    missed = expected_misses(log_spared(floats(0.5, 0.5, 0.5)), floats(2), floats(1000))
    assert [float(missed.mean[0]), float(missed.variance[0])] == pytest.approx([2, 0])


def test_measured_misses_scale_expected_ones_but_no_more_are_missed_than_are_away() -> None:
    """Half as many, or all of the four that are away."""
    expected = Misses(floats(3.0), floats(1.0))
    assert expected.scaled(0.5, floats(4)).mean.tolist() == [1.5]
    assert expected.scaled(9.0, floats(4)).mean.tolist() == [4.0]


# Waiting


@pytest.mark.parametrize("chances", [[0.5] * 2, [0.3] * 8, [0.9] * 5, [0.05] * 40, [0.1, 0.2, 0.4, 0.8, 0.9]])
@pytest.mark.parametrize("room", [0.5, 1.0, 1.7, 3.0, 5.0])
def test_misses_beyond_the_room_are_near_those_of_every_case_counted(chances: list[float], room: float) -> None:
    """Within a seventh of a standard deviation, though experts are whole and cannot be more than are away."""
    missed = of(chances)
    near = pytest.approx(beyond(chances, room), abs=float(np.sqrt(missed.variance)) / 7)
    assert float(missed.beyond(floats(room))[0]) == near


@pytest.mark.parametrize("room", [2.0, 6.0, 8.0, 11.0])
def test_misses_of_many_experts_are_nearer(room: float) -> None:
    """Sixty-four experts at odds of one to seven: within a twenty-fifth of an expert."""
    chances = [1 / 8] * 64
    assert float(of(chances).beyond(floats(room))[0]) == pytest.approx(beyond(chances, room), abs=1 / 25)


@pytest.mark.parametrize(("room", "over"), [(0.0, 3.0), (1.25, 1.75), (2.999, 0.001), (3.0, 0.0), (9.0, 0.0)])
def test_of_a_number_that_never_varies_what_is_over_is_exact(room: float, over: float) -> None:
    """Three misses in every layer and step: those over the room."""
    assert float(of([1.0] * 3).beyond(floats(room))[0]) == pytest.approx(over, abs=1e-3)


@given(mean=st.floats(0, 300), variance=st.floats(0, 300), room=st.floats(0, 400), more=st.floats(0.001, 10))
def test_waiting_has_its_bounds(mean: float, variance: float, room: float, more: float) -> None:
    """Never more than all misses, never less than the mean's excess, never more with more room."""
    missed = Misses(floats(mean), floats(variance))
    over = float(missed.beyond(floats(room))[0])
    assert max(0.0, mean - room) - 1e-9 <= over <= mean
    assert float(missed.beyond(floats(room + more))[0]) <= over + 1e-9
    assert 0 <= float(missed.saturation(room)[0]) <= 1


def test_without_room_every_miss_is_waited_for() -> None:
    """All of them, by all layers, however they vary."""
    missed = Misses(floats(0.0, 0.5, 2.0), floats(0.0, 0.4, 7.0))
    assert missed.beyond(np.zeros(3)).tolist() == [0.0, 0.5, 2.0]
    assert missed.saturation(0.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("room", [2.0, 4.0, 5.5])
def test_saturation_is_what_one_more_miss_in_each_layer_costs(room: float) -> None:
    """The slope of what is waited for."""
    missed, step = Misses(floats(4.0), floats(1.5)), 1e-4
    slope = (missed.beyond(floats(room - step)) - missed.beyond(floats(room + step))) / (2 * step)
    assert missed.saturation(room).tolist() == pytest.approx(slope.tolist(), abs=1e-3)


def test_misses_that_lie_unevenly_are_waited_for_more() -> None:
    """The same mean, just hidden if every layer misses as many."""
    even, uneven = (float(Misses(floats(2.0), floats(v)).beyond(floats(2.5))[0]) for v in (0.0, 4.0))
    assert even == pytest.approx(0, abs=1e-3)
    assert uneven > 0.4
