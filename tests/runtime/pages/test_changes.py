"""Plans and deltas say whether they hold anything."""

import pickle

import pytest

from elasticmoe.runtime.pages.changes import Entry, Load, Move, PageDelta, Plan, Reason
from elasticmoe.runtime.units import ExpertKey, PageId

KEY = ExpertKey(0, 1)
PAGES = (PageId(3), PageId(4), PageId(5))


def test_a_plan_without_experts_is_falsy_whatever_its_reason() -> None:
    """A reason alone changes nothing."""
    assert not Plan(reason="9 pages free")
    assert Plan(evict=(KEY,))
    assert Plan(load=(KEY,))


def test_a_reason_is_its_words_with_its_numbers() -> None:
    """In order, each as its place in the words asks for."""
    plan = Plan(reason=Reason("short of {} pages: {:.1f} of {:.0f} ms", (3, 29.06, 38.0)))
    assert f"{plan.reason}" == "short of 3 pages: 29.1 of 38 ms"


@pytest.mark.parametrize(
    "delta",
    [
        PageDelta(moves=(Move(PageId(1), PageId(2)),)),
        PageDelta(entries=(Entry(KEY, PAGES, is_resident=True),)),
        PageDelta(loads=(Load(KEY, PAGES),)),
        PageDelta(reports=True),
    ],
)
def test_a_delta_with_anything_in_it_is_shipped_unchanged(delta: PageDelta) -> None:
    """A delta is truthy if a worker has anything to do, and pickles to an equal one."""
    assert delta
    assert pickle.loads(pickle.dumps(delta)) == delta  # noqa: S301 -- our own bytes


def test_an_empty_delta_is_not_shipped() -> None:
    """Nothing to do is falsy."""
    assert not PageDelta()
