"""Goodput: experts leave only where that is predicted to bring more tokens/s within the TPOT that was promised.

Every prediction comes from what this engine measured (step_model.py). Until it has measured, and wherever evicting
can't pay, a shortage of blocks is left to vLLM, which then does what it does without us.
"""

from dataclasses import dataclass

import numpy as np

from elasticmoe.runtime.adjuster.choose import choose_evictions, choose_loads
from elasticmoe.runtime.adjuster.forecast import forecast, missed_bytes
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.pages.changes import Plan
from elasticmoe.runtime.units import MATRICES, ceil_div

FURTHER = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Depths that are tried beyond what a shortage asks for, as shares of the way to the limit: finest where it begins."""
IDLE_SLICE_S = 0.01
"""Seconds of copies that an idle engine starts at once: what the next request may have to wait for."""


def plan(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return evictions that pay where pages are short, loads where they are spare, else nothing."""
    if snap.short_pages > 0:
        return _reclaim(snap, config)
    return _bring_back(snap, config)


def _reclaim(snap: Snapshot, config: RuntimeConfig) -> Plan:
    short = f"short of {snap.short_pages} pages"
    if snap.num_running <= 1:
        reason = f"{short} for the only request"
    elif not snap.fit.is_ready:
        return Plan(reason=f"{short}, but no step was measured yet")
    else:
        verdict = _judge(snap, config)
        reason = f"{short}: {verdict.reason}"
        if not verdict.pays:
            return Plan(reason=reason)
    chosen = choose_evictions(snap, snap.short_pages)
    if chosen is None:
        return Plan(reason=f"{short}, more than evictions can free")
    return Plan(evict=chosen, reason=reason, cause="short")


@dataclass(frozen=True, slots=True)
class _Verdict:
    pays: bool
    reason: str


def _judge(snap: Snapshot, config: RuntimeConfig) -> _Verdict:
    """Return whether covering the shortage pays: it must lie on the way to the best depth and keep the TPOT."""
    now = snap.depth
    after = now + ceil_div(snap.short_pages, MATRICES) / snap.num_layers
    room = max(0.0, min(snap.limit, snap.num_experts) - after)
    depth = np.array([now, after, *(after + room * share for share in FURTHER)])
    expected = forecast(snap, depth)
    slo_s = config.slo.tpot_ms / 1000
    rates = np.where(expected.step_s <= slo_s, expected.tokens_per_s, 0.0)
    best = int(np.argmax(rates))
    margin = 0.0 if snap.lost_tokens else config.adjuster.goodput.margin
    gains = after <= depth[best] and rates[best] >= (1 + margin) * expected.tokens_per_s[0]
    reason = (
        f"{expected.tokens_per_s[0]:.0f} tokens/s now, {rates[best]:.0f} at best with {depth[best]:.1f} of a layer's "
        f"experts away, {rates[1]:.0f} with {after:.1f} and {1000 * expected.step_s[1]:.1f} of {1000 * slo_s:.0f} ms"
    )
    return _Verdict(bool(gains and rates[1] > 0), reason)


def _bring_back(snap: Snapshot, config: RuntimeConfig) -> Plan:
    """Return the loads for which pages are spare; free ones wait for requests first, and for those that run to grow."""
    ours, thresholds = config.adjuster.goodput, config.adjuster.thresholds
    growth = ours.growth_reserve * snap.kv_pages if snap.num_running else 0
    spare = snap.free_pages - snap.waiting_pages - growth - thresholds.grow_above
    if spare < MATRICES:
        return Plan()
    loads = choose_loads(snap, min(int(spare) // MATRICES, _loads_per_step(snap, config)))
    return Plan(load=loads, reason=f"{snap.free_pages} pages free, {spare:.0f} of them spare", cause="room")


def _loads_per_step(snap: Snapshot, config: RuntimeConfig) -> int:
    """Return the experts that the bus can bring back within a step, beside those that the step itself needs."""
    if not snap.fit.is_ready:
        return config.adjuster.thresholds.grow_most
    idle_s = IDLE_SLICE_S
    if snap.num_running:
        tokens = np.array([float(snap.num_running)])
        missed = missed_bytes(snap, np.array([snap.depth]), tokens)
        idle_s = float((snap.fit.step_s(tokens, missed) - missed * snap.fit.seconds_per_byte)[0])
    seconds_each = snap.expert_bytes * snap.fit.seconds_per_byte
    return max(1, int(config.adjuster.goodput.bus_share * idle_s / seconds_each))
