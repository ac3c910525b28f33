"""The autotuner's decisions, one after another, and what it remembers of them."""

from dataclasses import replace
from typing import Any

import pytest

from elasticmoe.operator.autotuner import (
    HISTORY,
    Entry,
    Reading,
    Signals,
    Step,
    Tuned,
    added,
    decide,
    dump_tuned,
    load_tuned,
    start,
    take,
)
from tests.fakes.kube_objects import make_spec, offload
from tests.fakes.readings import CALM, FAST, SLO, SLOW, SPEC

QUEUE = replace(CALM, waiting=5.0, layers_at_limit=3.0)
SHORT = make_spec(memory=offload(limit=16, policy="threshold"))
AT_16 = Tuned(base=16, limit=16)


def read(signals: Signals = CALM, now_s: float = 1000.0, current: int = 16) -> Reading:
    """Return a reading of a model with 32 experts a layer, where a step is 2."""
    return Reading(signals, now_s, current, 32)


# Where it starts


def test_it_starts_from_the_specs_limit() -> None:
    """A share as soon as the experts are counted; without a limit from the workers' own."""
    assert start(SPEC, None, None, "t") == AT_16
    share = make_spec(memory=offload(limit="50%"))
    assert start(share, None, None, "t") == Tuned("50%", None)
    assert start(share, Tuned("50%", None), 32, "t") == Tuned("50%", 16)
    assert start(make_spec(), None, 32, "t") == Tuned(None, None)


def test_it_goes_on_from_where_it_was() -> None:
    """Until the spec's limit is another."""
    tuned = Tuned(base=16, limit=20, direction="raise")
    assert start(SPEC, tuned, 32, "t") == tuned
    assert start(make_spec(memory=offload(limit=8)), tuned, 32, "t") == Tuned(8, 8)


def test_off_by_one_field_returns_to_the_specs_limit() -> None:
    """And decides nothing."""
    off = make_spec(memory=offload(limit=16, autotune={"enabled": False}))
    assert start(off, Tuned(base=16, limit=20), 32, "t") == AT_16
    assert decide(off, AT_16, read(QUEUE)) is None


# Decisions


def test_it_raises_while_requests_wait_and_layers_sit_at_the_limit() -> None:
    """By a sixteenth of a layer's experts."""
    step = decide(SPEC, AT_16, read(QUEUE))
    assert step == Step(18, "raise", "5 requests wait and 3 layers are at their limit")


def test_a_step_is_at_least_one_expert() -> None:
    """However few there are."""
    step = decide(make_spec(), Tuned(None, 2), Reading(QUEUE, 0.0, 2, 8))
    assert step is not None
    assert step.limit == 3


@pytest.mark.parametrize(
    "signals",
    [replace(QUEUE, waiting=0.0), replace(QUEUE, layers_at_limit=0.0), replace(QUEUE, tpot_buckets=SLOW)],
    ids=["nobody waits", "no layer is at the limit", "the SLO is broken"],
)
def test_each_of_the_three_is_needed_to_raise(signals: Signals) -> None:
    """Else more offloading helps nobody."""
    assert decide(SLO, AT_16, read(signals)) is None


def test_it_lowers_when_copies_are_exposed() -> None:
    """While nobody waits, or the SLO is broken."""
    exposed = replace(CALM, exposed_share=0.25)
    step = Step(14, "lower", "copies are exposed 25% of the time")
    assert decide(SHORT, AT_16, read(exposed)) == step
    assert decide(SLO, AT_16, read(replace(exposed, waiting=5.0, tpot_buckets=SLOW))) == step
    assert decide(SHORT, AT_16, read(replace(exposed, waiting=5.0))) is None
    assert decide(SHORT, AT_16, read(replace(exposed, exposed_share=0.1))) is None


