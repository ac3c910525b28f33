"""Moves the offload limit while serving: two readings of the workers' metrics → signals → a new limit, and why.

The limit bounds what the runtime's own policy may do, so a step changes little at once and is easily taken back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from elasticmoe.operator.observed import PodSample
from elasticmoe.operator.spec.fields import resolve_limit
from elasticmoe.operator.spec.limits import bounds, find_misfit
from elasticmoe.operator.spec.model import ElasticMoESpec, ExpertOffload
from elasticmoe.operator.spec.quantity import parse_duration

EXPOSED_SHARE: Final = 0.1
"""Share of the time in which compute waits for copies, from which the limit is too high."""
SLOW_RECOVERY_S: Final = 30.0
"""Seconds for experts to come back after a burst, from which the limit is too high."""
STEPS: Final = 16
"""A step is this part of a layer's experts, at least one."""
HISTORY: Final = 10

Direction = Literal["raise", "lower", "undo"]


@dataclass(frozen=True, slots=True)
class Signals:
    """What all workers together did between two readings."""

    waiting: float
    layers_at_limit: float
    tokens_per_s: float
    exposed_share: float
    """Of the worker that waited longest."""
    recovery_s: float
    tpot_buckets: Mapping[float, float]
    """Cumulative counts by upper bound in seconds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of the limit."""

    time: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the autotuner remembers between passes; it lives in the resource's status."""

    base: int | str | None
    """spec.memory.expertOffload.limit when tuning started; another value starts it anew."""
    limit: int | None
    changed_at_s: float | None = None
    direction: Direction | None = None
    goodput_before: float = 0.0
    no_gain_at: int | None = None
    """The limit from which a raise brought nothing, while the queue it was made for lasts."""
    recovery_seen_s: float = 0.0
    history: tuple[Entry, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Step:
    """A decision: where to, and why."""

    limit: int
    direction: Direction
    reason: str


def measure(before: Mapping[str, PodSample], after: Mapping[str, PodSample]) -> Signals | None:
    """Return the signals between two readings of the same workers; None if a worker came, went or started anew."""
    if not after or before.keys() != after.keys():
        return None
    pairs = [(before[name], after[name]) for name in after]
    if any(b.at_s <= a.at_s or b.generated_tokens < a.generated_tokens for a, b in pairs):
        return None
    bounds = sorted({bound for _, b in pairs for bound in b.tpot_buckets})
    return Signals(
        waiting=sum(b.waiting for _, b in pairs),
        layers_at_limit=max(b.layers_at_limit for _, b in pairs),
        tokens_per_s=sum((b.generated_tokens - a.generated_tokens) / (b.at_s - a.at_s) for a, b in pairs),
        exposed_share=max((b.exposed_s - a.exposed_s) / (b.at_s - a.at_s) for a, b in pairs),
        recovery_s=max(b.recovery_s for _, b in pairs),
        tpot_buckets={
            x: sum(b.tpot_buckets.get(x, 0.0) - a.tpot_buckets.get(x, 0.0) for a, b in pairs) for x in bounds
        },
    )


def share_within(buckets: Mapping[float, float], bound_s: float) -> float:
    """Return the share of a histogram's values up to a bound, taken at the next bucket's edge; 1 if it has none."""
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return 1.0
    edge = min((edge for edge in buckets if edge >= bound_s), default=max(buckets))
    return buckets[edge] / total


def goodput(signals: Signals, spec: ElasticMoESpec) -> float:
    """Return tokens a second that keep the SLO of time per output token; without an SLO all do."""
    slo_ms = spec.slo.tpot_milliseconds
    share = 1.0 if slo_ms is None else share_within(signals.tpot_buckets, slo_ms / 1000)
    return signals.tokens_per_s * share


def keeps_slo(signals: Signals, spec: ElasticMoESpec) -> bool:
    """Return whether nine of ten requests keep the SLO of time per output token, or there is none."""
    slo_ms = spec.slo.tpot_milliseconds
    return slo_ms is None or share_within(signals.tpot_buckets, slo_ms / 1000) >= 0.9  # noqa: PLR2004 -- as above


def start(spec: ElasticMoESpec, previous: Tuned | None, num_experts: int | None, now: str) -> Tuned:
    """Return where tuning stands: as it was, or anew if the spec's limit is another or tuning is off.

    Within the bounds as they are now; they bind the autotuner alone, so with tuning off the spec's limit is the limit.
    `now` is the time as the status says it, for the entry of a limit that bounds moved.
    """
    offload = spec.memory.expert_offload
    anew = Tuned(offload.limit, _base(offload, num_experts))
    if not offload.autotune.enabled:
        return anew
    if previous is None or previous.base != offload.limit:
        return _within(offload, anew, num_experts, now)
    limit = previous.limit if previous.limit is not None else anew.limit
    return _within(offload, replace(previous, limit=limit), num_experts, now)


def _within(offload: ExpertOffload, tuned: Tuned, num_experts: int | None, now: str) -> Tuned:
    """Return a limit that bounds moved as a fresh start: there is no raise left to judge."""
    if tuned.limit is None or num_experts is None or find_misfit(offload, num_experts):
        return tuned
    limit = _bounded(offload, tuned.limit, num_experts)
    if limit == tuned.limit:
        return tuned
    entry = Entry(now, tuned.limit, limit, _binding(offload, num_experts, is_raised=limit > tuned.limit))
    return replace(tuned, limit=limit, direction=None, history=_remember(tuned, entry))


def _binding(offload: ExpertOffload, num_experts: int, *, is_raised: bool) -> str:
    """Return the bound that moved a limit, in words."""
    if is_raised:
        return f"memory.expertOffload.min is {offload.min}"
    return f"memory.expertOffload.max is {offload.max}, a layer has {num_experts} experts"


def _remember(tuned: Tuned, entry: Entry) -> tuple[Entry, ...]:
    return (*tuned.history, entry)[-HISTORY:]


def added(former: Tuned | None, tuned: Tuned) -> tuple[Entry, ...]:
    """Return the changes that the history did not have before."""
    known = () if former is None else former.history
    return tuple(entry for entry in tuned.history if entry not in known)


def _base(offload: ExpertOffload, num_experts: int | None) -> int | None:
    return None if offload.limit is None else resolve_limit(offload.limit, num_experts)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a decision is made from, beside what is remembered."""

    signals: Signals
    now_s: float
    current: int
    """The limit that workers work with."""
    num_experts: int


def decide(spec: ElasticMoESpec, tuned: Tuned, reading: Reading) -> Step | None:
    """Return the next step of the limit, or None to leave it; never out of bounds, never within the cooldown."""
    autotune = spec.memory.expert_offload.autotune
    if not autotune.enabled or find_misfit(spec.memory.expert_offload, reading.num_experts):
        return None
    if _is_cooling(tuned, parse_duration(autotune.cooldown), reading.now_s):
        return None
    step = _undo(spec, tuned, reading) or _raise(spec, tuned, reading) or _lower(spec, tuned, reading)
    if step is None:
        return None
    limit = _bounded(spec.memory.expert_offload, step.limit, reading.num_experts)
    return None if limit == reading.current else replace(step, limit=limit)


def _is_cooling(tuned: Tuned, cooldown_s: int, now_s: float) -> bool:
    return tuned.changed_at_s is not None and now_s - tuned.changed_at_s < cooldown_s


def _bounded(offload: ExpertOffload, limit: int, num_experts: int) -> int:
    least, most = bounds(offload, num_experts)
    return max(least, min(most, limit))


def _size(num_experts: int) -> int:
    return max(1, num_experts // STEPS)


def _undo(spec: ElasticMoESpec, tuned: Tuned, reading: Reading) -> Step | None:
    """Take a raise back that, under the queue it was made for, brought less than the tolerance."""
    if tuned.direction != "raise" or reading.signals.waiting == 0:
        return None
    now = goodput(reading.signals, spec)
    need = tuned.goodput_before * (1 + spec.memory.expert_offload.autotune.tolerance_percent / 100)
    if now >= need:
        return None
    reason = f"goodput {now:.1f} tokens/s after the raise, {tuned.goodput_before:.1f} before: no gain"
    return Step(tuned.history[-1].before, "undo", reason)


def _raise(spec: ElasticMoESpec, tuned: Tuned, reading: Reading) -> Step | None:
    signals = reading.signals
    is_wanted = signals.waiting > 0 and signals.layers_at_limit > 0 and keeps_slo(signals, spec)
    if not is_wanted or tuned.no_gain_at == reading.current:
        return None
    reason = f"{signals.waiting:.0f} requests wait and {signals.layers_at_limit:.0f} layers are at their limit"
    return Step(reading.current + _size(reading.num_experts), "raise", reason)


def _lower(spec: ElasticMoESpec, tuned: Tuned, reading: Reading) -> Step | None:
    """Step down where copies do harm; goodput itself makes only those that pay, so only a broken SLO tells of harm."""
    signals, lower = reading.signals, reading.current - _size(reading.num_experts)
    is_left_alone = spec.memory.expert_offload.policy == "goodput"
    may_lower = not keeps_slo(signals, spec) or (signals.waiting == 0 and not is_left_alone)
    if may_lower and signals.exposed_share > EXPOSED_SHARE:
        return Step(lower, "lower", f"copies are exposed {signals.exposed_share:.0%} of the time")
    if may_lower and signals.recovery_s > SLOW_RECOVERY_S and signals.recovery_s != tuned.recovery_seen_s:
        return Step(lower, "lower", f"experts took {signals.recovery_s:.0f} s to come back after a burst")
    return None


def take(spec: ElasticMoESpec, tuned: Tuned, step: Step | None, reading: Reading, now: str) -> Tuned:
    """Return what is remembered after a decision; `now` is the time as the status says it.

    A step is judged once, at the first reading after its cooldown.
    """
    if reading.signals.waiting == 0:
        tuned = replace(tuned, no_gain_at=None)
    if step is None:
        cooldown_s = parse_duration(spec.memory.expert_offload.autotune.cooldown)
        return tuned if _is_cooling(tuned, cooldown_s, reading.now_s) else replace(tuned, direction=None)
    entry = Entry(now, reading.current, step.limit, step.reason)
    return replace(
        tuned,
        limit=step.limit,
        changed_at_s=reading.now_s,
        direction=step.direction,
        goodput_before=goodput(reading.signals, spec),
        no_gain_at=step.limit if step.direction == "undo" else tuned.no_gain_at,
        recovery_seen_s=reading.signals.recovery_s,
        history=_remember(tuned, entry),
    )


def dump_tuned(tuned: Tuned) -> dict[str, Any]:
    """Return what is remembered as the status holds it."""
    plain = {
        "base": tuned.base,
        "limit": tuned.limit,
        "changedAtSeconds": tuned.changed_at_s,
        "direction": tuned.direction,
        "goodputBefore": round(tuned.goodput_before, 3),
        "noGainAt": tuned.no_gain_at,
        "recoverySeenSeconds": round(tuned.recovery_seen_s, 3),
        "history": [{"time": e.time, "from": e.before, "to": e.after, "reason": e.reason} for e in tuned.history],
    }
    return {key: value for key, value in plain.items() if value is not None}


def load_tuned(status: Mapping[str, Any]) -> Tuned | None:
    """Return what a status remembers, None if it remembers nothing."""
    kept = status.get("autotuner")
    if not kept:
        return None
    return Tuned(
        base=kept.get("base"),
        limit=kept.get("limit"),
        changed_at_s=kept.get("changedAtSeconds"),
        direction=kept.get("direction"),
        goodput_before=kept.get("goodputBefore", 0.0),
        no_gain_at=kept.get("noGainAt"),
        recovery_seen_s=kept.get("recoverySeenSeconds", 0.0),
        history=tuple(Entry(e["time"], e["from"], e["to"], e["reason"]) for e in kept.get("history", ())),
    )
