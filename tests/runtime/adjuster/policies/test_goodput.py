"""Evict only while it pays: by what was measured, within the TPOT promised, and back to full residency afterwards."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from elasticmoe.runtime.adjuster.forecast import forecast
from elasticmoe.runtime.adjuster.policies.goodput import IDLE_SLICE_S, plan
from elasticmoe.runtime.adjuster.prompt_budget import SHARE
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.adjuster.step_model import INSTANT_S, StepFit
from elasticmoe.runtime.contract.config import AdjusterConfig, Goodput, RuntimeConfig, Slo
from elasticmoe.runtime.expert_load import log_spared
from elasticmoe.runtime.pages.table import OFFLOADED
from tests.fakes.snapshots import make_snapshot, offloaded_tail

LAYERS, EXPERTS, TOP_K = 16, 64, 4
EXPERT_BYTES = 9_437_184
BUS = 55e9
FIT = StepFit(
    num_steps=500,
    terms=(5e-3, 6e-3, 2e-5),
    mean_spared=math.log(1 - TOP_K / EXPERTS),
    num_layers=LAYERS,
    expert_s=EXPERT_BYTES / BUS,
    overlap=0.8,
    prompts_per_token=1 / 200,
    prompt_tokens=170.0,
)
"""An engine on which an expert takes 0.17 ms to fetch and a step of 30 requests 11 ms."""
DEFAULTS = RuntimeConfig(policy="goodput")
SKEW = (np.arange(EXPERTS, 0, -1) ** -1.5)[::-1]
FLAT = np.ones(EXPERTS)


def busy(shares: np.ndarray = SKEW, depth: int = 0, **changes: Any) -> Snapshot:  # noqa: ANN401 -- any field
    """Return 30 running requests of 9 pages each, as many waiting, all pages in use, one more page needed.

    `shares` are the experts' loads, hottest first; each layer has `depth` experts away, one layer one more.
    """
    ranking = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    shares = np.sort(shares)[::-1] / shares.sum()
    fields: dict[str, Any] = {
        "probability": np.tile(shares, (LAYERS, 1)),
        "coldest_spared": log_spared(TOP_K * shares[::-1]),
        "ranking": ranking,
        "top_k": TOP_K,
        "fit": FIT,
        "free_pages": 0,
        "kv_pages": 270.0,
        "num_running": 30,
        "num_waiting": 30,
        "waiting_pages": 200,
        "short_pages": 1,
        "limit": 20,
        "loading_depth": 2,
    }
    return make_snapshot(offloaded_tail(*[depth] * (LAYERS - 1), depth + 1, num_experts=EXPERTS), **(fields | changes))


def lent(shares: np.ndarray, depth: int, bus: float = BUS / 2) -> Snapshot:
    """Return that engine, on a slower bus, once each layer has lent `depth` experts' pages to requests; many wait."""
    num_running = 30 + depth * (LAYERS - 2) * 3 // 9
    return busy(shares, depth, num_running=num_running, kv_pages=9.0 * num_running, num_waiting=99, fit=slower(bus))


def slower(bus: float) -> StepFit:
    """Return the same engine on a bus of so many bytes a second."""
    return replace(FIT, expert_s=EXPERT_BYTES / bus)


# Short of pages


def test_with_a_queue_and_cheap_misses_experts_go() -> None:
    """Half the requests wait and the coldest experts are hardly ever routed to: eviction lets more run."""
    assert plan(busy(), DEFAULTS).evict


def test_on_a_slow_bus_nothing_goes() -> None:
    """The same engine on a hundredth of the bandwidth would wait for its misses, longer than its queue costs."""
    assert not plan(busy(FLAT, fit=slower(BUS / 100)), DEFAULTS)


@pytest.mark.parametrize(("running", "pays"), [(4, True), (100, False)])
def test_under_flat_routing_it_pays_for_small_batches_only(running: int, pays: bool) -> None:  # noqa: FBT001
    """Every expert is routed to in a large batch, whose requests gain little from a few pages more."""
    snap = busy(FLAT, num_running=running, num_waiting=200, kv_pages=9.0 * running, fit=slower(BUS / 8))
    assert bool(plan(snap, DEFAULTS)) == pays


def test_the_colder_the_tail_the_further_it_pays() -> None:
    """Going one expert at a time, the policy stops deeper where the tail is colder."""
    reached = []
    for shares in (FLAT, SKEW):
        depths = [d for d in range(20) if plan(lent(shares, d), DEFAULTS)]
        reached.append(len(depths))
        assert depths == list(range(len(depths))), "it pays up to a depth, and not beyond"
    assert reached[0] < reached[1]


