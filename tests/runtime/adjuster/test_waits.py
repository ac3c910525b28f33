"""Which experts go and which come where layers hide some of their misses: those that steps wait for least, and most."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticmoe.runtime.adjuster.choose import choose_evictions, choose_loads
from elasticmoe.runtime.adjuster.step_model import StepFit
from elasticmoe.runtime.pages.table import OFFLOADED, RESIDENT
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.snapshots import make_snapshot, offloaded_tail


def hiding(room: float, num_layers: int = 2) -> StepFit:
    """Return a fit by which each layer hides so many misses."""
    return StepFit(terms=(1.0, 0.0, 0.0), num_layers=num_layers, expert_s=1 / (num_layers * room), overlap=1.0)


def test_a_layer_that_hides_more_gives_first() -> None:
    """Layer 0 misses three experts and hides two, layer 1 misses none: its hotter expert costs no step anything."""
    probability = np.array([[0.5, 0.05, 0.3, 0.3, 0.3], [0.5, 0.4, 0.3, 0.2, 0.1]])
    snap = make_snapshot(
        np.array([[RESIDENT] * 2 + [OFFLOADED] * 3, [RESIDENT] * 5], dtype=np.int8),
        loading_depth=1,
        probability=probability,
        heat=probability,
        buffer_depth=np.array([4]),
        num_running=50,
    )
    assert choose_evictions(snap, 3) == (ExpertKey(0, 1),), "before anything was measured the coldest goes"
    assert choose_evictions(replace(snap, fit=hiding(2)), 3) == (ExpertKey(1, 4),)


def test_evictions_spread_over_all_layers_and_both_buffers() -> None:
    """Eight layers alike on two buffers: each gives as many, where unmeasured one buffer would give them all."""
    state = offloaded_tail(*[0] * 8, num_experts=16)
    snap = make_snapshot(state, probability=np.full(state.shape, 1 / 16), num_running=20)
    for fit, most in ((hiding(2.0, 8), 3), (StepFit(), 6)):
        chosen = choose_evictions(replace(snap, fit=fit), 3 * 3 * 6)
        assert chosen is not None
        taken = np.bincount([key.layer for key in chosen], minlength=8)
        assert taken.max() == most


def test_a_layer_counts_what_it_has_given_in_the_same_plan() -> None:
    """Layer 1's two coldest are colder than layer 0's, but with one of them gone it hides no second one."""
    probability = np.array([[0.4, 0.3, 0.2, 0.1], [0.6, 0.3, 0.05, 0.05]])
    snap = make_snapshot(
        offloaded_tail(0, 0, num_experts=4),
        loading_depth=1,
        probability=probability,
        buffer_depth=np.array([3]),
        num_running=1000,
    )
    assert choose_evictions(snap, 6) == (ExpertKey(1, 3), ExpertKey(1, 2))
    assert choose_evictions(replace(snap, fit=hiding(1.5)), 6) == (ExpertKey(1, 3), ExpertKey(0, 3))


def test_the_expert_that_is_waited_for_most_comes() -> None:
    """Layer 1 misses three experts, of which it hides two; layer 0 one, that is hotter, and hides it."""
    probability = np.array([[0.5, 0.1, 0.0, 0.4], [0.1, 0.3, 0.3, 0.3]])
    snap = make_snapshot(offloaded_tail(1, 3, num_experts=4), probability=probability, num_running=40)
    assert choose_loads(snap, 1) == (ExpertKey(0, 3),), "before anything was measured the hottest comes"
    assert choose_loads(replace(snap, fit=hiding(2)), 1) == (ExpertKey(1, 1),)


@given(data=st.data(), num=st.integers(1, 6))
def test_where_nothing_is_hidden_the_coldest_go_however_many_run(data: st.DataObject, num: int) -> None:
    """A measured engine that hides nothing, and one that has not been measured, take the least probable nominee."""
    shares = st.lists(st.integers(1, 1000), min_size=12, max_size=12, unique=True)
    probability = np.array(data.draw(shares), dtype=np.float64).reshape(3, 4)
    probability /= probability.sum(axis=1, keepdims=True)
    snap = make_snapshot(
        offloaded_tail(0, 0, 0, num_experts=4),
        loading_depth=1,
        probability=probability,
        heat=probability,
        buffer_depth=np.array([4]),
        num_running=data.draw(st.integers(0, 8)),
    )
    coldest = np.argsort(probability, axis=None)[:num].tolist()
    for fit in (StepFit(), replace(hiding(1, 3), overlap=0.0)):
        assert choose_evictions(replace(snap, fit=fit), 3 * num) == tuple(ExpertKey(*divmod(n, 4)) for n in coldest)


def waited(touched: float, others: list[float], room: float, *, is_away: bool) -> float:
    """Return what steps wait for one expert among others of its layer that are away, from each one's own chance."""
    mean = sum(others) + (-touched if is_away else touched) / 2
    variance = sum(each * (1 - each) for each in others)
    scale = max(1e-3, math.sqrt(3 * variance) / math.pi)
    return touched / (1 + math.exp(min(700, (room - mean) / scale)))


@given(st.data())
def test_each_choice_is_the_one_that_steps_wait_for_least_or_most(data: st.DataObject) -> None:
    """Against sums over independent experts, two of which a token is routed to."""
    num_layers, num_experts, top_k, tokens, room = 3, 6, 2, data.draw(st.integers(1, 60)), data.draw(st.floats(0.3, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    probability = rng.dirichlet(np.full(num_experts, 0.5), num_layers)
    state = np.where(rng.random(probability.shape) < 0.4, OFFLOADED, RESIDENT).astype(np.int8)
    snap = make_snapshot(
        state, loading_depth=1, probability=probability, heat=probability, buffer_depth=np.array([num_experts]),
        num_running=tokens, top_k=top_k, limit=num_experts, fit=hiding(room, num_layers),
    )  # fmt: skip
    chance = 1 - (1 - np.minimum(top_k * probability, 1 - 1e-9)) ** tokens
    away = [[float(chance[layer, e]) for e in np.flatnonzero(state[layer] == OFFLOADED)] for layer in range(num_layers)]
    coldest = [
        min(np.flatnonzero(state[layer] == RESIDENT), key=lambda e: probability[layer, e], default=None)
        for layer in range(num_layers)
    ]
    leaving = [
        (waited(float(chance[layer, e]), away[layer], room, is_away=False), layer)
        for layer, e in enumerate(coldest)
        if e is not None
    ]
    chosen = choose_evictions(snap, 3)
    assert chosen is None or leaving[[layer for _, layer in leaving].index(chosen[0].layer)][0] == pytest.approx(
        min(leaving)[0], abs=1e-9
    )
    coming = {
        ExpertKey(layer, int(e)): waited(float(chance[layer, e]), away[layer], room, is_away=True)
        for layer in range(num_layers)
        for e in np.flatnonzero(state[layer] == OFFLOADED)
    }
    loads = choose_loads(snap, len(coming))
    assert [coming[key] for key in loads] == pytest.approx(sorted(coming.values(), reverse=True), abs=1e-9)
