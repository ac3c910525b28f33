"""Costs of steps against what was measured on one H200 (docs/simulator.md)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.matrix.timeline import read_layers
from elasticmoe.runtime.simulator.hardware import H200, RTX_4090_X2
from elasticmoe.runtime.simulator.routing import make_routing
from elasticmoe.runtime.simulator.step_cost import Batch, StepModel
from tests.runtime.simulator.models import CONFIGS, qwen3

MEASURED_US = {8: 144, 64: 312, 256: 338, 1024: 401, 4096: 850, 8192: 1540}
"""vLLM's fused experts at so many tokens, flat routing, in a CUDA graph."""
KERNEL_US = 25
"""Of those, what doesn't grow with bytes or FLOPs; here it is part of a layer's fixed time."""
PROFILE = CONFIGS.parent / "results" / "profile-h200.json"
DECODE = Batch(num_tokens=64, num_requests=64, kv_tokens=64 * 300)
ALL, NONE = np.full(48, 126.0), np.zeros(48)


@pytest.mark.parametrize(("num_tokens", "measured_us"), MEASURED_US.items())
def test_experts_cost_what_was_measured(num_tokens: int, measured_us: float) -> None:
    """Within 10 % between 8 and 8192 tokens."""
    touched = make_routing("flat", 48, 128, 8).touched(np.array([num_tokens])).reshape(48, 128).sum(axis=1)
    layers_s = StepModel(H200, qwen3()).experts_s(num_tokens, touched)
    assert layers_s[0] * 1e6 + KERNEL_US == pytest.approx(measured_us, rel=0.10)


def step_s(missed: np.ndarray, num_loads: int = 0, *, hides: bool = True, eager: bool = False) -> float:
    """Return the seconds of a decode step of 64 requests."""
    model = StepModel(H200, qwen3(), is_eager=eager, hides_fetches=hides)
    return model.cost(DECODE, ALL, missed, num_loads, may_miss=bool(missed.any())).total_s


def waited_s(num_missed: int, *, looks_ahead: bool) -> float:
    """Return the seconds a layer that one with so many fetches adds, on a GPU where sharing and looking are free."""
    model = StepModel(replace(H200, contention=0, fetch_idle_s=0), qwen3(), looks_ahead=looks_ahead)
    cost = model.cost(DECODE, ALL, np.full(48, num_missed), 0, may_miss=True)
    assert cost.copy_s == pytest.approx(48 * num_missed * model.expert_s)
    return cost.exposed_s / 48


def layer_s(*, of_experts: bool) -> float:
    """Return the seconds that a layer computes, or its experts alone: 289 and 360 µs, one copy and a half and two."""
    model = StepModel(replace(H200, step_s=0, request_s=0), qwen3())
    if of_experts:
        return float(model.experts_s(64, ALL)[0])
    return model.cost(DECODE, ALL, NONE, 0, may_miss=False).total_s / 48


@pytest.mark.parametrize("num_missed", [1, 2, 3])
def test_a_layers_own_fetch_hides_behind_its_experts_only(num_missed: int) -> None:
    """It starts when the layer's routing is known: attention is over by then."""
    copy_s = num_missed * StepModel(H200, qwen3()).expert_s
    assert waited_s(num_missed, looks_ahead=False) == pytest.approx(max(0, copy_s - layer_s(of_experts=True)))


@pytest.mark.parametrize("num_missed", [1, 2, 3])
def test_a_fetch_that_looks_ahead_hides_behind_a_whole_layer(num_missed: int) -> None:
    """It starts when the layer before does, so attention hides it as well."""
    copy_s = num_missed * StepModel(H200, qwen3()).expert_s
    assert waited_s(num_missed, looks_ahead=True) == pytest.approx(max(0, copy_s - layer_s(of_experts=False)))
    assert layer_s(of_experts=False) > 1.2 * layer_s(of_experts=True)


def test_a_measured_step_waits_as_long() -> None:
    """256 skewed requests, 30 of 48 layers fetching up to seven experts: what fetches add is met within 5 %."""
    raw = json.loads(PROFILE.read_text(encoding="utf-8"))["cases"]["churn"]["raw"]
    layers = read_layers(raw)[-48:]
    whole_us = [one.whole_us for one in layers if not one.is_fetching]
    measured_s = sum(one.whole_us - sum(whole_us) / len(whole_us) for one in layers) * 1e-6
    model = StepModel(H200, qwen3())
    missed = np.array([round(one.fetch_us * 1e-6 / model.expert_s) for one in layers])
    touched = make_routing("skewed", 48, 128, 8).touched(np.full(32, 8)).reshape(48, 128).sum(axis=1)
    cost = model.cost(Batch(256, 256, 256 * 135), touched, missed, 0, may_miss=True)
    assert (missed > 0).sum() == 30
    assert measured_s > 9e-3
    assert cost.exposed_s - 48 * H200.fetch_idle_s == pytest.approx(measured_s, rel=0.05)


