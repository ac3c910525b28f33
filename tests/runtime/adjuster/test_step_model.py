"""What a step costs: predictions, and how they follow from samples."""

import math
from dataclasses import replace

import numpy as np
import pytest

from elasticmoe.runtime.adjuster.misses import Misses
from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.adjuster.step_model import INSTANT_S, PRIOR_OVERLAP, StepFit, StepModel

EXPERT_BYTES = 1_000_000
LAYERS = 10
MEAN_SHARE = 8 / 128
FIT = StepFit(
    num_steps=1,
    terms=(4e-3, 8e-3, 1e-5),
    mean_spared=math.log(1 - MEAN_SHARE),
    num_layers=LAYERS,
    expert_s=2e-5,
    overlap=0.6,
)
"""Ten layers, an expert copied in 20 µs."""


def floats(*values: float) -> np.ndarray:
    """Return an array of these."""
    return np.array(values)


def each(number: float, variance: float = 0.0) -> Misses:
    """Return so many misses of each layer."""
    return Misses(floats(number), floats(variance))


# Predictions


def test_compute_of_one_step_is_that_of_many() -> None:
    """The same formula, of one number."""
    assert [FIT.compute_alone_s(n) for n in (1, 64, 8192)] == pytest.approx(FIT.compute_s(floats(1, 64, 8192)).tolist())


def test_compute_grows_with_touched_experts_then_with_tokens() -> None:
    """One token touches a sixteenth of the experts, a thousand all of them."""
    seconds = FIT.compute_s(floats(1, 1000))
    assert seconds.tolist() == pytest.approx([4e-3 + 8e-3 / 16 + 1e-5, 4e-3 + 8e-3 + 1e-2])


@pytest.mark.parametrize(("overlap", "long_ms", "short_ms"), [(0.0, 42.0, 42.0), (0.25, 39.0, 34.5), (1.0, 30.0, 30.0)])
def test_a_step_is_its_compute_and_what_it_does_not_hide(overlap: float, long_ms: float, short_ms: float) -> None:
    """12 ms of compute hide a share of themselves of 30 ms of copies, and 30 ms of compute of 12 ms of copies."""
    fit = replace(FIT, terms=(12e-3, 0.0, 0.0), expert_s=1e-4, overlap=overlap)
    assert 1000 * float(fit.step_s(floats(1), each(30))[0]) == pytest.approx(long_ms, abs=0.01)
    turned = replace(fit, terms=(30e-3, 0.0, 0.0))
    assert 1000 * float(turned.step_s(floats(1), each(12))[0]) == pytest.approx(short_ms, abs=0.01)


def test_layers_that_miss_more_than_others_make_a_step_longer() -> None:
    """A layer hides beside its own compute: the same copies, all hidden where they lie evenly."""
    room = float(FIT.room(floats(32))[0])
    even, uneven = (float(FIT.step_s(floats(32), each(room / 2, variance))[0]) for variance in (0.0, room**2))
    assert even == pytest.approx(float(FIT.compute_s(floats(32))[0]), rel=1e-3)
    assert uneven > even + 0.1 * LAYERS * FIT.expert_s * room


def test_all_copies_take_as_long_as_one_after_another() -> None:
    """Three misses of each of ten layers, 20 µs each."""
    assert FIT.copy_s(each(3)).tolist() == pytest.approx([600e-6])


def test_nothing_is_hidden_before_a_step_and_a_copy_were_measured() -> None:
    """Whatever the first guess would be."""
    assert FIT.room(floats(8)) > 0
    assert replace(FIT, expert_s=0.0).room(floats(8)).tolist() == [0]
    assert replace(FIT, terms=(0.0, 0.0, 0.0)).room(floats(8)).tolist() == [0]


# Learning


SPREAD = 0.7
"""Variance of misses, for each one expected."""
NO_PROMPTS = (0, 0)


def sample_of(
    fit: StepFit, requests: int, *, missed: int = 0, steps: int = 16, prompts: tuple[int, int] = NO_PROMPTS
) -> StepSample:
    """Return what an engine would measure whose steps cost what `fit` says.

    `prompts` is how many of them compute prompts too, and the tokens of each.
    """
    num, length = prompts
    tokens = np.array([requests] * (steps - num) + [requests + length] * num, dtype=np.float64)
    mean = missed / (LAYERS * steps)
    seconds = fit.step_s(tokens, each(mean, SPREAD * mean))
    return StepSample(
        num_steps=steps,
        duration_s=float(seconds.sum()),
        num_tokens=int(tokens.sum()),
        num_requests=steps * requests,
        num_prompt_steps=num,
        num_prompt_tokens=num * length,
        num_new_tokens=steps * requests,
        num_missed=missed,
        exposed_s=float((seconds - fit.compute_s(tokens)).sum()),
        copied_bytes=missed * EXPERT_BYTES,
        copy_s=missed * fit.expert_s,
        num_preempted=0,
    )


def learned(*samples: StepSample, half_life_steps: int = 1000) -> StepFit:
    """Return the fit after these samples, each with as many misses as were expected."""
    model = StepModel(MEAN_SHARE, half_life_steps, LAYERS, EXPERT_BYTES)
    for sample in samples:
        model.learn(sample, expected(sample.num_missed))
    return model.fit


