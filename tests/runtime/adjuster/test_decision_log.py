"""One line a second, and nothing lost between two."""

import numpy as np

from elasticmoe.runtime.adjuster.decision_log import DecisionLog
from elasticmoe.runtime.pages.changes import Plan, Swap
from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.pages.table import PageTable
from elasticmoe.runtime.pages.tiers import fit_tiers
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.block_port import FakeBlockPort

KEY, OTHER = ExpertKey(0, 1), ExpertKey(0, 2)
SHORT = Plan(evict=(KEY, OTHER), reason="short of 4 pages", cause="short")
REFUSED = Plan(reason="short of 9 pages, more than evictions can free")


def make_table() -> PageTable:
    """Return a table of 2 layers of 4 experts with one of each layer away."""
    table = PageTable(PagePool(fit_tiers(64, 32), 200, FakeBlockPort(200)), 2, 4, loading_depth=2)
    table.place(np.tile(np.arange(4), (2, 1)), offloaded=1)
    return table


def test_a_step_that_changed_something_is_told_with_its_reason() -> None:
    """What went, what is left, and why."""
    line = DecisionLog().line([SHORT], make_table(), 0.0)
    assert line == "experts 2 evicted; 6 of 8 resident; last: short of 4 pages"


def test_nothing_is_told_of_steps_that_decided_nothing() -> None:
    """No decision, no line."""
    assert DecisionLog().line([], make_table(), 0.0) is None


def test_refusals_alone_are_told_every_ten_seconds() -> None:
    """So that whoever waits for evictions learns why there are none."""
    log, table = DecisionLog(), make_table()
    refused = "6 of 8 resident; last: short of 9 pages, more than evictions can free"
    assert log.line([REFUSED], table, 0.0) == f"evictions 1 refused; {refused}"
    assert log.line([REFUSED, REFUSED], table, 9.0) is None
    assert log.line([], table, 9.9) is None
    assert log.line([REFUSED], table, 10.0) == f"evictions 3 refused; {refused}"
    assert log.line([], table, 99.0) is None, "an old refusal is no news"
    assert log.line([SHORT, REFUSED], table, 111.0) == (
        "experts 2 evicted, 1 refused; 6 of 8 resident; last: short of 4 pages"
    )


def test_within_a_second_changes_are_summed_up() -> None:
    """The next line tells all since the last one, refusals too, with the reason of the last change."""
    log, table = DecisionLog(), make_table()
    assert log.line([SHORT], table, 10.0)
    assert log.line([SHORT, REFUSED], table, 10.4) is None
    assert log.line([Plan(load=(KEY,), reason="20 pages free, above 9", cause="room")], table, 10.9) is None
    line = log.line([Plan(swap=(Swap(KEY, OTHER),), reason="hotter", cause="hotter")], table, 11.0)
    assert line == "experts 2 evicted, 1 loaded, 1 swapped, 1 refused; 6 of 8 resident; last: hotter"


def test_what_was_held_back_is_told_though_nothing_new_comes() -> None:
    """A quiet step a second later tells the rest; after that there is nothing left to tell."""
    log, table = DecisionLog(), make_table()
    log.line([SHORT], table, 0.0)
    log.line([SHORT], table, 0.5)
    assert log.line([], table, 1.5) == "experts 2 evicted; 6 of 8 resident; last: short of 4 pages"
    assert log.line([], table, 9.0) is None