def test_nobody_starts_who_breaks_the_tpot_promised() -> None:
    """Where a step would take longer than the SLO allows, the gain in tokens/s counts for nothing."""
    assert plan(busy(), RuntimeConfig(slo=Slo(tpot_ms=30))).evict
    assert not plan(busy(), RuntimeConfig(slo=Slo(tpot_ms=10)))


def test_who_runs_gets_its_pages_where_no_depth_keeps_the_tpot() -> None:
    """It would be preempted for nothing; where some depth keeps it, the promise holds for it too."""
    assert plan(busy(lost_tokens=300), RuntimeConfig(slo=Slo(tpot_ms=1))).evict
    assert not plan(busy(lost_tokens=300, depth=8), RuntimeConfig(slo=Slo(tpot_ms=10.5)))


def test_who_runs_has_all_of_the_tpot() -> None:
    """Steps of 10.8 of 12 ms, 5.4 with nobody away: who waits has a share of them, since those that run will grow."""
    near = RuntimeConfig(slo=Slo(tpot_ms=12))
    assert not plan(busy(depth=8, fit=replace(FIT, prompts_per_token=0.0)), near)
    assert plan(busy(depth=8, lost_tokens=300), near).evict


def test_who_runs_takes_no_experts_far_beyond_the_best_depth() -> None:
    """Else a lasting overload would evict until nothing of the gain is left."""
    reached = [
        len([d for d in range(20) if plan(replace(lent(FLAT, d, BUS), lost_tokens=300), config).evict])
        for config in (DEFAULTS, RuntimeConfig(adjuster=AdjusterConfig(goodput=Goodput(slack=0.9))))
    ]
    assert 0 < reached[0] < reached[1]


def test_no_eviction_goes_past_the_depth_that_the_slo_allows() -> None:
    """The deeper, the longer a step: at some depth the SLO ends what throughput alone would go on with."""
    bound = RuntimeConfig(slo=Slo(tpot_ms=13 / SHARE))
    depths = [d for d in range(19) if plan(busy(depth=d, num_waiting=200), bound)]
    assert 0 < len(depths) < len([d for d in range(19) if plan(busy(depth=d, num_waiting=200), DEFAULTS)])


def test_a_prompt_that_would_make_who_runs_late_waits() -> None:
    """The step that would compute it has only so long; where it fits it starts. Who runs answers for no prompt."""
    snap = busy(prompt_tokens=4000)
    step_s = FIT.compute_alone_s(snap.num_running + 4000)
    assert plan(replace(snap, step_budget_s=1.1 * step_s), DEFAULTS).evict
    late = replace(snap, step_budget_s=0.5 * step_s)
    refused = plan(late, DEFAULTS)
    assert not refused
    assert f"in a step of {1000 * step_s:.0f} ms that may take {500 * step_s:.0f}" in str(refused.reason)
    assert plan(replace(late, lost_tokens=300), DEFAULTS).evict


def test_who_waits_is_held_to_the_mean_step_and_who_runs_to_one_without_prompts() -> None:
    """Every third step computes a prompt: 29 ms on average are too much for 25 ms, though decoding takes less.

    So they are for who waits where 40 ms are promised: of those it gets 28, since who runs will hold more KV; all of
    them where its first token is in danger.
    """
    fit = replace(FIT, prompts_per_token=1 / 100, prompt_tokens=3000.0)
    strict, near, loose = (RuntimeConfig(slo=Slo(tpot_ms=ms)) for ms in (25, 40, 60))
    snap = busy(fit=fit)
    assert not plan(snap, strict)
    assert not plan(snap, near)
    assert plan(replace(snap, waited_s=4.0), RuntimeConfig(slo=Slo(tpot_ms=40, ttft_ms=5000))).evict
    assert plan(snap, loose).evict
    assert plan(replace(snap, lost_tokens=300), strict).evict


def test_prompts_that_hide_copies_let_nobody_start_deeper() -> None:
    """A queue gets pages up to the depth that is best while no prompt is computed, however long prompts are."""

    def reached(fit: StepFit, lost_tokens: int = 0) -> list[int]:
        shorts = {d: replace(lent(FLAT, d, BUS), fit=fit, lost_tokens=lost_tokens) for d in range(20)}
        return [d for d, snap in shorts.items() if plan(snap, config).evict]

    config = RuntimeConfig(policy="goodput", adjuster=AdjusterConfig(goodput=Goodput(slack=0.9)))
    prompts = replace(FIT, prompts_per_token=1 / 100, prompt_tokens=1000.0)
    without = reached(replace(FIT, prompts_per_token=0.0))
    assert 0 < len(without) < 10
    assert reached(prompts) == without
    assert len(reached(prompts, lost_tokens=300)) > len(without), "who runs is not held to it"
    refused = plan(replace(lent(FLAT, without[-1] + 1, BUS), fit=prompts), config)
    assert str(refused.reason).endswith("fewer while no prompt is computed")


