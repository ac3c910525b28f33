"""A constant number of offloaded experts per layer."""

from elasticmoe.runtime.adjuster.policies.fixed import plan
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.pages.table import LOADING
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.snapshots import make_snapshot, offloaded_tail

DEFAULTS = RuntimeConfig()


def test_at_the_limit_nothing_moves() -> None:
    """Each layer has exactly the limit out, however many pages are free."""
    assert not plan(make_snapshot(offloaded_tail(3, 3), limit=3, free_pages=100), DEFAULTS)


def test_layers_below_the_limit_evict_their_coldest() -> None:
    """A raised limit takes the coldest experts of every layer at once."""
    chosen = plan(make_snapshot(offloaded_tail(3, 1), limit=3), DEFAULTS)
    assert (chosen.evict, chosen.load) == ((ExpertKey(1, 6), ExpertKey(1, 5)), ())


def test_layers_above_the_limit_load_what_is_above_it() -> None:
    """A lowered limit brings back exactly the excess of each layer, though another layer's experts are hotter."""
    chosen = plan(make_snapshot(offloaded_tail(4, 3, 5), limit=3, free_pages=100), DEFAULTS)
    assert set(chosen.load) == {ExpertKey(0, 4), ExpertKey(2, 3), ExpertKey(2, 4)}


def test_loads_fit_the_free_pages_and_the_rate() -> None:
    """Three pages an expert, and no more than grow_most a step."""
    state = offloaded_tail(8, 8)
    assert len(plan(make_snapshot(state, limit=3, free_pages=8), DEFAULTS).load) == 2
    assert (
        len(plan(make_snapshot(state, limit=3, free_pages=100), DEFAULTS).load)
        == DEFAULTS.adjuster.thresholds.grow_most
    )


def test_an_expert_that_is_being_loaded_is_not_loaded_for_again() -> None:
    """One above the limit, and one is on its way: nothing more to do."""
    state = offloaded_tail(4, 3)
    state[0, 4] = LOADING
    assert not plan(make_snapshot(state, limit=3, free_pages=100), DEFAULTS)


def test_nothing_moves_for_kv() -> None:
    """A failed allocation gets nothing, whatever the layers' residency."""
    assert not plan(make_snapshot(offloaded_tail(4, 1), limit=3, free_pages=100, short_pages=2), DEFAULTS)
