"""What an engine would serve at other depths, by its own measurements."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from elasticmoe.runtime.adjuster.forecast import Forecast, forecast, misses_at
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.adjuster.step_model import StepFit
from tests.fakes.snapshots import make_snapshot, offloaded_tail

LAYERS, EXPERTS = 4, 8
FIT = StepFit(
    num_steps=1,
    terms=(2e-3, 0.0, 1e-5),
    mean_spared=math.log(1 - 1 / EXPERTS),
    num_layers=LAYERS,
    expert_s=1e-4,
    overlap=0.5,
    prompts_per_token=1 / 100,
    prompt_tokens=200.0,
)
"""A step of 2 ms and 10 µs a token: a prompt of 200 tokens takes another 2 ms."""


def engine(**changes: Any) -> Snapshot:  # noqa: ANN401 -- any field
    """Return 20 running requests, none waiting, with nobody away."""
    fields: dict[str, Any] = {"num_running": 20, "fit": FIT}
    return make_snapshot(offloaded_tail(*[0] * LAYERS), **(fields | changes))


def at(snap: Snapshot, *depths: float) -> Forecast:
    """Return what to expect at these depths."""
    return forecast(snap, np.array(depths))


def test_the_mean_step_is_one_without_prompts_and_one_with() -> None:
    """20 requests bring a prompt with every fifth step: 2.2 ms, or 4.2."""
    expected = at(engine(), 0.0)
    assert expected.decode_s.tolist() == pytest.approx([2.2e-3])
    assert expected.step_s.tolist() == pytest.approx([0.8 * 2.2e-3 + 0.2 * 4.2e-3])
    assert expected.tokens_per_s.tolist() == pytest.approx([20 / 2.6e-3])
    assert expected.decoded_per_s.tolist() == pytest.approx([20 / 2.2e-3])


@pytest.mark.parametrize(("per_token", "prompts"), [(1 / 20, 1), (1 / 10, 2), (1 / 4, 5)])
def test_prompts_beyond_one_a_step_make_it_longer(per_token: float, prompts: int) -> None:
    """With a step of 20 new tokens two, or five, prompts begin: it computes them all."""
    snap = engine(fit=replace(FIT, prompts_per_token=per_token))
    assert at(snap, 0.0).step_s.tolist() == pytest.approx([2.2e-3 + prompts * 2e-3])


def test_depth_is_paid_in_misses_and_brings_requests() -> None:
    """Two layers' worth of an expert's pages, beside two loading buffers, is one request more of six pages."""
    snap = engine(num_waiting=20, kv_pages=120.0, free_pages=0)
    expected = at(snap, 0.0, 1.0)
    assert expected.requests.tolist() == pytest.approx([20, 21])
    assert expected.decode_s[1] > expected.decode_s[0]


def test_misses_are_those_expected_and_measured_to_be_fewer() -> None:
    """With half of what routing alone explains."""
    snap, depth, tokens = engine(), np.array([3.0]), np.array([5.0])
    halved = replace(snap, fit=replace(FIT, miss_factor=0.5))
    assert misses_at(halved, depth, tokens).mean == pytest.approx(misses_at(snap, depth, tokens).mean / 2)
    assert misses_at(replace(snap, fit=replace(FIT, miss_factor=99.0)), depth, tokens).mean.tolist() == [3.0]
