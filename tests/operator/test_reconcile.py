"""Whole passes over one resource, against a fake of the API server in which no controller runs.

The controllers' part (pods, counts) is written by the tests; the real one is tested on a real cluster.
"""

import pytest
from kubernetes.client.exceptions import ApiException

from tests.fakes.kube_bench import Bench
from tests.fakes.kube_objects import offload as memory_with


def test_the_first_pass_makes_all_children_and_tells() -> None:
    """In order, once the API server would take them all; the status comes last."""
    bench = Bench()
    bench.run()
    assert bench.kube.calls == [
        ("try", "ServiceAccount", "tiny-elasticmoe"),
        ("try", "DaemonSet", "tiny-coordinator"),
        ("try", "Service", "tiny"),
        ("try", "Deployment", "tiny-worker"),
        ("apply", "ServiceAccount", "tiny-elasticmoe"),
        ("apply", "DaemonSet", "tiny-coordinator"),
        ("apply", "Service", "tiny"),
        ("apply", "Deployment", "tiny-worker"),
        ("apply", "ElasticMoEDeployment/status", "tiny"),
    ]
    assert bench.condition("ConfigValid") == ("True", "Valid")
    assert bench.condition("HostMemoryFit") == ("True", "Fits")
    assert bench.reasons() == ["Creating", "Valid", "Creating", "Fits"]


def test_a_pass_that_changes_nothing_writes_no_status_and_no_event() -> None:
    """Else each status would wake the next pass."""
    bench = Bench()
    bench.run()
    bench.run(5)  # now the children are there
    bench.kube.calls.clear()
    bench.kube.events.clear()
    bench.run(5)
    assert [call for call in bench.kube.calls if "status" in call[1]] == []
    assert bench.kube.events == []


def test_a_resource_that_is_gone_or_going_is_left_alone() -> None:
    """Nothing comes back."""
    bench = Bench()
    bench.resource["metadata"]["deletionTimestamp"] = "now"
    bench.run()
    bench.kube.objects.clear()
    bench.run()
    assert bench.kube.calls == []


def test_an_invalid_spec_is_told_and_the_children_of_the_last_good_one_stay() -> None:
    """With the limit that they have."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve()
    bench.run()
    before = bench.kube.find("Deployment", "tiny-worker")
    bench.edit(replicas=-1)
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    assert bench.condition("Ready")[0] == "True"
    assert bench.condition("HostMemoryFit") == ("True", "Fits")
    assert bench.kube.find("Deployment", "tiny-worker") is before
    assert bench.resource["status"]["offloadLimit"] == 16
    assert bench.resource["status"]["observedGeneration"] == 4
    bench.edit(replicas=1)
    bench.run()
    assert bench.condition("ConfigValid") == ("True", "Valid")


def test_a_resource_without_a_spec_is_invalid() -> None:
    """As stored before the schema asked for one."""
    bench = Bench()
    del bench.resource["spec"]
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")


def test_a_name_that_another_has_is_told() -> None:
    """And theirs stays."""
    bench = Bench()
    bench.kube.add({"kind": "Service", "metadata": {"name": "tiny", "namespace": "default"}})
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    (valid,) = [found for found in bench.resource["status"]["conditions"] if found["type"] == "ConfigValid"]
    assert valid["message"].startswith("metadata.name: need Service tiny in default, another has it")


def test_a_pool_that_no_longer_fits_rolls_nobody() -> None:
    """The condition says so with its numbers; the former pool and its workers stay."""
    bench = Bench()
    bench.run()
    bench.serve()
    bench.edit(memory={"hostPool": {"size": "16Gi"}}, parallelism={"tensor": 2})
    bench.run()
    assert bench.condition("HostMemoryFit") == ("False", "InsufficientMemory")
    (main,) = bench.kube.find("Deployment", "tiny-worker")["spec"]["template"]["spec"]["containers"]
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_a_withheld_spec_is_not_ready_until_one_that_fits_takes_its_place() -> None:
    """The status is about the newest generation, and that one serves nobody."""
    bench = Bench()
    bench.run()
    bench.serve()
    bench.run()
    assert bench.condition("Ready") == ("True", "PodsReady")
    bench.edit(memory={"hostPool": {"size": "10Ti"}}, engineArgs=["--max-num-seqs=8"])
    bench.run()
    bench.run()
    assert bench.condition("Ready") == ("False", "SpecWithheld")
    assert bench.condition("HostMemoryFit") == ("False", "InsufficientMemory")
    assert bench.resource["status"]["readyReplicas"] == 1
    assert bench.reasons()[-2:] == ["SpecWithheld", "InsufficientMemory"]
    bench.edit(memory={"hostPool": {"size": "1Gi"}}, engineArgs=[])
    bench.run()
    assert bench.condition("Ready") == ("True", "PodsReady")


def test_what_the_api_server_finds_invalid_is_told() -> None:
    """As a field of the pod template that it doesn't know."""
    bench = Bench()
    bench.kube.failing["Deployment"] = 422
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")


def test_an_error_of_the_api_server_ends_the_pass() -> None:
    """The loop tries again; no status says what wasn't done."""
    bench = Bench()
    bench.kube.failing["Service"] = 500
    with pytest.raises(ApiException, match="500"):
        bench.run()
    assert "status" not in bench.resource


def test_an_edited_spec_is_not_ready_in_the_pass_that_applies_it() -> None:
    """What was observed before speaks of the former template; the status is about the newest one."""
    bench = Bench()
    bench.run()
    bench.serve()
    bench.run()
    assert bench.condition("Ready") == ("True", "PodsReady")
    bench.edit(engineArgs=["--max-num-seqs=8"])
    bench.run()
    assert bench.resource["status"]["observedGeneration"] == bench.resource["metadata"]["generation"]
    assert bench.condition("Ready") == ("False", "RollingOut")


def test_an_engine_that_refuses_its_arguments_is_told_and_forgotten_once_it_serves() -> None:
    """From the pod's status as the kubelet writes it."""
    bench = Bench(engineArgs=["--no-such-flag"])
    bench.run()
    bench.serve()
    deployment, pod = bench.kube.find("Deployment", "tiny-worker"), bench.kube.find("Pod", "w")
    deployment["status"]["readyReplicas"] = 0
    pod["status"]["conditions"][0]["status"] = "False"
    ended = {"exitCode": 2, "reason": "Error", "message": "error: unrecognized arguments: --no-such-flag\n"}
    pod["status"]["containerStatuses"] = [
        {
            "name": "main",
            "ready": False,
            "restartCount": 2,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
    ]
    bench.run()
    assert bench.condition("Ready") == ("False", "CrashLooping")
    (ready,) = [found for found in bench.resource["status"]["conditions"] if found["type"] == "Ready"]
    assert "unrecognized arguments: --no-such-flag" in ready["message"]
    deployment["status"]["readyReplicas"] = 1
    bench.run()
    assert bench.condition("Ready") == ("True", "PodsReady")
