"""Rimuru's numbers."""

import pytest

from elasticmoe.runtime.adjuster.policies.threshold import plan
from elasticmoe.runtime.contract.config import AdjusterConfig, RuntimeConfig, Thresholds
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.snapshots import make_snapshot, offloaded_tail

ROOMY = offloaded_tail(0, 0, 8, 8)  # both buffers are as deep as can be, so each eviction frees 3 pages net
DEFAULTS = RuntimeConfig()


@pytest.mark.parametrize(("short", "experts"), [(1, 1), (2, 1), (3, 2), (5, 2), (6, 3), (8, 3), (9, 4)])
def test_short_of_pages(short: int, experts: int) -> None:
    """Short of R_b pages: ceil((R_b + 1) / 3) experts go; 8 pages take 3 experts."""
    chosen = plan(make_snapshot(ROOMY, short_pages=short), DEFAULTS)
    assert (len(chosen.evict), chosen.load) == (experts, ())
    assert chosen.reason == f"short of {short} pages"


def test_where_the_spare_page_is_not_to_be_had_the_need_alone_is_covered() -> None:
    """R_b = 3 would take 2 experts; if only one may leave, it is enough."""
    snap = make_snapshot(offloaded_tail(7, 8, 8, 8), short_pages=3)
    assert plan(snap, DEFAULTS).evict == (ExpertKey(0, 0),)


def test_nothing_goes_if_all_that_may_go_would_not_do() -> None:
    """Evict nothing when even all evictable pages can't cover R_b."""
    assert not plan(make_snapshot(offloaded_tail(7, 8, 8, 8), short_pages=4), DEFAULTS)


@pytest.mark.parametrize("free", [0, 1])
def test_one_expert_goes_when_pages_run_low(free: int) -> None:
    """F_b < 2 evicts one expert as a precaution."""
    chosen = plan(make_snapshot(ROOMY, free_pages=free), DEFAULTS)
    assert chosen.evict == (ExpertKey(0, 7),)
    assert chosen.reason == f"{free} pages free, below 2"


def test_no_precaution_while_idle() -> None:
    """With no request running, low free pages evict nothing."""
    assert not plan(make_snapshot(ROOMY, free_pages=0, num_running=0), DEFAULTS)


def test_no_precaution_that_frees_nothing() -> None:
    """Where an eviction only pays for its own slot, none is made."""
    assert not plan(make_snapshot(offloaded_tail(1, 1), free_pages=0), DEFAULTS)


@pytest.mark.parametrize(("free", "loads"), [(11, 0), (12, 1), (14, 1), (15, 2), (20, 3), (24, 5), (100, 5)])
def test_room_brings_experts_back(free: int, loads: int) -> None:
    """F_b > 9 loads min(5, floor((F_b - 9) / 3)) experts; 20 free pages load 3."""
    chosen = plan(make_snapshot(ROOMY, free_pages=free), DEFAULTS)
    assert (len(chosen.load), chosen.evict) == (loads, ())


@pytest.mark.parametrize("free", range(2, 12))
def test_the_gap_keeps_still(free: int) -> None:
    """Between the two thresholds, and up to one expert's pages above the upper one, nothing moves."""
    assert not plan(make_snapshot(ROOMY, free_pages=free), DEFAULTS)


def test_what_waiting_requests_need_is_not_given_to_experts() -> None:
    """Of 20 free pages 6 are waited for: one expert comes back, not three."""
    assert len(plan(make_snapshot(ROOMY, free_pages=20, waiting_pages=6), DEFAULTS).load) == 1


def test_the_numbers_are_config() -> None:
    """Other thresholds, other plans."""
    thresholds = Thresholds(evict_below=4, grow_above=4, grow_most=1)
    config = RuntimeConfig(adjuster=AdjusterConfig(thresholds=thresholds))
    assert plan(make_snapshot(ROOMY, free_pages=3), config).evict
    assert len(plan(make_snapshot(ROOMY, free_pages=10), config).load) == 1


def test_a_layer_above_a_lowered_limit_only_loads() -> None:
    """Layers 2 and 3 hold 8 of at most 4: short of pages, only layers 0 and 1 give; with room, they come first."""
    short = plan(make_snapshot(ROOMY, limit=4, short_pages=20), DEFAULTS)
    assert {key.layer for key in short.evict} == {0, 1}
    state = offloaded_tail(3, 3, 8, 8)
    assert {key.layer for key in plan(make_snapshot(state, limit=4, free_pages=40), DEFAULTS).load} == {2, 3}
