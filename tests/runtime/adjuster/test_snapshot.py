"""Ranks within what may go and what may come."""

import numpy as np

from tests.fakes.snapshots import make_snapshot

STATE = np.array([[2, 0, 2, 1], [0, 0, 0, 0]], dtype=np.int8)


def test_the_coldest_resident_has_the_largest_rank() -> None:
    """An expert that is offloaded or being loaded can't be evicted: it has no rank among residents."""
    snap = make_snapshot(STATE, ranking=[[3, 2, 1, 0], [0, 1, 2, 3]])
    assert snap.resident_rank().tolist() == [[3, -1, 1, -1], [-1, -1, -1, -1]]


def test_the_hottest_offloaded_has_the_least_rank() -> None:
    """An expert that is resident or being loaded needs no load: it ranks behind all that are offloaded."""
    snap = make_snapshot(STATE, ranking=[[3, 2, 1, 0], [3, 1, 2, 0]])
    assert snap.offloaded_rank().tolist() == [[4, 2, 4, 4], [3, 1, 2, 0]]


def test_layers_and_offloaded_experts_are_counted() -> None:
    """An expert that is being loaded is offloaded no more."""
    snap = make_snapshot(STATE)
    assert (snap.num_layers, snap.num_experts) == (2, 4)
    assert snap.depth == 3
    assert snap.num_offloaded.tolist() == [1, 4]