def test_goodputs_copies_are_left_to_it_while_the_slo_is_kept() -> None:
    """It makes those that pay: without them requests would wait, or be preempted, and the limit would flap."""
    exposed = replace(CALM, exposed_share=0.9, recovery_s=99.0)
    assert decide(SPEC, AT_16, read(exposed)) is None
    assert decide(SLO, AT_16, read(replace(exposed, tpot_buckets=FAST))) is None
    assert decide(SLO, AT_16, read(replace(exposed, tpot_buckets=SLOW))) is not None


def test_it_lowers_once_for_each_slow_recovery() -> None:
    """The gauge keeps its value until the next burst."""
    slow = replace(CALM, recovery_s=40.0)
    step = decide(SHORT, AT_16, read(slow))
    assert step == Step(14, "lower", "experts took 40 s to come back after a burst")
    assert decide(SHORT, replace(AT_16, recovery_seen_s=40.0), read(slow)) is None
    assert decide(SHORT, AT_16, read(replace(slow, recovery_s=30.0))) is None


def test_it_waits_for_the_cooldown() -> None:
    """A minute if not said otherwise."""
    tuned = replace(AT_16, changed_at_s=950.0)
    assert decide(SPEC, tuned, read(QUEUE, now_s=1009.0)) is None
    assert decide(SPEC, tuned, read(QUEUE, now_s=1010.0)) is not None


def test_it_stays_within_its_bounds() -> None:
    """As numbers or as shares, and never above what there is."""
    narrow = make_spec(memory=offload(limit=16, min=15, max="53%", policy="threshold"))
    raised = decide(narrow, AT_16, read(QUEUE))
    lowered = decide(narrow, AT_16, read(replace(CALM, exposed_share=0.5)))
    assert (raised and raised.limit, lowered and lowered.limit) == (None, 15)
    assert decide(SPEC, Tuned(16, 32), read(QUEUE, current=32)) is None


@pytest.mark.parametrize(
    ("bounds", "limit"),
    [({"max": "50%"}, 16), ({"max": 20}, 20), ({"min": 30}, 30), ({"min": "25%", "max": 28}, 28)],
)
def test_edited_bounds_bind_the_limit_at_once(bounds: dict[str, Any], limit: int) -> None:
    """No signal is needed, only the number of experts; a limit within them stays."""
    tuned, spec = Tuned(base=16, limit=28), make_spec(memory=offload(limit=16, **bounds))
    assert start(spec, tuned, 32, "t").limit == limit
    assert start(spec, tuned, None, "t").limit == 28


def test_tuning_starts_within_its_bounds() -> None:
    """With tuning off they bind nobody: the limit is what the user set."""
    assert start(make_spec(memory=offload(limit=16, max=10)), None, 32, "t").limit == 10
    alone = make_spec(memory=offload(limit=16, max=10, autotune={"enabled": False}))
    assert start(alone, None, 32, "t") == Tuned(16, 16)


@pytest.mark.parametrize(
    ("bounds", "entry"),
    [
        ({"max": "25%"}, Entry("t", 28, 8, "memory.expertOffload.max is 25%, a layer has 32 experts")),
        ({"min": 30}, Entry("t", 28, 30, "memory.expertOffload.min is 30")),
    ],
)
def test_a_limit_that_bounds_moved_is_in_the_history(bounds: dict[str, Any], entry: Entry) -> None:
    """Once, with the bound as the spec has it."""
    former, spec = Tuned(base=16, limit=28), make_spec(memory=offload(limit=16, **bounds))
    moved = start(spec, former, 32, "t")
    assert moved.history == added(former, moved) == (entry,)
    assert added(moved, start(spec, moved, 32, "later")) == ()
    assert added(None, moved) == (entry,)


@pytest.mark.parametrize("fields", [{"limit": 1000}, {"min": 100}, {"min": "90%", "max": 3}])
def test_what_no_layer_has_moves_nothing(fields: dict[str, Any]) -> None:
    """Such a spec is refused as soon as its model's experts are counted."""
    spec = make_spec(memory=offload(**{"limit": 16, **fields}))
    base = fields.get("limit", 16)
    assert start(spec, None, 32, "t") == Tuned(base, base)
    assert decide(spec, Tuned(base, 16), read(QUEUE)) is None


