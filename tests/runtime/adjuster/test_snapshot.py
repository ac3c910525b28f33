"""Heat within what may go and what may come."""

import numpy as np

from tests.fakes.snapshots import make_snapshot

STATE = np.array([[2, 0, 2, 1], [0, 0, 0, 0]], dtype=np.int8)


def test_the_coldest_resident_has_the_least_heat() -> None:
    """An expert that is offloaded or being loaded can't be evicted: no resident is hotter."""
    snap = make_snapshot(STATE, ranking=[[3, 2, 1, 0], [0, 1, 2, 3]])
    assert snap.resident_heat().tolist() == [[-3, np.inf, -1, np.inf], [np.inf] * 4]


def test_the_hottest_offloaded_has_the_most_heat() -> None:
    """An expert that is resident or being loaded needs no load: nobody offloaded is colder."""
    snap = make_snapshot(STATE, ranking=[[3, 2, 1, 0], [3, 1, 2, 0]])
    assert snap.offloaded_heat().tolist() == [[-np.inf, -2, -np.inf, -np.inf], [-3, -1, -2, 0]]


def test_layers_and_offloaded_experts_are_counted() -> None:
    """An expert that is being loaded is offloaded no more."""
    snap = make_snapshot(STATE)
    assert (snap.num_layers, snap.num_experts) == (2, 4)
    assert snap.depth == 3
    assert snap.num_offloaded.tolist() == [1, 4]
    assert snap.num_away == 5