def test_a_running_request_gets_pages_deeper_than_a_waiting_one() -> None:
    """And deeper than is best, but not on without end."""

    def reached(lost_tokens: int) -> int:
        return len([d for d in range(20) if plan(replace(lent(FLAT, d, BUS), lost_tokens=lost_tokens), DEFAULTS)])

    assert 0 < reached(0) < reached(300) < 19


HASTY = RuntimeConfig(policy="goodput", slo=Slo(ttft_ms=5000))


def reached(config: RuntimeConfig, **changes: Any) -> int:  # noqa: ANN401 -- any field
    """Return how many depths in a row, from 0 on, a request gets pages at."""
    depths = [d for d in range(20) if plan(replace(lent(FLAT, d, BUS), **changes), config).evict]
    assert depths == list(range(len(depths)))
    return len(depths)


def test_who_has_waited_half_of_what_was_promised_gets_pages_beyond_the_best_depth() -> None:
    """Not before, nor once it is late; where no time to the first token is promised, never."""
    usual = reached(DEFAULTS)
    assert 0 < usual < reached(HASTY, waited_s=2.5) == reached(HASTY, waited_s=5.0) < 20
    assert [reached(HASTY, waited_s=s) for s in (0.0, 2.49, 5.01)] == [usual] * 3
    assert [reached(DEFAULTS, waited_s=s) for s in (2.5, 5.0, 1e6)] == [usual] * 3
    assert reached(RuntimeConfig(policy="goodput", slo=Slo(ttft_ms=2000)), waited_s=2.5) == usual


def test_who_runs_keeps_its_pages_until_a_first_token_is_late() -> None:
    """Else those that started beyond the best depth would be preempted as they grow."""
    usual = reached(DEFAULTS, lost_tokens=300)
    assert usual < reached(HASTY, lost_tokens=300) == reached(HASTY, lost_tokens=300, waited_s=5.0)
    assert reached(HASTY, lost_tokens=300, waited_s=5.01) == usual
    assert reached(DEFAULTS, lost_tokens=300, waited_s=4.0) == usual


@pytest.mark.parametrize("prompts_per_token", [0.0, 1 / 100])
def test_for_a_first_token_no_more_is_given_up_than_there_is_to_gain(prompts_per_token: float) -> None:
    """At each depth that a hurried request gets pages at tokens/s are predicted above those with nobody away.

    With prompts as they come and without any, though prompts would hide the copies of more experts.
    """
    fit = replace(FIT, prompts_per_token=prompts_per_token, prompt_tokens=1000.0)
    for lost_tokens in (0, 300):
        some = False
        for depth in range(20):
            snap = replace(lent(FLAT, depth, BUS), fit=fit, waited_s=4.0, lost_tokens=lost_tokens)
            if plan(snap, HASTY).evict:
                some = True
                expected = forecast(snap, np.array([0.0, snap.depth + 1 / LAYERS]))
                rates, decoded = expected.tokens_per_s, expected.decoded_per_s
                assert rates[1] >= rates[0]
                assert lost_tokens or decoded[1] >= decoded[0]
        assert some
    refused = plan(replace(lent(FLAT, 19, BUS), waited_s=4.0), HASTY)
    assert not refused
    assert "to keep first tokens within 5.0 s" in str(refused.reason)


def test_a_hurried_request_makes_nobody_late() -> None:
    """The TPOT and what a step may take bind it like any other."""
    snap = replace(lent(FLAT, reached(DEFAULTS), BUS), waited_s=4.0)
    assert plan(snap, HASTY).evict
    assert not plan(snap, RuntimeConfig(policy="goodput", slo=Slo(ttft_ms=5000, tpot_ms=10)))
    assert not plan(replace(snap, prompt_tokens=4000, step_budget_s=0.01), HASTY)


def test_before_anything_was_measured_nothing_goes() -> None:
    """Without a model there is no prediction that it pays."""
    chosen = plan(busy(fit=StepFit()), DEFAULTS)
    assert (chosen.evict, chosen.reason) == ((), "short of 1 pages, but no step was measured yet")


