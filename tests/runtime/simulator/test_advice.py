"""When the pool helps, when it doesn't, and which limit to start with."""

import math
from dataclasses import replace

import pytest

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.advice import (
    Expectation,
    Lengths,
    advise,
    candidate_limits,
    conclude,
    draw_peak,
    pick_best,
    refuse_by_usage,
)
from elasticmoe.runtime.simulator.hardware import H200
from elasticmoe.runtime.simulator.outcome import Slo
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.usage import Sample, Usage
from tests.runtime.simulator.models import qwen3, tiny

SHORT = Usage(tuple(Sample(n, 1.0 if n < 20 else 0.3, 20, 20 if n < 20 else 0) for n in range(100)))
LENGTHS = Lengths(60, 40)


def system(blocks: int = 40) -> System:
    """Return stock vLLM with a tiny model and that room."""
    model = tiny()
    return System(model, H200, blocks * model.tiers.block_bytes, max_model_len=256)


def expectation(limit: int | None, tok_s: float, tpot_s: float = 0.02) -> Expectation:
    """Return what a design comes to."""
    return Expectation("pool", limit, tok_s, 10, 0, 1.0, tpot_s)


def usage(kv_usage: float, waiting: float) -> Usage:
    """Return a day that is always the same."""
    return Usage((Sample(0, kv_usage, 5, waiting),))


@pytest.mark.parametrize(
    ("day", "reason"),
    [
        (usage(0.4, 0), "KV is 40% full at the peak and hardly anything waits: there is nothing to make room for"),
        (usage(0.95, 0), "KV is 95% full at the peak and hardly anything waits: there is nothing to make room for"),
        (usage(0.5, 7), "compute or --max-num-seqs holds them up, not memory"),
    ],
)
def test_without_a_shortage_of_memory_it_does_not_help(day: Usage, reason: str) -> None:
    """KV that never fills, or a queue that KV has no part in; nothing is simulated then."""
    assert reason in str(refuse_by_usage(day))
    advice = advise(day, system(), LENGTHS, Slo(), lambda what, _: pytest.fail(what))
    assert (advice.helps, advice.limit, advice.stock) == (False, None, None)


def test_a_shortage_at_peak_is_helped() -> None:
    """More requests at once, more tokens/s, and a limit that was simulated; each simulation is told of."""
    told: list[tuple[str, float]] = []
    advice = advise(SHORT, system(), LENGTHS, Slo(), lambda what, done: told.append((what, done)))
    assert advice.helps
    assert advice.stock is not None
    assert advice.pool is not None
    assert advice.pool.peak > advice.stock.peak
    assert advice.pool.tok_s > 1.02 * advice.stock.tok_s
    assert advice.limit in [one.limit for one in advice.sweep]
    assert advice.num_requests == 40
    assert [done for _, done in told] == [n / (1 + len(advice.sweep)) for n in range(1 + len(advice.sweep))]
    assert "20% of the time" in advice.reason


def test_the_policy_is_given_the_tpot_that_is_asked_for() -> None:
    """One that nothing keeps lets nobody start by an eviction."""
    peaks = [
        max(one.peak for one in advise(SHORT, system(), LENGTHS, Slo(tpot_s=tpot_s), lambda *_: None).sweep)
        for tpot_s in (1e-6, 0.1)
    ]
    assert peaks[0] < peaks[1]


def test_the_policy_is_given_the_first_token_that_is_promised() -> None:
    """Where experts leave for few, more may start for it, and the last one starts sooner; infinite is none."""
    flat = replace(system(), gpu=replace(H200, copy_bytes_s=1e9), routing="flat")
    without, promised = (
        [one.ttft_s for one in advise(SHORT, flat, LENGTHS, Slo(ttft_s=ttft_s), lambda *_: None).sweep]
        for ttft_s in (math.inf, 0.3)
    )
    assert max(promised) < 0.3 < min(without)


def test_flat_routing_on_a_slow_bus_does_not_pay() -> None:
    """Where every step needs every expert and copies crawl, the policy leaves stock's figures, and says so."""
    slow = replace(system(), gpu=replace(H200, copy_bytes_s=1e7), routing="flat")
    advice = advise(SHORT, slow, LENGTHS, Slo(), lambda *_: None)
    assert not advice.helps
    assert advice.limit is None
    assert "fetching offloaded experts would cost what their room brings" in advice.reason


def test_a_day_that_is_always_full_is_told() -> None:
    """It helps, but experts would seldom come back."""
    advice = conclude(usage(1.0, 5), 10, expectation(None, 100), expectation(4, 150), ())
    assert advice.helps
    assert "a larger GPU may be the better answer" in advice.reason


def test_the_best_limit_keeps_the_slo() -> None:
    """The most tokens/s among those that keep the TPOT; if none does, the lowest TPOT."""
    sweep = [expectation(1, 100, 0.05), expectation(2, 120, 0.09), expectation(3, 140, 0.2)]
    assert pick_best(sweep, Slo(tpot_s=0.1)).limit == 2
    assert pick_best(sweep, Slo(tpot_s=0.01)).limit == 1


def test_limits_to_try_surround_the_need() -> None:
    """100 requests of 1,200 tokens lack 8.99 GiB: 23 experts of 46 net layers; a quarter, half, all, ten more."""
    qwen = System(qwen3(), H200, 2 * 2**30)
    assert candidate_limits(qwen, 100, Lengths(1000, 200)) == [5, 11, 23, 33]
    assert candidate_limits(qwen, 100_000, Lengths(1000, 200)) == [120]
    assert candidate_limits(qwen, 1, Lengths(10, 10)) == [1, 11]


def test_the_peak_has_its_lengths() -> None:
    """Means as told, none longer than the context."""
    peak = draw_peak(2000, Lengths(500, 100), 4096)
    assert sum(one.prompt_tokens for one in peak) / 2000 == pytest.approx(500, rel=0.1)
    assert sum(one.output_tokens for one in peak) / 2000 == pytest.approx(100, rel=0.1)
    assert max(one.prompt_tokens + one.output_tokens for one in peak) <= 4096


def test_requests_longer_than_the_context_are_refused() -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=r"requests of 300 \+ 40 tokens don't fit 256"):
        advise(SHORT, system(), Lengths(300, 40), Slo(), lambda *_: None)