def expected(missed: float, steps: int = 16) -> Misses:
    """Return what one layer was expected to miss in a step where all missed so many in so many steps."""
    mean = np.asarray(missed / (LAYERS * steps))
    return Misses(mean, SPREAD * mean)


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
    assert learned(*samples).expert_s == pytest.approx(3e-11 * EXPERT_BYTES, rel=0.01)


def test_a_copy_measured_in_an_instant_takes_a_little() -> None:
    """Else a layer would hide more misses than there are numbers for."""
    fit = learned(*[replace(sample_of(FIT, 8, missed=1), copy_s=1e-300)] * 2)
    assert fit.expert_s == INSTANT_S
    assert np.isfinite(fit.room(floats(8))).all()


MISSED = (2000, 6000, 20_000)
"""Misses of 16 steps: 12 to 125 of a layer in each, beside compute that is as long as 58 copies of each layer."""


@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.4, 0.8, 1.0])
def test_what_is_hidden_is_learned_from_exposed_seconds(overlap: float) -> None:
    """The share comes out as it was put in, where layers miss less than they hide and where they miss more."""
    samples = [sample_of(replace(FIT, overlap=overlap), 64, missed=missed) for missed in MISSED] * 30
    assert learned(*samples).overlap == pytest.approx(overlap, abs=0.03)


@pytest.mark.parametrize("overlap", [0.1, 0.4, 0.8])
def test_prompts_do_not_hide_what_is_hidden(overlap: float) -> None:
    """Some steps compute 300 tokens more: what the others hide is still found."""
    engine = replace(FIT, overlap=overlap)
    mixed = [sample_of(engine, 64, missed=missed, prompts=(num, 300)) for missed in MISSED for num in (0, 1, 4)]
    assert learned(*mixed * 20).overlap == pytest.approx(overlap, abs=0.06)


def test_steps_that_all_compute_prompts_tell_nothing_of_those_that_do_not() -> None:
    """The share stays what it was."""
    samples = [sample_of(replace(FIT, overlap=0.9), 64, missed=missed, prompts=(16, 300)) for missed in MISSED]
    assert learned(*samples * 30).overlap == pytest.approx(PRIOR_OVERLAP)


def test_layers_that_hide_all_they_miss_tell_nothing() -> None:
    """However often that is seen: the share stays what others taught, or the first guess."""
    hidden = [sample_of(replace(FIT, overlap=1.0), 64, missed=300)] * 100
    assert hidden[0].exposed_s == pytest.approx(0, abs=1e-6)
    assert learned(*hidden).overlap == pytest.approx(PRIOR_OVERLAP, abs=0.01)
    taught = [sample_of(replace(FIT, overlap=0.2), 64, missed=missed) for missed in MISSED] * 10
    assert learned(*taught, *hidden).overlap == pytest.approx(learned(*taught).overlap, abs=0.01)


def test_before_a_layer_missed_more_than_it_hides_half_is_hidden() -> None:
    """Which only trying can correct."""
    assert learned(sample_of(FIT, 64, missed=1)).overlap == PRIOR_OVERLAP


def test_misses_that_routing_alone_does_not_explain_scale_the_expectation() -> None:
    """Half the misses that were expected, measured often, halve what is expected next; a few change little."""
    model = StepModel(MEAN_SHARE, 1000, LAYERS, EXPERT_BYTES)
    model.learn(sample_of(FIT, 8, missed=2), expected(4))
    assert model.fit.miss_factor == pytest.approx(1, abs=0.1)
    for _ in range(30):
        model.learn(sample_of(FIT, 8, missed=100), expected(200))
    assert model.fit.miss_factor == pytest.approx(0.5, abs=0.02)


def test_old_measurements_fade() -> None:
    """After ten half-lives of slower steps the fast ones before are forgotten."""
    slow = replace(FIT, terms=(12e-3, 24e-3, 3e-5))
    before = [sample_of(FIT, n, missed=1) for n in (8, 64)] * 20
    after = [sample_of(slow, n, missed=1) for n in (8, 64)] * 20
    fit = learned(*before, *after, half_life_steps=64)
    assert float(fit.compute_s(floats(64))[0]) == pytest.approx(float(slow.compute_s(floats(64))[0]), rel=0.01)


def test_prompts_to_come_are_told_from_answers_that_ended() -> None:
    """Four answers for 1000 new tokens, beside the one of 256 that was guessed; six prompts of 300 tokens in all."""
    assert learned().prompts_per_token == pytest.approx(1 / 256)
    sample = replace(sample_of(FIT, 8), num_new_tokens=1000, answers=(9, 300, 1, 70))
    fit = learned(replace(sample, num_prompt_steps=2, num_prompt_tokens=300, num_started=6))
    assert fit.prompts_per_token == pytest.approx(5 / 1256)
    assert fit.prompt_tokens == pytest.approx(50)


def test_a_flood_of_prompts_does_not_look_as_if_prompts_never_ended() -> None:
    """Requests that started are no answers that ended: the more tokens they have, the fewer prompts are to come."""
    steps = [replace(sample_of(FIT, 50, steps=1, prompts=(1, 8000)), num_started=50)] * 4
    assert [learned(*steps[:n]).prompts_per_token < 1 / (256 + 40 * n) for n in range(1, 5)] == [True] * 4
