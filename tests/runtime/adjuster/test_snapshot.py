"""Orders of experts within a layer."""

import numpy as np

from tests.fakes.snapshots import make_snapshot

STATE = np.array([[2, 0, 2, 1], [0, 0, 0, 0]], dtype=np.int8)


def test_the_coldest_are_resident_and_come_from_the_end_of_the_ranking() -> None:
    """An expert that is offloaded or being loaded can't be evicted."""
    snap = make_snapshot(STATE, ranking=[[3, 2, 1, 0], [0, 1, 2, 3]])
    assert (snap.coldest(0), snap.coldest(1)) == ([0, 2], [])


def test_the_hottest_are_offloaded_and_come_from_the_front_of_the_ranking() -> None:
    """An expert that is resident or being loaded needs no load."""
    snap = make_snapshot(STATE, ranking=[[3, 2, 1, 0], [3, 1, 2, 0]])
    assert (snap.hottest(0), snap.hottest(1)) == ([1], [3, 1, 2, 0])


def test_layers_and_offloaded_experts_are_counted() -> None:
    """An expert that is being loaded is offloaded no more."""
    snap = make_snapshot(STATE)
    assert snap.num_layers == 2
    assert snap.num_offloaded.tolist() == [1, 4]