def test_a_raise_that_bounds_cut_off_is_not_judged() -> None:
    """What it was to bring never came."""
    cut = start(make_spec(memory=offload(limit=16, max=17)), raised_to_18(), 32, "t")
    assert (cut.limit, cut.direction) == (17, None)
    assert start(SPEC, raised_to_18(), 32, "t") == raised_to_18()


def raised_to_18() -> Tuned:
    """Return what is remembered after a raise at 100 tokens/s, when the cooldown is over."""
    return take(SPEC, AT_16, decide(SPEC, AT_16, read(QUEUE, now_s=0.0)), read(QUEUE, now_s=0.0), "t0")


def test_it_takes_a_raise_back_that_brought_too_little() -> None:
    """Less than the tolerance more goodput under the queue it was made for; and it doesn't try again there."""
    step = decide(SPEC, raised_to_18(), read(replace(QUEUE, tokens_per_s=109.0), current=18))
    assert step is not None
    assert (step.limit, step.direction) == (16, "undo")
    assert step.reason == "goodput 109.0 tokens/s after the raise, 100.0 before: no gain"
    after = take(SPEC, raised_to_18(), step, read(QUEUE, current=18), "t1")
    assert decide(SPEC, after, read(QUEUE, now_s=9999.0)) is None


def test_a_raise_that_paid_is_followed_by_the_next() -> None:
    """Ten per cent more is enough."""
    step = decide(SPEC, raised_to_18(), read(replace(QUEUE, tokens_per_s=111.0), current=18))
    assert step is not None
    assert (step.limit, step.direction) == (20, "raise")


def test_a_raise_is_judged_once() -> None:
    """At the first reading after the cooldown; later falls have other reasons."""
    reading = read(replace(QUEUE, tokens_per_s=200.0, layers_at_limit=0.0), current=18)
    assert decide(SPEC, raised_to_18(), reading) is None
    judged = take(SPEC, raised_to_18(), None, reading, "t1")
    assert judged.direction is None
    assert decide(SPEC, judged, read(replace(reading.signals, tokens_per_s=10.0), current=18)) is None


def test_a_raise_is_not_judged_within_its_cooldown_or_without_a_queue() -> None:
    """There would be nothing to compare."""
    tuned = raised_to_18()
    assert take(SPEC, tuned, None, read(QUEUE, now_s=59.0), "t1").direction == "raise"
    assert decide(SPEC, tuned, read(replace(CALM, tokens_per_s=1.0), current=18)) is None


def test_after_the_queue_it_may_try_again() -> None:
    """The next queue is another one."""
    tuned = replace(AT_16, no_gain_at=16)
    assert decide(SPEC, tuned, read(QUEUE)) is None
    assert decide(SPEC, take(SPEC, tuned, None, read(CALM), "t"), read(QUEUE)) is not None


# Memory


def test_the_history_keeps_the_last_changes() -> None:
    """Each with its time, its numbers and its reason."""
    tuned = AT_16
    for n in range(HISTORY + 2):
        tuned = take(SPEC, tuned, Step(n, "raise", "why"), read(current=n - 1), f"t{n}")
    assert len(tuned.history) == HISTORY
    last = tuned.history[-1]
    assert (last.time, last.before, last.after, last.reason) == ("t11", 10, 11, "why")


@pytest.mark.parametrize("tuned", [AT_16, Tuned(None, None), replace(raised_to_18(), no_gain_at=4)])
def test_the_status_holds_all_of_it(tuned: Tuned) -> None:
    """So that a new operator goes on where the former stopped."""
    assert load_tuned({"autotuner": dump_tuned(tuned)}) == tuned


@pytest.mark.parametrize("status", [{}, {"autotuner": {}}])
def test_an_empty_status_remembers_nothing(status: dict[str, Any]) -> None:
    """Tuning starts anew."""
    assert load_tuned(status) is None
