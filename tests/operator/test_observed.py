"""From API objects to what a plan is made from."""

import pytest

from elasticmoe.operator.observed import (
    Container,
    End,
    Observed,
    PodSample,
    Samples,
    parse_node,
    parse_pod,
    parse_pods,
)
from elasticmoe.operator.spec.model import Toleration
from tests.fakes.kube_objects import IDENTITY, LIMIT, make_node_object, make_pod_object


def test_a_pod_is_what_its_conditions_say() -> None:
    """Ready, placed, not leaving, without a limit of its own yet."""
    pod = parse_pod(make_pod_object("w"))
    assert (pod.is_ready, pod.is_leaving, pod.node, pod.limit, pod.unschedulable) == (True, False, "n1", None, None)


def test_a_limit_is_its_annotation() -> None:
    """As text: what is there may be anything."""
    obj = make_pod_object("w")
    obj["metadata"]["annotations"] = {LIMIT: "7"}
    assert parse_pod(obj).limit == "7"


def test_a_pod_that_fits_nowhere_says_why_and_for_which_node() -> None:
    """A DaemonSet's controller writes the node into the affinity."""
    obj = make_pod_object("c", "coordinator", node=None, is_ready=False)
    obj["status"]["conditions"][1]["message"] = "0/2 nodes are available: 1 Insufficient memory."
    fields = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": fields}}
    obj["spec"]["affinity"] = {"nodeAffinity": required}
    pod = parse_pod(obj)
    assert (pod.unschedulable, pod.wanted_node) == ("0/2 nodes are available: 1 Insufficient memory.", "n2")


def test_a_pod_that_is_just_made_has_no_conditions() -> None:
    """Nor a status at all."""
    obj = make_pod_object("w")
    del obj["status"]
    pod = parse_pod(obj)
    assert (pod.is_ready, pod.ip, pod.unschedulable) == (False, None, None)


def test_containers_are_as_the_kubelet_reports_them() -> None:
    """Init containers first; how a run ended and how long it took, of this run and of the one before."""
    obj = make_pod_object("c", "coordinator", is_ready=False)
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:30Z"}
    done = {"exitCode": 0, "reason": "Completed", **times}
    failed = {"exitCode": 2, "reason": "Error", "message": "it failed\n", **times}
    cannot = {"exitCode": 128, "reason": "StartError", "startedAt": None, "finishedAt": "2026-01-01T00:01:30Z"}
    back_off = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    obj["status"] |= {
        "initContainerStatuses": [
            {"name": "own-folder", "ready": True, "restartCount": 0, "state": {"terminated": done}, "lastState": {}}
        ],
        "containerStatuses": [
            {
                "name": "main",
                "ready": False,
                "restartCount": 4,
                "state": {"waiting": back_off},
                "lastState": {"terminated": failed},
            },
            {"name": "side", "ready": False, "restartCount": 0, "state": {"waiting": {}}},
            {"name": "wrong", "ready": False, "restartCount": 0, "state": {"terminated": cannot}},
            {"name": "runs", "ready": True, "restartCount": 0, "state": {"running": {}}, "lastState": {}},
            {"name": "new", "ready": False, "restartCount": 0},
        ],
    }
    assert parse_pod(obj).containers == (
        Container("own-folder", is_ready=True, end=End(0, "Completed", "", 90.0)),
        Container(
            "main",
            is_ready=False,
            restarts=4,
            waiting="CrashLoopBackOff",
            waiting_message="back-off 10s",
            past_end=End(2, "Error", "it failed\n", 90.0),
        ),
        Container("side", is_ready=False, waiting=""),
        Container("wrong", is_ready=False, end=End(128, "StartError", "", 0.0)),
        Container("runs", is_ready=True),
        Container("new", is_ready=False),
    )


