"""Conditions and numbers, rebuilt from what was observed."""

from typing import Any

import pytest

from elasticmoe.operator.observed import Container, Observed, PodSample, PoolSample, Samples
from elasticmoe.operator.status import Verdict, build_status, transitions
from tests.fakes.kube_objects import IDENTITY, make_deployment, make_pod, make_spec
from tests.operator.conditions import BAD, CRASHED, CRASHING, condition, whole

GIB = 2**30

# Ready


@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        (make_deployment(), "PodsReady"),
        (make_deployment(ready=0), "PodsNotReady"),
        (make_deployment(updated=0), "PodsNotReady"),
        (make_deployment(generation=2), "RollingOut"),
        (make_deployment(wanted=2, ready=2), "RollingOut"),
    ],
)
def test_ready_means_all_pods_of_the_newest_template_answer(deployment: dict[str, Any], reason: str) -> None:
    """One replica is wanted; more than that are the former spec's."""
    found = condition("Ready", worker_deployment=deployment)
    assert found == ("True" if reason == "PodsReady" else "False", reason)


def test_without_workers_nothing_is_ready() -> None:
    """Because they are being made, or can't be."""
    assert condition("Ready") == ("False", "Creating")
    assert condition("Ready", BAD) == ("False", "InvalidSpec")


def test_a_spec_that_is_withheld_is_not_ready() -> None:
    """However well the pods of the former one do; it says why, and what serves."""
    withheld = Verdict(make_spec(), is_withheld=True)
    found = whole("Ready", withheld, worker_deployment=make_deployment())
    assert (found.status, found.reason) == ("False", "SpecWithheld")
    assert found.message == (
        "the newest spec is not rolled out: its pool fits on no node (HostMemoryFit tells the numbers); "
        "the former spec goes on serving, ready pods: 1"
    )
    assert whole("Ready", withheld).message.endswith("ready pods: 0")


def test_zero_replicas_are_ready() -> None:
    """What was wanted is there."""
    none = Verdict(make_spec(replicas=0))
    assert condition("Ready", none, worker_deployment=make_deployment(wanted=0, ready=0)) == ("True", "ScaledToZero")
    leaving = make_deployment(wanted=0, ready=0)
    leaving["status"]["replicas"] = 1
    assert condition("Ready", none, worker_deployment=leaving)[0] == "False"


def test_pods_of_the_last_good_spec_stay_ready() -> None:
    """An invalid spec changes nothing that serves."""
    assert condition("Ready", BAD, worker_deployment=make_deployment()) == ("True", "PodsReady")


def test_a_pod_on_a_node_is_loading_its_model() -> None:
    """That may take long."""
    pod = make_pod(is_ready=False)
    assert condition("Ready", worker_deployment=make_deployment(ready=0), workers=(pod,)) == ("False", "LoadingModel")


def test_a_pod_that_fits_nowhere_says_why() -> None:
    """In the scheduler's words."""
    pod = make_pod("w7", node=None, is_ready=False, unschedulable="1 Insufficient nvidia.com/gpu")
    found = whole("Ready", worker_deployment=make_deployment(ready=0), workers=(pod,))
    assert found.reason == "Unschedulable"
    assert found.message == "0 of 1 pods are ready, 1 of the newest template; w7: 1 Insufficient nvidia.com/gpu"


def test_workers_that_fail_say_why_instead_of_loading() -> None:
    """The reason and the words are those of what failed."""
    pods = (make_pod("w7", is_ready=False, containers=CRASHING),)
    found = whole("Ready", worker_deployment=make_deployment(ready=0), workers=pods)
    assert found.reason == "CrashLooping"
    assert found.message.startswith(f"0 of 1 pods are ready, 1 of the newest template; w7: {CRASHED} w7 ")


def test_a_worker_that_is_being_made_loads_nothing_yet() -> None:
    """It may wait for ever, so it says for what."""
    pod = make_pod(is_ready=False, containers=(Container("main", is_ready=False, waiting="ContainerCreating"),))
    found = whole("Ready", worker_deployment=make_deployment(ready=0), workers=(pod,))
    assert found.reason == "PodsNotReady"
    assert "`kubectl -n default describe pod w`" in found.message
    running = make_pod(is_ready=False, containers=(Container("main", is_ready=False),))
    found = whole("Ready", worker_deployment=make_deployment(ready=0), workers=(running,))
    assert found.reason == "LoadingModel"


