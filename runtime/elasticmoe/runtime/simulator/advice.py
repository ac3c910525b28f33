"""Whether the pool would help a deployment, which limit to start with, and what to expect: a day's metrics, simulated.

Used by `elasticmoe plan`. Never measures anything itself.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticmoe.runtime.contract import config as contract
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.outcome import Outcome, Slo
from elasticmoe.runtime.simulator.requests import Arrival
from elasticmoe.runtime.simulator.simulation import Simulation
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.usage import FULL, Usage
from elasticmoe.runtime.units import ceil_div

PEAK = 0.99
"""Quantile of a day's readings that counts as its peak."""
RARE = 0.01
"""Share of readings below which waiting is not worth a pool."""
LEAST_GAIN = 1.02
MORE_EXPERTS = 10
"""Beyond what the peak needs: the papers' best value."""
SIGMA_PROMPT, SIGMA_ANSWER = 1.0, 0.8
MOST_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of the deployment's requests."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one design makes of the peak."""

    design: str
    limit: int | None
    tok_s: float
    peak: int
    preemptions: int
    ttft_s: float
    """P99."""
    tpot_s: float
    """P99."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer, its reason, and the figures behind it."""

    helps: bool
    reason: str
    limit: int | None
    """Experts of a layer that may be offloaded, to start with; None where the pool would not help."""
    num_requests: int
    """At the peak that was simulated."""
    stock: Expectation | None = None
    pool: Expectation | None = None
    sweep: tuple[Expectation, ...] = ()


def refuse_by_usage(usage: Usage) -> str | None:
    """Return why the pool would not help whatever it costs, or None if memory holds requests up at times."""
    most, waits = usage.kv_usage(PEAK), usage.waiting_share
    if usage.short_share > RARE:
        return None
    if waits > RARE:
        return (
            f"requests wait {waits:.0%} of the time, but hardly ever while KV is {FULL:.0%} full: compute or "
            "--max-num-seqs holds them up, not memory"
        )
    return f"KV is {most:.0%} full at the peak and hardly anything waits: there is nothing to make room for"


def advise(usage: Usage, system: System, lengths: Lengths, slo: Slo, begin: Callable[[str, float], None]) -> Advice:
    """Return the advice for a deployment; `system` is stock on its GPU.

    `begin` hears of each simulation that begins, and which share of all of them is done.
    """
    if lengths.prompt + lengths.answer > system.max_model_len:
        message = f"requests of {lengths.prompt} + {lengths.answer} tokens don't fit {system.max_model_len} at most"
        raise ConfigError(f"{message}; give the deployment's own --max-model-len")
    num = min(MOST_REQUESTS, max(1, math.ceil(usage.demand(PEAK))))
    reason = refuse_by_usage(usage)
    if reason is not None:
        return Advice(helps=False, reason=reason, limit=None, num_requests=num)
    peak = draw_peak(num, lengths, system.max_model_len)
    limits = candidate_limits(system, num, lengths)
    begin(f"simulating {num} requests at once on stock vLLM", 0.0)
    stock = expect("stock", None, Simulation(system, peak).run())
    ttft_ms = None if math.isinf(slo.ttft_s) else 1000 * slo.ttft_s
    config = contract.RuntimeConfig(slo=contract.Slo(tpot_ms=1000 * slo.tpot_s, ttft_ms=ttft_ms))
    sweep = []
    for done, limit in enumerate(limits, start=1):
        begin(f"simulating them with up to {limit} experts of a layer offloaded", done / (len(limits) + 1))
        pool = replace(system, config=config, limit=limit)
        sweep.append(expect("pool", limit, Simulation(pool, peak).run()))
    best = pick_best(sweep, slo)
    return conclude(usage, num, stock, best, tuple(sweep))


def conclude(usage: Usage, num: int, stock: Expectation, best: Expectation, sweep: tuple[Expectation, ...]) -> Advice:
    """Return the advice that the simulations lead to."""
    gain = best.tok_s / stock.tok_s
    if gain < LEAST_GAIN:
        reason = (
            f"fetching offloaded experts would cost what their room brings: {gain:.2f}× stock's tokens/s at the peak"
        )
        return Advice(False, reason, None, num, stock, best, sweep)
    reason = f"memory holds requests up {usage.short_share:.0%} of the time; at the peak {gain:.2f}× stock's tokens/s"
    if usage.kv_usage(0.5) >= FULL:
        reason += (
            "; KV is full most of the day, so experts would seldom come back: a larger GPU may be the better answer"
        )
    return Advice(True, reason, best.limit, num, stock, best, sweep)


def draw_peak(num: int, lengths: Lengths, max_model_len: int) -> tuple[Arrival, ...]:
    """Return the peak: so many requests at once, lognormal around the mean lengths."""
    rng = random.Random(0)

    def draw(mean: int, sigma: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    answers = [draw(lengths.answer, SIGMA_ANSWER, max_model_len // 2) for _ in range(num)]
    return tuple(Arrival(0.0, draw(lengths.prompt, SIGMA_PROMPT, max_model_len - one), one) for one in answers)


def candidate_limits(system: System, num: int, lengths: Lengths) -> list[int]:
    """Return limits to try: what the peak needs, a half and a quarter of that, and ten more."""
    model = system.model
    wanted = num * (lengths.prompt + lengths.answer) * model.kv_bytes - system.kv_bytes
    gained = max(1, model.shape.num_layers - 2) * model.expert_bytes  # two loading buffers net off
    needed = max(1, ceil_div(wanted, gained))
    most = model.shape.num_experts - model.shape.top_k
    return sorted({min(most, max(1, limit)) for limit in (needed // 4, needed // 2, needed, needed + MORE_EXPERTS)})


def pick_best(sweep: list[Expectation], slo: Slo) -> Expectation:
    """Return the most tokens/s among those that keep the TPOT, or the lowest TPOT if none does."""
    keeping = [one for one in sweep if one.tpot_s <= slo.tpot_s]
    if keeping:
        return max(keeping, key=lambda one: one.tok_s)
    return min(sweep, key=lambda one: one.tpot_s)


def expect(design: str, limit: int | None, outcome: Outcome) -> Expectation:
    """Return a simulated run as what to expect."""
    return Expectation(
        design=design,
        limit=limit,
        tok_s=outcome.tok_s,
        peak=outcome.peak,
        preemptions=outcome.num_preemptions,
        ttft_s=outcome.ttft_s(0.99),
        tpot_s=outcome.tpot_s(0.99),
    )
