"""Goodput: experts leave only where that is predicted to bring more tokens/s, and who starts by it keeps the TPOT.

Every prediction comes from what this engine measured (step_model.py). Until it has measured, and wherever evicting
can't pay, a shortage of blocks is left to vLLM, which then does what it does without us.
"""

from dataclasses import dataclass

import numpy as np

from elasticmoe.runtime.adjuster.choose import choose_evictions, choose_loads
from elasticmoe.runtime.adjuster.forecast import forecast, misses_at
from elasticmoe.runtime.adjuster.prompt_budget import SHARE
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.pages.changes import Plan, Reason
from elasticmoe.runtime.units import MATRICES, ceil_div

FURTHER = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Depths that are tried: shares of the way from what a shortage asks for to the limit, and from 0 to where we are."""
RUNNING = 3
"""How much more slack a running request has: without any bound a lasting overload evicts until no gain is left."""
HURRY = 0.5
"""Of the time to the first token promised: who waits has longer than that, and is not late yet, has all the slack."""
IDLE_SLICE_S = 0.01
"""Seconds of copies that an idle engine starts at once: what the next request may have to wait for."""

JUDGED = (
    "short of {} pages: {:.0f} tokens/s with nobody away, {:.0f} at best with {:.1f} of a layer's experts away, "
    "{:.0f} with {:.1f} and {:.1f} of {:.0f} ms"
)
HURRIED = ", to keep first tokens within {:.1f} s"
FEWER = ", fewer while no prompt is computed"
LATE = ", in a step of {:.0f} ms that may take {:.0f}"
"""What a verdict says; what it adds where the first token is in danger, where decoding alone would have fewer away, and
where the step would be long."""


def plan(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return evictions that pay where pages are short, loads where they are spare, else nothing."""
    if snap.short_pages > 0:
        return _reclaim(snap, config)
    return _bring_back(snap, config)


def _reclaim(snap: Snapshot, config: RuntimeConfig) -> Plan:
    short = f"short of {snap.short_pages} pages"
    reason: str | Reason
    if snap.num_running <= bool(snap.lost_tokens):
        reason = f"{short} for the only request"
    elif not snap.fit.is_ready:
        return Plan(reason=f"{short}, but no step was measured yet")
    else:
        verdict = _judge(snap, config)
        reason = verdict.reason
        if not verdict.pays:
            return Plan(reason=reason)
    chosen = choose_evictions(snap, snap.short_pages)
    if chosen is None:
        return Plan(reason=f"{short}, more than evictions can free")
    return Plan(evict=chosen, reason=reason, cause="short")


@dataclass(frozen=True, slots=True)
class _Verdict:
    pays: bool
    reason: Reason


def _judge(snap: Snapshot, config: RuntimeConfig) -> _Verdict:
    """Return whether covering the shortage pays.

    Some depth must bring more tokens/s than nobody away. A request that waits gets pages up to the best one, or near
    it, that keeps a share of the TPOT promised, since who runs will hold more KV, and no deeper than what is best
    while no prompt is computed: its answer takes far more steps than its prompt, which would hide many copies. The
    step that would compute its prompt must leave those that run in time. One that runs needs no margin, may go further
    beyond the best depth, answers for no prompt, and where no depth keeps the TPOT the tokens/s alone decide: if it
    were preempted, its tokens would be computed again. Where a first token is in danger, all of the TPOT is planned
    with, and tokens/s may fall to those with nobody away, with prompts and without.
    """
    ours, now = config.adjuster.goodput, snap.depth
    after = now + ceil_div(snap.short_pages, MATRICES) / snap.num_layers
    room = max(0.0, min(snap.limit, snap.num_experts) - after)
    depth = [0.0, after, *(after + room * share for share in FURTHER), *(now * share for share in FURTHER)]
    expected = forecast(snap, np.array(depth))
    is_running, is_hurried = snap.lost_tokens > 0, _is_hurried(snap, config)
    tpot_s = expected.decode_s if is_running else expected.step_s
    tokens_per_s = expected.tokens_per_s.tolist()
    rates = _rates(tokens_per_s, tpot_s if is_running or is_hurried else tpot_s / SHARE, config)
    if is_running and not any(rates):
        rates = tokens_per_s
    best = rates.index(max(rates))
    least = tokens_per_s[0] * (1.0 if is_running else 1 + ours.margin)
    slack = 1.0 if is_hurried else ours.slack * (RUNNING if is_running else 1)
    is_near = after <= depth[best] or rates[1] >= max(least, (1 - slack) * rates[best])
    decoded = expected.decoded_per_s
    is_best = is_running or after <= depth[int(np.argmax(decoded))] or (is_hurried and decoded[1] >= decoded[0])
    step_s = snap.fit.compute_alone_s(snap.num_running + snap.prompt_tokens)
    is_in_time = is_running or step_s <= snap.step_budget_s
    pays = rates[1] > 0 and rates[best] >= least and is_near and is_best and is_in_time
    promised = 1000 * tpot_s[1], config.slo.tpot_ms
    hurried = ((config.slo.ttft_ms or 0.0) / 1000,) if is_hurried else ()
    late = () if is_in_time else (1000 * step_s, 1000 * snap.step_budget_s)
    numbers = snap.short_pages, tokens_per_s[0], rates[best], depth[best], rates[1], after, *promised, *hurried, *late
    words = JUDGED + HURRIED * is_hurried + FEWER * (not is_best) + LATE * (not is_in_time)
    return _Verdict(pays, Reason(words, numbers))