def test_workers_that_are_refused_say_why() -> None:
    """There is no pod then to say it; those that serve meanwhile don't hide it."""
    deployment = make_deployment(wanted=1, ready=0)
    deployment["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": "forbidden"}]
    found = whole("Ready", worker_deployment=deployment, workers=(make_pod(is_ready=False, containers=CRASHING),))
    assert (found.reason, found.message) == (
        "PodsRefused",
        "0 of 1 pods are ready, 1 of the newest template; forbidden",
    )


# ConfigValid


def test_an_invalid_spec_is_told_with_its_field() -> None:
    """And why."""
    assert condition("ConfigValid") == ("True", "Valid")
    found = whole("ConfigValid", BAD)
    assert (found.status, found.reason, found.message) == ("False", "InvalidSpec", "spec.replicas: it is -1")


# The whole status


def test_the_status_says_what_scale_and_columns_need() -> None:
    """Counts are the Deployment's; the selector finds the workers."""
    observed = Observed(IDENTITY, worker_deployment=make_deployment(wanted=2, ready=1))
    status = build_status(observed, Verdict(make_spec(replicas=2), 7, {"limit": 7}), "now")
    assert {key: status[key] for key in ("observedGeneration", "replicas", "readyReplicas", "offloadLimit")} == {
        "observedGeneration": 3,
        "replicas": 2,
        "readyReplicas": 1,
        "offloadLimit": 7,
    }
    assert status["selector"] == "app.kubernetes.io/component=worker,elasticmoe.io/deployment=tiny"
    assert status["url"] == "http://tiny.default.svc:8000"
    assert status["autotuner"] == {"limit": 7}


def test_what_is_not_known_is_left_out() -> None:
    """Null is no number."""
    status = build_status(Observed(IDENTITY), Verdict(make_spec()), "now")
    assert {"offloadLimit", "autotuner"} & set(status) == set()


def test_pods_and_nodes_have_a_line_each() -> None:
    """With their numbers, as far as they could be read."""
    samples = Samples(
        {"a": PodSample(0.0, requested_limit=9, effective_limit=8, resident_experts=100), "b": PodSample(0.0)},
        {"c": PoolSample(GIB, 2)},
    )
    workers = (make_pod("a"), make_pod("b"), make_pod("x", is_ready=False))
    observed = Observed(IDENTITY, workers=workers, coordinators=(make_pod("c"),), samples=samples)
    status = build_status(observed, Verdict(make_spec()), "now")
    assert status["pods"] == [
        {"name": "a", "ready": True, "requestedLimit": 9, "effectiveLimit": 8, "residentExperts": 100},
        {"name": "b", "ready": True},
        {"name": "x", "ready": False},
    ]
    assert status["coordinators"] == [
        {"nodeName": "n1", "podName": "c", "ready": True, "poolBytes": GIB, "leases": 2},
    ]


def test_a_node_has_one_line() -> None:
    """The coordinator that stays, not the one that leaves; one without a node has none."""
    leaving, staying = make_pod("c1", is_leaving=True), make_pod("c0", is_ready=False)
    observed = Observed(IDENTITY, coordinators=(staying, leaving, make_pod("c2", node=None)))
    lines = build_status(observed, Verdict(make_spec()), "now")["coordinators"]
    assert lines == [{"nodeName": "n1", "podName": "c0", "ready": False}]


def test_the_time_of_transition_moves_only_with_the_status() -> None:
    """Not with reason, message or generation."""
    first = build_status(Observed(IDENTITY), Verdict(make_spec()), "then")
    again = Observed(IDENTITY, previous_status=first, worker_deployment=make_deployment(ready=0))
    second = build_status(again, Verdict(make_spec()), "now")
    assert {found["lastTransitionTime"] for found in second["conditions"]} == {"then"}
    ready = Observed(IDENTITY, previous_status=second, worker_deployment=make_deployment())
    third = build_status(ready, Verdict(make_spec()), "now")
    times = {found["type"]: found["lastTransitionTime"] for found in third["conditions"]}
    assert (times["Ready"], times["ConfigValid"]) == ("now", "then")


def test_transitions_are_the_conditions_that_turned() -> None:
    """All of them at first, then none."""
    status = build_status(Observed(IDENTITY), Verdict(make_spec()), "now")
    assert [found.type for found in transitions({}, status)] == [found["type"] for found in status["conditions"]]
    assert transitions(status, status) == []
