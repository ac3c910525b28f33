"""Which experts go and which come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticmoe.runtime.adjuster.choose import choose_evictions, choose_loads
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.table import LOADING, OFFLOADED, RESIDENT
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.snapshots import make_snapshot, offloaded_tail


def test_the_coldest_nominee_over_all_layers_goes() -> None:
    """Each layer with room in its buffer offers its coldest resident expert; the least probable one is taken."""
    probability = np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.8, 0.05, 0.15]])
    snap = make_snapshot(
        offloaded_tail(0, 0, 1, num_experts=3),
        loading_depth=1,
        probability=probability,
        buffer_depth=np.array([3]),
        ranking=np.argsort(-probability, axis=1),
    )
    assert choose_evictions(snap, 6) == (ExpertKey(2, 1), ExpertKey(0, 2))


def test_of_equals_the_lower_id_is_kept() -> None:
    """Where two experts tie, the higher id goes; where two layers tie, the lower layer's."""
    snap = make_snapshot(
        offloaded_tail(0, 0), loading_depth=1, buffer_depth=np.array([2]), probability=np.full((2, 8), 1 / 8)
    )
    assert choose_evictions(snap, 9) == (ExpertKey(0, 7), ExpertKey(1, 7), ExpertKey(0, 6))


def test_no_buffer_is_deepened_while_another_layer_has_room() -> None:
    """Layer 1 is one short of its buffer's depth, so its expert goes although layer 0's is colder."""
    snap = make_snapshot(offloaded_tail(2, 1, 1, 2), loading_depth=2)
    # buffer 0 (layers 0, 2) is 2 deep, buffer 1 (layers 1, 3) too: layers 1 and 2 have room for one each
    assert choose_evictions(snap, 6) == (ExpertKey(1, 6), ExpertKey(2, 6))


def test_where_none_has_room_a_buffer_is_deepened_by_several_at_once() -> None:
    """One eviction pays for the slot, the next ones free pages: 3 net pages take two experts of one buffer."""
    snap = make_snapshot(offloaded_tail(1, 1, 1, 1), loading_depth=2)
    assert choose_evictions(snap, 3) == (ExpertKey(0, 6), ExpertKey(2, 6))


def test_the_buffer_with_the_most_layers_to_gain_is_deepened() -> None:
    """Of three layers two share buffer 0; buffer 1 has one layer, which could only pay for its own slot."""
    snap = make_snapshot(offloaded_tail(1, 1, 1), loading_depth=2)
    assert choose_evictions(snap, 1) == (ExpertKey(0, 6), ExpertKey(2, 6))


def test_a_layer_alone_on_its_buffer_frees_nothing() -> None:
    """Two layers on two buffers: whatever leaves needs as many pages for its slot."""
    assert choose_evictions(make_snapshot(offloaded_tail(1, 1), loading_depth=2), 1) is None


def test_a_layer_at_the_limit_gives_nothing() -> None:
    """Layer 0 is at the limit of 3, layers 2 and 4 share what is to go."""
    snap = make_snapshot(offloaded_tail(3, 3, 2, 3, 1), loading_depth=2, limit=3)
    assert choose_evictions(snap, 9) == (ExpertKey(4, 6), ExpertKey(2, 5), ExpertKey(4, 5))
    assert choose_evictions(snap, 10) is None


def test_a_layer_with_nobody_resident_gives_nothing() -> None:
    """Whatever the limit would allow, only residents leave."""
    snap = make_snapshot(offloaded_tail(8, 7), loading_depth=1, limit=9)
    assert choose_evictions(snap, 3) == (ExpertKey(1, 0),)
    assert choose_evictions(snap, 4) is None


def test_the_limit_holds_for_buffers_that_are_deepened_too() -> None:
    """At a limit of 2 the four layers can lose 4 more experts for 2 more slots: 6 pages net, not 7."""
    snap = make_snapshot(offloaded_tail(1, 1, 1, 1), loading_depth=2, limit=2)
    assert len(choose_evictions(snap, 6) or ()) == 4
    assert choose_evictions(snap, 7) is None


def test_an_expert_that_is_being_loaded_stays() -> None:
    """A load under way is not evicted, and counts against the limit until it has landed."""
    state = offloaded_tail(0, 0, num_experts=2)
    state[:, 1] = LOADING
    snap = make_snapshot(state, loading_depth=1, limit=2)
    assert choose_evictions(snap, 3) == (ExpertKey(0, 0), ExpertKey(1, 0))
    assert choose_evictions(snap, 4) is None
    assert choose_evictions(make_snapshot(state, loading_depth=1, limit=1), 1) is None


