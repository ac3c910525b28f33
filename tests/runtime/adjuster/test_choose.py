"""Which experts go and which come."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticmoe.runtime.adjuster.choose import choose_evictions, choose_loads, choose_swaps
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.changes import Swap
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


def test_of_equals_at_the_cut_the_lower_id_comes() -> None:
    """Where more experts tie than may come, ids decide, then layers, as they would with all sorted."""
    snap = make_snapshot(np.zeros((3, 4), dtype=np.int8), probability=np.full((3, 4), 0.25))
    assert choose_loads(snap, 4) == (ExpertKey(0, 0), ExpertKey(1, 0), ExpertKey(2, 0), ExpertKey(0, 1))


@given(data=st.data(), num=st.integers(1, 12), limit=st.integers(0, 4))
def test_loads_are_what_taking_one_nominee_after_another_gives(data: st.DataObject, num: int, limit: int) -> None:
    """Each time the layers above the limit nominate, if there are any, and the hottest of the nominees is taken."""
    cells = st.lists(st.sampled_from([OFFLOADED, OFFLOADED, LOADING, RESIDENT]), min_size=4, max_size=4)
    state = np.array(data.draw(st.lists(cells, min_size=1, max_size=4)), dtype=np.int8)
    shares = st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=state.size, max_size=state.size)
    probability = np.array(data.draw(shares)).reshape(state.shape)
    ranking = np.argsort(-probability, axis=1, kind="stable")
    snap = make_snapshot(state, limit=limit, probability=probability, ranking=ranking)
    left = state.copy()
    expected: list[ExpertKey] = []
    while len(expected) < num and (left == OFFLOADED).any():
        above = (left == OFFLOADED).sum(axis=1) > limit
        layers = np.flatnonzero(above if above.any() else (left == OFFLOADED).any(axis=1)).tolist()
        nominees = [ExpertKey(n, next(e for e in ranking[n].tolist() if left[n, e] == OFFLOADED)) for n in layers]
        expected.append(min(nominees, key=lambda key: (-probability[key], key.expert, key.layer)))
        left[expected[-1]] = LOADING
    assert choose_loads(snap, num) == tuple(expected)


# Swaps: experts 0 and 1 of four are resident, 2 and 3 are not; layer 0 if not said otherwise

HALF = np.array([[RESIDENT, RESIDENT, OFFLOADED, OFFLOADED]] * 2, dtype=np.int8)


def swaps_at(probability: list[list[float]], *, margin: float = 0.5, num: int = 9, **changes: Any) -> tuple[Swap, ...]:  # noqa: ANN401 -- any field
    """Return the swaps of a model that is half resident, by these shares."""
    shares = np.array(probability)
    fields: dict[str, Any] = {
        "probability": shares,
        "ranking": np.argsort(-shares, axis=1, kind="stable"),
        "loading_depth": 1,
    }
    return choose_swaps(make_snapshot(HALF[: len(shares)], **(fields | changes)), num, margin)


def test_a_hotter_offloaded_expert_takes_the_place_of_a_colder_resident_one() -> None:
    """The hottest of those away against the coldest of those here, within a layer."""
    assert swaps_at([[0.3, 0.1, 0.2, 0.4]]) == (Swap(ExpertKey(0, 1), ExpertKey(0, 3)),)


@pytest.mark.parametrize(("hotter", "num"), [(0.237, 0), (0.238, 1)])
def test_hotter_means_hotter_by_the_margin(hotter: float, num: int) -> None:
    """With a margin of a half, 0.15 (and a tenth of the mean on both sides) is outdone by 0.238, not by 0.237."""
    assert len(swaps_at([[0.4, 0.15, 0.1, hotter]])) == num


def test_a_few_tokens_for_an_expert_nobody_needs_swap_nothing() -> None:
    """An expert without tokens is infinitely colder than one with a few, yet both hardly matter."""
    assert swaps_at([[0.99, 0.0, 0.0, 0.01]]) == ()


def test_where_everyone_is_as_hot_nobody_moves() -> None:
    """Flat routing swaps nothing even without a margin."""
    assert swaps_at([[0.25] * 4] * 2, margin=0) == ()


def test_swaps_that_gain_most_come_first_and_the_budget_ends_them() -> None:
    """Layer 1 gains 0.5, layer 0 only 0.3."""
    shares = [[0.3, 0.1, 0.2, 0.4], [0.2, 0.1, 0.6, 0.1]]
    assert [swap.leaving.layer for swap in swaps_at(shares)] == [1, 0]
    assert swaps_at(shares, num=1) == (Swap(ExpertKey(1, 1), ExpertKey(1, 2)),)
    assert swaps_at(shares, num=0) == ()


def test_a_swap_for_which_no_slot_is_free_waits() -> None:
    """Until it lands both experts are away: on the buffer's last slot that takes 3 pages; a deeper buffer has room."""
    shares = [[0.3, 0.1, 0.2, 0.4]]
    assert swaps_at(shares, free_pages=2) == ()
    assert swaps_at(shares, free_pages=3)
    assert swaps_at(shares, free_pages=0, buffer_depth=np.array([3]))


def test_layers_of_one_buffer_share_the_slot_that_deepens_it() -> None:
    """Both layers swap for the 3 pages of one slot; on buffers of their own only one of them can."""
    shares = [[0.3, 0.1, 0.2, 0.4]] * 2
    assert len(swaps_at(shares, free_pages=3)) == 2
    assert len(swaps_at(shares, free_pages=3, loading_depth=2)) == 1


def test_a_layer_above_the_limit_swaps_nothing() -> None:
    """It only loads; at the limit it may swap."""
    shares = [[0.3, 0.1, 0.2, 0.4]]
    assert swaps_at(shares, limit=1) == ()
    assert swaps_at(shares, limit=2)


def test_a_layer_that_is_all_here_or_all_away_swaps_nothing() -> None:
    """There is nobody to go, or nobody to come."""
    for state in (RESIDENT, LOADING, OFFLOADED):
        assert choose_swaps(make_snapshot(np.full((2, 4), state, dtype=np.int8), free_pages=99), 9, 0.0) == ()


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