def _is_hurried(snap: Snapshot, config: RuntimeConfig) -> bool:
    """Return whether tokens/s are given up for a first token that was promised: it is in danger, but not late yet.

    Who runs keeps what it got so far longer: as long as nobody who waits is late.
    """
    if config.slo.ttft_ms is None:
        return False
    least = 0.0 if snap.lost_tokens else HURRY
    return least <= 1000 * snap.waited_s / config.slo.ttft_ms <= 1.0


def _rates(tokens_per_s: list[float], tpot_s: np.ndarray, config: RuntimeConfig) -> list[float]:
    """Return the tokens/s at each depth, 0 where its TPOT is more than was promised."""
    promised_s = config.slo.tpot_ms / 1000
    return [rate if s <= promised_s else 0.0 for rate, s in zip(tokens_per_s, tpot_s.tolist(), strict=True)]


def _bring_back(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return the loads for which pages are spare; free ones wait for requests first, and for those that run to grow."""
    spare = _spare_pages(snap, config)
    if spare < MATRICES:
        return Plan()
    loads = choose_loads(snap, min(int(spare) // MATRICES, _loads_per_step(snap, config)))
    return Plan(load=loads, reason=f"{snap.free_pages} pages free, {spare:.0f} of them spare", cause="room")


def _spare_pages(snap: Snapshot, config: RuntimeConfig) -> float:
    """Return the pages for experts; where too many experts are away for the requests' own good, all that are free."""
    spare: float = snap.free_pages - snap.waiting_pages - config.adjuster.thresholds.grow_above
    if spare < MATRICES <= snap.free_pages and snap.num_running and snap.depth and snap.fit.is_ready:
        return snap.free_pages if _is_too_deep(snap, config) or _is_too_early(snap) else spare
    return spare


def _is_too_deep(snap: Snapshot, config: RuntimeConfig) -> bool:
    """Return whether fewer experts away, and fewer requests, would bring more tokens/s, or the TPOT that is broken.

    With a queue whatever nobody away would bring is the least; without one a small loss passes with the next answers.
    """
    depth = snap.depth * np.array([1.0, 0.0, *FURTHER])
    expected = forecast(snap, depth)
    rates = _rates(expected.tokens_per_s.tolist(), expected.step_s, config)
    ours = config.adjuster.goodput
    nobody = rates[1] if snap.num_waiting else (1 - ours.margin) * rates[1]
    slack = 1.0 if _is_hurried(snap, config) else ours.slack
    return rates[0] < max((1 - slack - ours.margin) * max(rates), nobody)


def _is_too_early(snap: Snapshot) -> bool:
    """Return whether the next prompt would make who runs late: it gets no more of experts' pages than they left it."""
    next_s = snap.fit.compute_alone_s(snap.num_running + snap.fit.prompt_tokens)
    return snap.num_waiting > 0 and next_s > snap.step_budget_s


def _loads_per_step(snap: Snapshot, config: RuntimeConfig) -> int:
    """Return the experts that the bus can bring back within a step, beside those that the step itself needs."""
    if not snap.fit.is_ready:
        return config.adjuster.thresholds.grow_most
    idle_s = IDLE_SLICE_S
    if snap.num_running:
        tokens = np.array([float(snap.num_running)])
        missed = misses_at(snap, np.array([snap.depth]), tokens)
        idle_s = float((snap.fit.step_s(tokens, missed) - snap.fit.copy_s(missed))[0])
    most = config.adjuster.goodput.bus_share * idle_s / snap.fit.expert_s
    return max(1, int(min(most, snap.num_away)))  # a bus that was measured in an instant could bring any number
