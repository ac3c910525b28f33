"""What the status says of the nodes: whether their coordinators are ready, and whether the pool fits there."""

from elasticmoe.operator.observed import Node, Observed
from elasticmoe.operator.status import build_conditions
from tests.fakes.kube_objects import IDENTITY, make_daemonset, make_pod
from tests.operator.conditions import BAD, CRASHED, CRASHING, condition, whole

GIB = 2**30

# CoordinatorsReady


def test_coordinators_are_ready_when_all_are() -> None:
    """On each node that matches."""
    assert condition("CoordinatorsReady") == ("False", "Creating")
    ready, stale, nowhere = (
        condition("CoordinatorsReady", coordinator_daemonset=daemonset)
        for daemonset in (
            make_daemonset(wanted=2, ready=2),
            make_daemonset(generation=2),
            make_daemonset(wanted=0, ready=0),
        )
    )
    assert ready == ("True", "CoordinatorsReady")
    assert stale == ("False", "RollingOut")
    assert nowhere == ("False", "NoNodeMatches")


def test_late_coordinators_are_named_by_node() -> None:
    """Placed or not; none is named before its pod is there."""
    daemonset = make_daemonset(wanted=3, ready=1)
    pods = (
        make_pod("a"),
        make_pod("b", node="n2", is_ready=False),
        make_pod("b2", node="n2", is_ready=False, is_leaving=True),
        make_pod("c", node=None, is_ready=False, wanted_node="n3"),
    )
    found = whole("CoordinatorsReady", coordinator_daemonset=daemonset, coordinators=pods)
    assert (found.reason, found.message) == ("CoordinatorsNotReady", "1 of 3 coordinators are ready; not on n2, n3")


def test_coordinators_that_are_not_made_say_where_to_look() -> None:
    """A DaemonSet whose pods are refused has no condition that says so."""
    found = whole("CoordinatorsReady", coordinator_daemonset=make_daemonset(ready=0, updated=0))
    assert (found.status, found.reason) == ("False", "CoordinatorsNotReady")
    assert found.message.startswith(
        "0 of 1 coordinators are ready; none is made yet; if that lasts, "
        "`kubectl -n default describe daemonset tiny-coordinator` tells why"
    )


def test_coordinators_that_fail_say_why() -> None:
    """On which nodes, and the first cause."""
    pods = (make_pod("a"), make_pod("b", node="n2", is_ready=False, containers=CRASHING))
    found = whole("CoordinatorsReady", coordinator_daemonset=make_daemonset(wanted=2, ready=1), coordinators=pods)
    assert found.reason == "CrashLooping"
    assert found.message.startswith(f"1 of 2 coordinators are ready; not on n2; b: {CRASHED} b ")


def test_coordinators_of_the_former_spec_are_rolling_out_however_ready() -> None:
    """The one that leaves is ready until its workers are gone, while the newest spec has no pod there yet."""
    leaving = (make_pod("old", is_leaving=True),)
    found = whole("CoordinatorsReady", coordinator_daemonset=make_daemonset(updated=0), coordinators=leaving)
    assert (found.status, found.reason, found.message) == (
        "False",
        "RollingOut",
        "1 of 1 coordinators are ready, 0 of the newest spec",
    )


def test_a_coordinator_that_finds_no_room_says_so_in_the_schedulers_words() -> None:
    """Whether others are of the newest spec already or not."""
    full = make_pod("new", node=None, is_ready=False, unschedulable="1 Insufficient memory.", wanted_node="n1")
    for updated, counts in (
        (2, "1 of 2 coordinators are ready"),
        (1, "1 of 2 coordinators are ready, 1 of the newest spec"),
    ):
        daemonset = make_daemonset(wanted=2, ready=1, updated=updated)
        found = whole(
            "CoordinatorsReady", coordinator_daemonset=daemonset, coordinators=(full, make_pod("b", node="n2"))
        )
        assert (found.status, found.reason) == ("False", "Unschedulable")
        assert found.message == f"{counts}; not on n1; new: 1 Insufficient memory."


# HostMemoryFit


def test_memory_fits_where_each_node_has_room() -> None:
    """Nobody knows without a node."""
    assert condition("HostMemoryFit") == ("Unknown", "NoNodeMatches")
    assert {"spec.nodeSelector", "spec.tolerations"} <= set(whole("HostMemoryFit").message.split())
    assert condition("HostMemoryFit", nodes=(Node("n1", 2 * GIB),)) == ("True", "Fits")


def test_a_node_that_is_too_small_is_named_with_its_numbers() -> None:
    """The others are not."""
    found = whole("HostMemoryFit", nodes=(Node("n1", GIB), Node("n2", 8 * GIB)))
    assert (found.status, found.reason) == ("False", "InsufficientMemory")
    assert found.message == (
        "n1: need 2048Mi (pool and headroom), allocatable 1024Mi; narrow spec.nodeSelector or free memory there"
    )


def test_a_node_that_is_too_full_is_named_too() -> None:
    """The scheduler found so; a pod that waits for something else says nothing of memory."""
    full = make_pod("c", node=None, unschedulable="0/2 nodes: 1 Insufficient memory.", wanted_node="n2")
    nodes = (Node("n1", 8 * GIB), Node("n2", 8 * GIB))
    found = whole("HostMemoryFit", nodes=nodes, coordinators=(full,))
    assert found.message.startswith(
        "n2: need 2048Mi (pool and headroom), allocatable 8192Mi, other pods have requested too much of it;"
    )
    tainted = make_pod("c", node=None, unschedulable="untolerated taint", wanted_node="n2")
    assert condition("HostMemoryFit", nodes=nodes, coordinators=(tainted,)) == ("True", "Fits")


def test_with_an_invalid_spec_the_last_verdict_stays() -> None:
    """If there was one."""
    kept = {"type": "HostMemoryFit", "status": "True", "reason": "Fits"}
    previous = {"conditions": [{"type": "Ready", "status": "True"}, kept]}
    assert condition("HostMemoryFit", BAD, previous_status=previous) == ("True", "Fits")
    kinds = [found.type for found in build_conditions(Observed(IDENTITY), BAD)]
    assert kinds == ["Ready", "ConfigValid", "CoordinatorsReady"]