def test_no_pages_wanted_no_eviction() -> None:
    """Nothing is evicted for nothing."""
    assert choose_evictions(make_snapshot(offloaded_tail(1, 1)), 0) == ()


def test_the_hottest_nominee_over_all_layers_comes() -> None:
    """Each layer offers its hottest offloaded expert; the most probable one is loaded."""
    probability = np.array([[0.5, 0.3, 0.2], [0.5, 0.1, 0.4]])
    ranking = np.argsort(-probability, axis=1)
    snap = make_snapshot(np.zeros((2, 3), dtype=np.int8), probability=probability, ranking=ranking)
    assert choose_loads(snap, 3) == (ExpertKey(0, 0), ExpertKey(1, 0), ExpertKey(1, 2))


def test_of_equals_the_lower_id_comes_first() -> None:
    """Where experts tie the lower id is loaded, where layers tie the lower layer's."""
    snap = make_snapshot(np.zeros((2, 2), dtype=np.int8), probability=np.full((2, 2), 0.5))
    assert choose_loads(snap, 3) == (ExpertKey(0, 0), ExpertKey(1, 0), ExpertKey(0, 1))


def test_layers_above_the_limit_come_first_until_they_are_at_it() -> None:
    """Layer 1 is one above the limit of 3: it gets one load first, then the hottest over all layers."""
    snap = make_snapshot(offloaded_tail(3, 4), limit=3)
    assert choose_loads(snap, 2) == (ExpertKey(1, 4), ExpertKey(0, 5))


@pytest.mark.parametrize("num", [0, -2])
def test_no_room_no_load(num: int) -> None:
    """None or fewer are none."""
    assert choose_loads(make_snapshot(offloaded_tail(3, 4)), num) == ()


def test_all_that_is_offloaded_and_no_more() -> None:
    """Experts that are resident or being loaded already are not loaded."""
    state = np.array([[OFFLOADED, LOADING, RESIDENT]], dtype=np.int8)
    assert choose_loads(make_snapshot(state), 9) == (ExpertKey(0, 0),)
    assert choose_loads(make_snapshot(np.full((2, 2), RESIDENT, dtype=np.int8)), 9) == ()


def net_pages(snap: Snapshot, evictions: tuple[ExpertKey, ...], loading_depth: int) -> int:
    """Return the pages that evictions free, counted from nothing but slots and depths."""
    slotted = snap.num_slotted.copy()
    for key in evictions:
        slotted[key.layer] += 1
    depth = [max(slotted[n::loading_depth].max(), before) for n, before in enumerate(snap.buffer_depth)]
    return 3 * (len(evictions) - int(sum(depth) - snap.buffer_depth.sum()))


@given(data=st.data(), num_layers=st.integers(1, 5), depth=st.integers(1, 3), limit=st.integers(0, 4))
def test_evictions_cover_what_is_wanted_or_nothing_could(
    data: st.DataObject, num_layers: int, depth: int, limit: int
) -> None:
    """Any plan frees the wanted pages net and keeps the limit; None only if no depth of the buffers would do."""
    rows = st.lists(st.sampled_from([OFFLOADED, LOADING, RESIDENT]), min_size=4, max_size=4)
    state = np.array(data.draw(st.lists(rows, min_size=num_layers, max_size=num_layers)), dtype=np.int8)
    depth = min(depth, num_layers)
    snap = make_snapshot(state, loading_depth=depth, limit=limit)
    wanted = data.draw(st.integers(1, 30))
    chosen = choose_evictions(snap, wanted)
    resident = (state == RESIDENT).sum(axis=1)
    if chosen is None:
        best = 0
        for buffer, now in enumerate(snap.buffer_depth.tolist()):
            gains = [-3 * (deep - now) for deep in range(now, max(now, limit) + 1)]
            for n in range(buffer, num_layers, depth):
                room = [min(limit, now + d) - int(snap.num_slotted[n]) for d in range(len(gains))]
                gains = [g + 3 * max(0, min(r, int(resident[n]))) for g, r in zip(gains, room, strict=True)]
            best += max(gains)
        assert best < wanted
        return
    assert net_pages(snap, chosen, depth) >= wanted
    assert len(set(chosen)) == len(chosen)
    assert all(state[key] == RESIDENT for key in chosen)
    taken = np.bincount([key.layer for key in chosen], minlength=num_layers)
    assert all(snap.num_slotted[n] + taken[n] <= limit for n in np.flatnonzero(taken))