@pytest.mark.parametrize(("turned", "is_told"), [(None, True), ("00:00:10", True), ("00:00:11", False)])
def test_the_end_of_a_former_run_is_forgotten_once_the_pod_was_ready(turned: str | None, is_told: bool) -> None:  # noqa: FBT001 -- a table
    """A pod that turned well after the container was started again was ready meanwhile: it isn't for another cause."""
    obj = make_pod_object("w", is_ready=False)
    if turned is not None:
        obj["status"]["conditions"][0]["lastTransitionTime"] = f"2026-01-01T{turned}Z"
    obj["status"]["containerStatuses"] = [
        {
            "name": "main",
            "ready": False,
            "restartCount": 1,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            "lastState": {"terminated": {"exitCode": 1}},
        }
    ]
    (container,) = parse_pod(obj).containers
    assert container.past_end == (End(1, "", "", 0.0) if is_told else None)


def test_a_pod_that_no_kubelet_has_seen_has_no_containers() -> None:
    """The lists are missing then, or null."""
    obj = make_pod_object("w", node=None)
    assert parse_pod(obj).containers == ()
    obj["status"] |= {"initContainerStatuses": None, "containerStatuses": None}
    assert parse_pod(obj).containers == ()


def test_pods_are_sorted_by_component_and_name_without_the_ended() -> None:
    """A failed pod stays listed until somebody deletes it."""
    ended = make_pod_object("w0")
    ended["status"]["phase"] = "Failed"
    listed = [make_pod_object("w2"), ended, make_pod_object("c", "coordinator"), make_pod_object("w1")]
    workers, coordinators = parse_pods(listed)
    assert [pod.name for pod in workers] == ["w1", "w2"]
    assert [pod.name for pod in coordinators] == ["c"]


def test_nodes_without_room_are_those_that_could_never_hold_it() -> None:
    """By allocatable memory; exactly enough is enough."""
    nodes = tuple(parse_node(make_node_object(name, memory)) for name, memory in (("a", "1Gi"), ("b", "2Gi")))
    observed = Observed(IDENTITY, nodes=nodes)
    assert [node.name for node in observed.small_nodes(2**30)] == []
    assert [node.name for node in observed.small_nodes(2**30 + 1)] == ["a"]


@pytest.mark.parametrize(
    ("toleration", "is_taken"),
    [
        ({}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "key": "a"}, True),
        ({"operator": "Exists", "key": "b"}, False),
        ({"operator": "Exists", "key": "a", "effect": "NoExecute"}, False),
        ({"key": "a", "value": "x", "effect": "NoSchedule"}, True),
        ({"key": "a", "value": "y"}, False),
        ({"key": "a"}, False),
    ],
)
def test_a_taint_keeps_off_who_does_not_tolerate_it(toleration: dict[str, str], is_taken: bool) -> None:  # noqa: FBT001 -- a table
    """By key, value and effect; without a key all are tolerated."""
    obj = make_node_object("n", "1Gi")
    obj["spec"] = {"taints": [{"key": "a", "value": "x", "effect": "NoSchedule"}]}
    assert parse_node(obj).takes([Toleration.model_validate(toleration)]) == is_taken
    assert not parse_node(obj).takes([])


def test_taints_that_bar_no_daemonset_are_passed_over() -> None:
    """A node that is cordoned or short of something, and a mere preference."""
    obj = make_node_object("n", "1Gi")
    cordoned = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    obj["spec"] = {"taints": [cordoned, {"key": "a", "effect": "PreferNoSchedule"}]}
    assert parse_node(obj).takes([])


def test_the_experts_of_a_layer_are_what_workers_report() -> None:
    """Nothing before the first one does."""
    assert Observed(IDENTITY).num_experts is None
    samples = {"a": PodSample(0.0), "b": PodSample(0.0, experts_per_layer=32)}
    assert Observed(IDENTITY, samples=Samples(samples)).num_experts == 32
    known = {"expertsPerLayer": 64}
    assert Observed(IDENTITY, previous_status=known).num_experts == 64
    assert Observed(IDENTITY, previous_status=known, samples=Samples(samples)).num_experts == 32