def test_even_fetches_hide_behind_compute() -> None:
    """One expert a layer, 8.9 ms of copies, costs 1.1 ms more beside compute (measured), looking included."""
    assert step_s(np.ones(48)) - step_s(NONE) == pytest.approx(1.1e-3, abs=0.3e-3)


def test_uneven_fetches_are_waited_for() -> None:
    """1.5 experts a layer on average, unevenly, cost 30 % (measured), since every layer waits for its own."""
    model = StepModel(H200, qwen3())
    half = Batch(num_tokens=32, num_requests=32, kv_tokens=0)
    missed = np.random.default_rng(0).poisson(1.5, 48).astype(float)
    slow = model.cost(half, np.full(48, 105.0), missed, 0, may_miss=True)
    assert 0.2 < slow.exposed_s / slow.compute_s < 0.5


def test_a_host_that_fetches_hides_nothing() -> None:
    """All copied time is exposed then, and every layer waits for the host to see its routing."""
    added_s = step_s(np.ones(48), hides=False) - step_s(NONE, hides=False)
    copies_s = 48 * qwen3().expert_bytes / H200.copy_bytes_s
    assert added_s == pytest.approx(copies_s + 48 * H200.host_sync_s, rel=0.01)


def test_planned_loads_are_free_while_the_bus_is() -> None:
    """A few loads only cost their contention; more than a step has time for make it as long as they are."""
    few, many = step_s(NONE, 5) - step_s(NONE), step_s(NONE, 200)
    assert few < 0.5e-3
    assert many == pytest.approx(200 * qwen3().expert_bytes / H200.copy_bytes_s, rel=0.02)


def test_without_graphs_launches_set_the_pace() -> None:
    """Eager, 48 layers took 58 to 77 ms a step whatever the batch."""
    assert 0.058 < step_s(NONE, eager=True) < 0.077


def test_launches_set_the_pace_of_short_prompts() -> None:
    """A step with a prompt is no single graph: 48 layers of 16 kernels take the host at least 38 ms; long ones hide it.

    What their layers wait for copies is hidden by that, too.
    """
    model = StepModel(replace(H200, contention=0, fetch_idle_s=0), qwen3())
    short, long = Batch(65, 64, 64 * 300), Batch(8192, 8, 8192)
    missed = model.cost(short, ALL, np.ones(48) * 2, 0, may_miss=True)
    assert missed.compute_s > 48 * 16 * H200.prompt_launch_s > 2 * step_s(NONE)
    assert missed.exposed_s == 0
    without = StepModel(replace(H200, prompt_launch_s=0), qwen3())
    costs = [one.cost(long, ALL, NONE, 0, may_miss=False).total_s for one in (model, without)]
    assert costs[0] == costs[1]


def test_an_idle_step_costs_its_copies() -> None:
    """Without tokens nothing else takes time."""
    cost = StepModel(H200, qwen3()).idle_cost(10)
    assert cost.total_s == cost.copy_s == cost.exposed_s == pytest.approx(10 * qwen3().expert_bytes / 5.1e10)


def test_a_group_pays_for_its_link() -> None:
    """Two cards hold half the bytes each, and add two all-reduces a layer."""
    model = StepModel(RTX_4090_X2, qwen3(2))
    cost = model.cost(DECODE, ALL, NONE, 0, may_miss=False)
    assert cost.total_s > 2 * 48 * RTX_4090_X2.link_s + 126 * 48 * qwen3(2).expert_bytes / 1.008e12


def test_attending_to_a_long_prompt_costs_compute() -> None:
    """A chunk at the end of a long prompt takes longer than the same chunk at its start."""
    model = StepModel(H200, qwen3())
    first, last = (Batch(2048, 1, 2048, attended) for attended in (2048 * 1024, 2048 * 31_000))
    assert (
        model.cost(last, ALL, NONE, 0, may_miss=False).total_s > model.cost(first, ALL, NONE, 0, may_miss=False).total_s
    )
