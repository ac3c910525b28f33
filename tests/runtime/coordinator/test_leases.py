"""Who holds which pool: one fact a test."""

import pytest

from elasticmoe.runtime.coordinator.leases import Answer, Leases

A, B = "pool-a", "pool-b"


def _ready(grace_s: float = 10.0) -> Leases:
    """Return leases with pool A loaded at time 0 and held by worker 1."""
    leases = Leases(grace_s, 0.0)
    assert leases.ask(1, A, 0.0) is Answer.LOAD
    assert leases.loaded(A, 0.0)
    assert leases.ask(1, A, 0.0) is Answer.GRANT
    return leases


def test_the_first_loads_and_the_others_wait() -> None:
    """LOAD is said once a pool, so that nothing is read twice; all hold it afterwards."""
    leases = Leases(10.0, 0.0)
    assert leases.ask(1, A, 0.0) is Answer.LOAD
    assert [leases.ask(holder, A, 1.0) for holder in (1, 2)] == [Answer.WAIT, Answer.WAIT]
    assert leases.ask(3, B, 1.0) is Answer.LOAD
    assert leases.num_leases == 0
    leases.loaded(A, 2.0)
    assert [leases.ask(holder, A, 2.0) for holder in (1, 2)] == [Answer.GRANT, Answer.GRANT]
    assert leases.num_leases == 2


def test_a_failed_load_is_tried_again() -> None:
    """The next one that asks loads."""
    leases = Leases(10.0, 0.0)
    leases.ask(1, A, 0.0)
    leases.failed(A)
    assert leases.ask(2, A, 0.0) is Answer.LOAD


def test_a_pool_is_freed_after_the_grace_period_without_leases() -> None:
    """Counted from the end of the last lease."""
    leases = _ready()
    leases.ask(2, A, 0.0)
    leases.end(1, 5.0)
    assert leases.take_expired(100.0) == []
    leases.end(2, 100.0)
    assert leases.take_expired(109.9) == []
    assert leases.take_expired(110.0) == [A]
    assert leases.take_expired(110.0) == []
    assert leases.ask(3, A, 111.0) is Answer.LOAD


def test_a_lease_in_the_grace_period_keeps_the_pool() -> None:
    """A restarted worker finds it warm."""
    leases = _ready()
    leases.end(1, 5.0)
    assert leases.ask(2, A, 14.0) is Answer.GRANT
    assert leases.take_expired(1000.0) == []


def test_a_pool_whose_asker_vanished_is_freed_too() -> None:
    """Nobody took it: the grace period runs from the load."""
    leases = Leases(10.0, 0.0)
    leases.ask(1, A, 0.0)
    leases.loaded(A, 50.0)
    leases.end(1, 51.0)
    assert leases.take_expired(59.0) == []
    assert leases.take_expired(60.0) == [A]


def test_nothing_is_loaded_before_it_is_settled() -> None:
    """A worker of the predecessor may hand the pool back: until then everybody waits, then one loads."""
    leases = Leases(10.0, 5.0)
    assert leases.ask(1, A, 4.9) is Answer.WAIT
    assert leases.ask(1, A, 5.0) is Answer.LOAD


def test_a_pool_handed_back_is_granted_to_the_others() -> None:
    """Also before it is settled, and its bringer holds a lease."""
    leases = Leases(10.0, 5.0)
    assert leases.ask(1, A, 1.0) is Answer.WAIT
    assert leases.hand_back(2, A)
    assert leases.ask(1, A, 1.0) is Answer.GRANT
    assert leases.num_leases == 2


def test_a_second_pool_of_the_same_is_not_kept() -> None:
    """Its bringer has a lease all the same."""
    leases = _ready()
    assert not leases.hand_back(2, A)
    assert leases.num_leases == 2


@pytest.mark.parametrize("works", [True, False])
def test_a_pool_adopted_while_loading_wins(works: bool) -> None:  # noqa: FBT001
    """What was loaded meanwhile is to be dropped; a load that failed changes nothing."""
    leases = Leases(10.0, 0.0)
    leases.ask(1, A, 0.0)
    assert leases.hand_back(2, A)
    if works:
        assert not leases.loaded(A, 3.0)
    else:
        leases.failed(A)
    assert leases.ask(1, A, 3.0) is Answer.GRANT


@pytest.mark.parametrize("works", [True, False])
def test_a_pool_freed_while_loading_may_come_after_all(works: bool) -> None:  # noqa: FBT001
    """Adopted, left and freed during a long load: the loaded one is kept, a failed one asks for another."""
    leases = Leases(10.0, 0.0)
    leases.ask(1, A, 0.0)
    leases.hand_back(2, A)
    leases.end(2, 1.0)
    assert leases.take_expired(50.0) == [A]
    if works:
        assert leases.loaded(A, 51.0)
    else:
        leases.failed(A)
    assert leases.ask(1, A, 52.0) is (Answer.GRANT if works else Answer.LOAD)


def test_the_end_of_one_that_holds_nothing_is_nothing() -> None:
    """A connection that never got a lease ends as well."""
    leases = _ready()
    leases.end(7, 1.0)
    assert leases.num_leases == 1
