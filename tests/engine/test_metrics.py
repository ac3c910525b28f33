"""How the metrics time the experts' way back."""

import pytest

pytestmark = pytest.mark.vllm


def test_recovery_lasts_from_the_first_eviction_until_as_many_are_resident_again() -> None:
    """The clock runs through further evictions and loads, and stops at the residency from before the burst."""
    from elasticmoe.runtime.engine.metrics import Recovery

    recovery = Recovery()
    for now_s, resident in enumerate([10, 9, 7, 8]):
        recovery.observe(resident, now_s, is_at_rest=False)
    assert recovery.last_s == 0
    recovery.observe(10, 4, is_at_rest=False)
    assert recovery.last_s == 3


def test_recovery_ends_at_rest_though_fewer_experts_came_back() -> None:
    """An engine at rest brings nothing more back: the clock stops there, and the next burst is timed anew."""
    from elasticmoe.runtime.engine.metrics import Recovery

    recovery = Recovery()
    recovery.observe(10, 0, is_at_rest=True)
    recovery.observe(5, 1, is_at_rest=False)
    recovery.observe(9, 3, is_at_rest=True)
    assert recovery.last_s == 2
    recovery.observe(8, 100, is_at_rest=False)
    recovery.observe(9, 101, is_at_rest=False)
    assert recovery.last_s == 1
