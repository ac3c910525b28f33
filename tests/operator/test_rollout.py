"""What is applied in a pass, and what is held back."""

from typing import Any

from elasticmoe.operator.observed import Node, Observed
from elasticmoe.operator.rollout import next_step
from tests.fakes.kube_objects import IDENTITY, make_daemonset

DESIRED: list[dict[str, Any]] = [{"kind": kind} for kind in ("ServiceAccount", "DaemonSet", "Service", "Deployment")]
GIB = 2**30


def kinds(need_bytes: int, **fields: Any) -> list[str]:  # noqa: ANN401 -- any field
    """The kinds that are applied."""
    return [manifest["kind"] for manifest in next_step(DESIRED, Observed(IDENTITY, **fields), need_bytes)]


ALL = ["ServiceAccount", "DaemonSet", "Service", "Deployment"]
SMALL, LARGE = Node("a", 2 * GIB), Node("b", 8 * GIB)


def test_everything_is_applied_at_first() -> None:
    """Also where nothing fits yet: nodes may come."""
    assert kinds(4 * GIB, nodes=(SMALL,)) == ALL


def test_nothing_is_applied_to_what_is_being_deleted() -> None:
    """It would come back and hold the GPUs."""
    assert kinds(GIB, is_leaving=True) == []


def test_a_pool_that_fits_no_node_is_not_rolled_out_over_one_that_does() -> None:
    """What serves keeps serving."""
    held = {"coordinator_daemonset": make_daemonset(memory="1Gi"), "nodes": (SMALL,)}
    assert kinds(4 * GIB, **held) == ["ServiceAccount", "Service"]


def test_one_node_with_room_is_enough() -> None:
    """The condition names the others."""
    assert kinds(4 * GIB, coordinator_daemonset=make_daemonset(memory="1Gi"), nodes=(SMALL, LARGE)) == ALL


def test_a_pool_no_larger_than_the_present_one_is_applied() -> None:
    """Whatever nodes say of it."""
    assert kinds(4 * GIB, coordinator_daemonset=make_daemonset(memory="4Gi"), nodes=(SMALL,)) == ALL


def test_without_matching_nodes_nothing_is_held_back() -> None:
    """There is nothing that serves."""
    assert kinds(4 * GIB, coordinator_daemonset=make_daemonset(memory="1Gi")) == ALL


def test_a_daemonset_that_somebody_emptied_holds_nothing_back() -> None:
    """Without its container, or its request, there is no pool to keep; applying mends it."""
    without_main, without_request = make_daemonset(memory="1Gi"), make_daemonset(memory="1Gi")
    without_main["spec"]["template"]["spec"]["containers"] = []
    without_request["spec"]["template"]["spec"]["containers"][0]["resources"] = {}
    for daemonset in (without_main, without_request):
        assert kinds(4 * GIB, coordinator_daemonset=daemonset, nodes=(SMALL,)) == ALL
