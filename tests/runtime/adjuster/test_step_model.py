"""What a step costs: predictions, and how they follow from samples."""

from dataclasses import replace

import numpy as np
import pytest

from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.adjuster.step_model import StepFit, StepModel, expected_misses, touched_share

EXPERT_BYTES = 1_000_000
MEAN_SHARE = 8 / 128
FIT = StepFit(num_steps=1, terms=(4e-3, 8e-3, 1e-5), mean_share=MEAN_SHARE, seconds_per_byte=2e-11)


def floats(*values: float) -> np.ndarray:
    """Return an array of these."""
    return np.array(values)


# Predictions


def test_one_token_touches_an_expert_with_its_chance_and_many_almost_surely() -> None:
    """1 - (1 - share)^tokens; a share of one is touched by any token, no token touches nothing."""
    assert touched_share(floats(0, 1, 2), floats(0.25)).tolist() == pytest.approx([0, 0.25, 1 - 0.75**2])
    assert touched_share(floats(1), floats(1.0)).tolist() == pytest.approx([1])


def test_compute_grows_with_touched_experts_then_with_tokens() -> None:
    """One token touches a sixteenth of the experts, a thousand all of them."""
    seconds = FIT.compute_s(floats(1, 1000))
    assert seconds.tolist() == pytest.approx([4e-3 + 8e-3 / 16 + 1e-5, 4e-3 + 8e-3 + 1e-2])


@pytest.mark.parametrize(("remainder", "expected_ms"), [(0.0, 30.0), (0.5, 36.0), (1.0, 42.0)])
def test_a_step_takes_the_longer_of_compute_and_copy_and_what_is_not_hidden(
    remainder: float, expected_ms: float
) -> None:
    """12 ms of compute and 30 of copies are 30 to 42 ms, and the other way round the same."""
    fit = replace(FIT, terms=(12e-3, 0.0, 0.0), remainder=remainder)
    assert 1000 * float(fit.step_s(floats(1), floats(1.5e9))[0]) == pytest.approx(expected_ms)
    turned = replace(fit, terms=(30e-3, 0.0, 0.0))
    assert 1000 * float(turned.step_s(floats(1), floats(0.6e9))[0]) == pytest.approx(expected_ms)


def test_misses_add_up_over_the_coldest_experts_and_between_whole_depths() -> None:
    """At depth 0 none, at 2 the two coldest, at 1.5 the coldest and half of the next, at most all."""
    coldness = floats(0.1, 0.2, 1.0)
    missed = expected_misses(coldness, floats(0, 1, 1.5, 2, 3), np.ones(5))
    assert missed.tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 1.3])


def test_misses_count_an_expert_once_however_many_tokens_want_it() -> None:
    """Of two tokens at even odds three quarters of the time at least one wants it."""
    assert expected_misses(floats(0.5, 0.5), floats(1), floats(2)).tolist() == pytest.approx([0.75])


# Learning


def sample_of(fit: StepFit, requests: int, *, missed: int = 0, steps: int = 16) -> StepSample:
    """Return what an engine would measure whose decode steps cost what `fit` says."""
    copy = missed * EXPERT_BYTES * fit.seconds_per_byte
    compute = float(fit.compute_s(floats(requests))[0])
    each = float(fit.step_s(floats(requests), floats(missed * EXPERT_BYTES / steps))[0])
    return StepSample(
        num_steps=steps,
        duration_s=steps * each,
        num_tokens=steps * requests,
        num_requests=steps * requests,
        num_prompt_steps=0,
        num_prompt_tokens=0,
        num_new_tokens=steps * requests,
        num_missed=missed,
        exposed_s=steps * (each - compute),
        copied_bytes=missed * EXPERT_BYTES,
        copy_s=copy,
        num_preempted=0,
    )


def learned(*samples: StepSample, half_life_steps: int = 1000) -> StepFit:
    """Return the fit after these samples, each with as many misses as were expected."""
    model = StepModel(MEAN_SHARE, half_life_steps)
    for sample in samples:
        model.learn(sample, sample.num_missed * EXPERT_BYTES, sample.num_missed)
    return model.fit


def test_nothing_measured_predicts_nothing() -> None:
    """Not ready before a step and a copy were measured; the start's copies alone are no step."""
    start = replace(sample_of(FIT, 0, steps=16), num_steps=0, duration_s=0.0, copied_bytes=10**9, copy_s=0.02)
    assert not learned().is_ready
    assert not learned(start).is_ready
    assert not learned(sample_of(FIT, 8)).is_ready
    assert learned(start, sample_of(FIT, 8)).is_ready