@pytest.mark.parametrize(("running", "lost"), [(0, 0), (1, 300)])
def test_the_only_request_always_gets_its_pages(running: int, lost: int) -> None:
    """It could never run otherwise: refusing would preempt it for ever."""
    snap = busy(FLAT, num_running=running, lost_tokens=lost, kv_pages=9.0, fit=slower(1e6))
    assert plan(snap, DEFAULTS).evict
    assert plan(replace(snap, fit=StepFit()), DEFAULTS).evict


def test_who_waits_beside_the_only_one_that_runs_gets_pages_if_it_pays() -> None:
    """It can start when the other has ended."""
    second: dict[str, Any] = {"num_running": 1, "kv_pages": 9.0, "short_pages": 9}
    assert plan(busy(**second), DEFAULTS).evict
    refused = plan(busy(FLAT, **second, fit=slower(1e6)), DEFAULTS)
    assert not refused
    assert "tokens/s" in str(refused.reason)


def test_a_shortage_that_no_evictions_cover_evicts_nobody() -> None:
    """As with every policy: all that is needed, or nothing."""
    assert not plan(busy(short_pages=10**6), DEFAULTS)


def test_a_gain_below_the_margin_is_not_worth_it_but_a_running_request_is() -> None:
    """With a margin that no gain reaches a waiting request waits on; one that would be preempted gets its pages."""
    picky = RuntimeConfig(policy="goodput", adjuster=AdjusterConfig(goodput=Goodput(margin=9.0)))
    assert not plan(busy(), picky)
    assert plan(busy(lost_tokens=300), picky).evict


def test_without_a_queue_only_what_runs_counts() -> None:
    """Nobody waits: one running request short of a page still gains its share, on a fast bus only."""
    running: dict[str, Any] = {"num_waiting": 0, "waiting_pages": 0, "lost_tokens": 300, "short_pages": 6}
    assert plan(busy(**running), DEFAULTS).evict
    assert not plan(busy(FLAT, **running, fit=slower(BUS / 1000)), DEFAULTS)


def test_the_reason_names_the_prediction() -> None:
    """Tokens/s without evictions, at best and with this one, and the milliseconds of a step against the SLO."""
    reason = str(plan(busy(), DEFAULTS).reason)
    assert reason.startswith("short of 1 pages: ")
    for words in ("tokens/s with nobody away", "at best", "experts away", "of 100 ms"):
        assert words in reason


# Room


def calm(depth: int, **changes: Any) -> Snapshot:  # noqa: ANN401 -- any field
    """Return two running requests after a burst: nobody waits, pages are free."""
    fields = {"num_running": 2, "kv_pages": 18.0, "num_waiting": 0, "waiting_pages": 0, "short_pages": 0}
    return busy(SKEW, depth, **({"free_pages": 400} | fields | changes))


def test_after_a_burst_experts_come_back_as_fast_as_the_bus_allows() -> None:
    """At least half of what the bus could carry in a step, and no more than it could."""
    snap = calm(10)
    num = len(plan(snap, DEFAULTS).load)
    step_s = float(FIT.compute_s(np.array([2.0]))[0])
    assert 0.5 * step_s < num * EXPERT_BYTES / BUS < 1.0 * step_s


def test_an_idle_engine_brings_back_what_a_request_can_wait_for() -> None:
    """With nothing running a step is as long as its copies: a slice of time's worth."""
    num = len(plan(calm(10, num_running=0, kv_pages=0.0), DEFAULTS).load)
    assert num == int(0.75 * IDLE_SLICE_S * BUS / EXPERT_BYTES)


def test_on_a_bus_that_misses_fill_one_expert_still_comes_back() -> None:
    """Growth slows to a crawl, but never stops."""
    snap = calm(15, fit=replace(FIT, expert_s=1e-6 * EXPERT_BYTES, overlap=1.0))
    assert len(plan(snap, DEFAULTS).load) == 1