def test_compute_is_found_again_between_the_batches_that_were_seen() -> None:
    """From steps of 1 to 256 requests, the cost of 48 follows within 3 %, whether or not experts were missed."""
    samples = [sample_of(FIT, requests, missed=missed) for requests in (1, 8, 32, 64, 128, 256) for missed in (0, 160)]
    wanted = float(FIT.compute_s(floats(48))[0])
    assert float(learned(*samples).compute_s(floats(48))[0]) == pytest.approx(wanted, rel=0.03)


def test_a_batch_that_never_varied_is_taken_for_free() -> None:
    """With one batch size seen, its cost is right and no slope is invented."""
    fit = learned(*[sample_of(FIT, 32, missed=16)] * 5)
    assert float(fit.compute_s(floats(32))[0]) == pytest.approx(float(FIT.compute_s(floats(32))[0]))
    assert fit.terms[1:] == pytest.approx((0, 0), abs=1e-12)


def test_no_term_is_ever_negative() -> None:
    """Where larger batches happened to be faster, they cost nothing more, and the mean is kept."""
    fast, slow = replace(FIT, terms=(5e-3, 0.0, 0.0)), replace(FIT, terms=(9e-3, 0.0, 0.0))
    fit = learned(sample_of(slow, 1), sample_of(fast, 200))
    assert min(fit.terms) >= 0
    assert float(fit.compute_s(floats(1))[0]) == pytest.approx(7e-3, rel=0.01)


def test_terms_that_would_explain_more_than_there_is_are_scaled_down() -> None:
    """A cost that grows faster than the batch leaves no cost of an empty step, never less than none."""
    steep = [replace(sample_of(FIT, n), duration_s=16 * n * n * 1e-6, exposed_s=0.0) for n in (100, 200, 300)]
    fit = learned(*steep)
    assert min(fit.terms) >= 0
    assert fit.terms[0] == 0


def test_the_bus_is_the_bytes_over_their_seconds() -> None:
    """Two copies at different speeds give their mean by bytes."""
    samples = [replace(sample_of(FIT, 8), copied_bytes=10**9, copy_s=seconds) for seconds in (0.02, 0.04)]
    assert learned(*samples).seconds_per_byte == pytest.approx(3e-11)


@pytest.mark.parametrize("remainder", [0.0, 0.4, 1.0])
def test_what_is_not_hidden_is_learned_from_exposed_seconds(remainder: float) -> None:
    """The share comes out as it was put in, below and above the point where copies outlast compute."""
    engine = replace(FIT, remainder=remainder)
    samples = [sample_of(engine, 64, missed=missed, steps=16) for missed in (2000, 6000, 20_000)] * 30
    assert learned(*samples).remainder == pytest.approx(remainder, abs=0.05)


def test_misses_that_routing_alone_does_not_explain_scale_the_expectation() -> None:
    """Half the misses that were expected, measured often, halve what is expected next; a few change little."""
    model = StepModel(MEAN_SHARE, half_life_steps=1000)
    model.learn(sample_of(FIT, 8, missed=2), 2 * EXPERT_BYTES, 4)
    assert model.fit.miss_factor == pytest.approx(1, abs=0.1)
    for _ in range(30):
        model.learn(sample_of(FIT, 8, missed=100), 100 * EXPERT_BYTES, 200)
    assert model.fit.miss_factor == pytest.approx(0.5, abs=0.02)


def test_old_measurements_fade() -> None:
    """After ten half-lives of slower steps the fast ones before are forgotten."""
    slow = replace(FIT, terms=(12e-3, 24e-3, 3e-5))
    before = [sample_of(FIT, n, missed=1) for n in (8, 64)] * 20
    after = [sample_of(slow, n, missed=1) for n in (8, 64)] * 20
    fit = learned(*before, *after, half_life_steps=64)
    assert float(fit.compute_s(floats(64))[0]) == pytest.approx(float(slow.compute_s(floats(64))[0]), rel=0.01)


def test_prompts_are_counted_per_token_that_comes_out() -> None:
    """4 prompt steps of 300 tokens in all for 100 new tokens: 0.04 a token, 75 tokens each."""
    sample = replace(sample_of(FIT, 8), num_prompt_steps=4, num_prompt_tokens=300, num_new_tokens=100)
    fit = learned(sample)
    assert fit.prompts_per_token == pytest.approx(0.04)
    assert fit.prompt_tokens == pytest.approx(75)