def test_a_copy_measured_in_an_instant_brings_back_all_that_fits() -> None:
    """A bus that could bring any number of experts in the time there is brings those that are away."""
    snap = calm(10, num_running=0, kv_pages=0.0, fit=replace(FIT, expert_s=INSTANT_S))
    assert len(plan(snap, DEFAULTS).load) == int(min((400 - 9) // 3, snap.num_offloaded.sum()))


def test_before_anything_was_measured_growth_is_the_threshold_policys() -> None:
    """Without a bandwidth: grow_most a step."""
    assert len(plan(calm(10, fit=StepFit()), DEFAULTS).load) == DEFAULTS.adjuster.thresholds.grow_most


def test_free_pages_wait_for_requests_first() -> None:
    """Pages that waiting requests will need bring nobody back, nor does the headroom for who runs."""
    assert not plan(calm(10, free_pages=200, num_waiting=20, waiting_pages=190), DEFAULTS)
    assert not plan(calm(10, free_pages=11, num_running=30, kv_pages=270.0), DEFAULTS)
    assert len(plan(calm(10, free_pages=12, num_running=30, kv_pages=270.0), DEFAULTS).load) == 1


def crowded(bus: float) -> Snapshot:
    """Return 60 running requests and a queue with six experts of each layer away under flat routing, 12 pages free."""
    running = {"num_running": 60, "kv_pages": 540.0, "num_waiting": 60, "waiting_pages": 400}
    return busy(FLAT, 6, **running, short_pages=0, free_pages=12, fit=replace(slower(bus), overlap=0.0))


def test_where_too_many_experts_are_away_they_come_back_before_the_queue_is_served() -> None:
    """Misses cost more than the requests they made room for bring in: free pages are the experts' then."""
    assert len(plan(crowded(BUS / 10), DEFAULTS).load) == 4
    assert not plan(crowded(20 * BUS), DEFAULTS), "where it pays, free pages wait for the queue"


def test_experts_come_back_as_soon_as_nobody_away_would_bring_more_while_a_queue_waits() -> None:
    """Here by 1 %; without a queue so small a loss is left alone, since pages come free with the next answers."""
    snap = replace(crowded(1.9 * BUS), free_pages=11)
    assert len(plan(snap, DEFAULTS).load) == 3
    assert not plan(replace(snap, num_waiting=0, waiting_pages=0), DEFAULTS)


def test_experts_come_back_before_the_queue_where_the_tpot_is_broken() -> None:
    """Tokens/s that break the promise count for nothing."""
    strict = RuntimeConfig(policy="goodput", slo=Slo(tpot_ms=12))
    assert plan(crowded(20 * BUS), strict).load


def test_experts_come_back_before_the_queue_where_its_next_prompt_would_make_who_runs_late() -> None:
    """Free pages are theirs as long as the step that would compute it may not last so long; nobody waits, nobody is."""
    snap = crowded(20 * BUS)
    step_s = FIT.compute_alone_s(60 + FIT.prompt_tokens)
    assert not plan(replace(snap, step_budget_s=1.01 * step_s), DEFAULTS)
    assert len(plan(replace(snap, step_budget_s=0.99 * step_s), DEFAULTS).load) == 4
    alone = replace(snap, step_budget_s=0.0, num_waiting=0, waiting_pages=0, free_pages=11)
    assert not plan(alone, DEFAULTS)


def test_experts_stay_away_for_a_hurried_request_while_more_come_out_than_with_nobody_away() -> None:
    """What left for a first token is not brought back at the next step; where nobody away would bring more, it is."""
    deep: dict[str, Any] = {"short_pages": 0, "free_pages": 12, "waited_s": 4.0}
    snap = replace(lent(FLAT, reached(HASTY, waited_s=4.0) - 1, BUS), **deep)
    assert plan(snap, DEFAULTS).load
    assert plan(replace(snap, waited_s=5.01), HASTY).load
    assert not plan(snap, HASTY)
    assert plan(replace(crowded(BUS / 10), waited_s=4.0), HASTY).load


def test_beyond_the_best_depth_an_eviction_must_cost_little() -> None:
    """Fewer wait if more run: with slack it goes deeper, and the deeper, the more it may cost.

    Here a prompt touches experts that no answer does, and hides none: with more of them the mean step is longer.
    """
    fit = replace(FIT, terms=(5e-3, 6e-3, 1e-6), prompts_per_token=1 / 100, prompt_tokens=1000.0)

    def reached(slack: float) -> int:
        config = RuntimeConfig(policy="goodput", adjuster=AdjusterConfig(goodput=Goodput(slack=slack)))
        return len([d for d in range(20) if plan(replace(lent(SKEW, d, BUS), fit=fit), config)])

    assert 0 < reached(0.0) < reached(0.05) < reached(0.2) < 20


@pytest.mark.parametrize("free", range(12))
def test_a_gap_keeps_still(free: int) -> None:
    """An expert comes back only where its pages leave the threshold policy's headroom free."""
    assert not plan(calm(10, free_pages=free, num_running=0, kv_pages=0.0), DEFAULTS)


def test_with_everything_resident_nothing_moves() -> None:
    """However much is free."""
    snap = calm(0, free_pages=1000)
    assert not plan(replace(snap, state=np.where(snap.state == OFFLOADED, 2, snap.state)), DEFAULTS)
