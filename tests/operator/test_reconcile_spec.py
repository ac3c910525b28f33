"""Specs that turn out wrong only against the cluster, over whole passes: what is told, and what goes on."""

import pytest

from tests.fakes.kube_bench import Bench
from tests.fakes.kube_objects import Object, make_node_object, make_pod_object
from tests.fakes.kube_objects import offload as memory_with


def valid(bench: Bench) -> str:
    """Return what ConfigValid says."""
    (found,) = [found for found in bench.resource["status"]["conditions"] if found["type"] == "ConfigValid"]
    return str(found["message"])


def test_a_pool_that_the_api_server_writes_in_other_words_stops_no_pass() -> None:
    """It stores 1000000000000000000 as 1E; a mended spec then takes its place."""
    bench = Bench(memory={"hostPool": {"size": "1000P", "headroom": "0"}})
    bench.run()
    (main,) = bench.kube.find("DaemonSet", "tiny-coordinator")["spec"]["template"]["spec"]["containers"]
    main["resources"]["requests"]["memory"] = main["resources"]["limits"]["memory"] = "1E"
    bench.run()
    assert bench.condition("HostMemoryFit") == ("False", "InsufficientMemory")
    bench.edit(memory=memory_with())
    bench.run()
    assert bench.condition("HostMemoryFit") == ("True", "Fits")


def test_a_pool_that_another_has_under_our_name_stops_no_pass() -> None:
    """Whatever is in it: it is told and left alone."""
    bench = Bench()
    theirs = {"kind": "DaemonSet", "metadata": {"name": "tiny-coordinator", "namespace": "default"}, "spec": {}}
    bench.kube.add(theirs)
    bench.run()
    assert valid(bench).startswith("metadata.name: need DaemonSet tiny-coordinator in default, another has it")
    assert bench.kube.find("DaemonSet", "tiny-coordinator") == theirs


def test_a_name_that_is_no_string_is_told() -> None:
    """It could not be merged by."""
    bench = Bench(podTemplate={"spec": {"containers": [{"name": {"a": "b"}}]}})
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    assert valid(bench) == "spec.podTemplate.spec.containers.0.name: want a string, it is {'a': 'b'}"


def test_what_the_api_server_refuses_is_told_with_our_field() -> None:
    """And what to do."""
    bench = Bench()
    bench.kube.failing["Deployment"] = 422
    bench.kube.body = '{"message": "spec.template.spec.tolerations[0].operator: Invalid value"}'
    bench.run()
    assert valid(bench) == (
        "spec.tolerations: the API server refuses Deployment tiny-worker: "
        "spec.template.spec.tolerations[0].operator: Invalid value; mend it here or in spec.podTemplate"
    )


def test_of_a_spec_that_is_refused_in_one_part_no_part_is_applied() -> None:
    """Not at later passes either; mended, it is applied whole, and tried no more."""
    bench = Bench()
    bench.run()
    bench.edit(memory={"hostPool": {"size": "1Gi", "headroom": "300Mi"}})
    bench.kube.failing["Deployment"] = 422
    before = bench.kube.find("DaemonSet", "tiny-coordinator")["metadata"]["generation"]
    for _ in range(2):
        bench.run(10)
        assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
        assert bench.kube.find("DaemonSet", "tiny-coordinator")["metadata"]["generation"] == before
    del bench.kube.failing["Deployment"]
    bench.run(10)
    assert bench.kube.find("DaemonSet", "tiny-coordinator")["metadata"]["generation"] == before + 1
    bench.kube.calls.clear()
    bench.run(10)
    assert {verb for verb, *_ in bench.kube.calls} == {"apply"}


def test_a_spec_that_is_held_back_is_refused_whole_too() -> None:
    """What the API server refuses is told at once, and nothing rolls when a node has room for the pool."""
    bench = Bench()
    bench.run()
    bench.serve()
    bench.edit(memory={"hostPool": {"size": "7Gi", "headroom": "2Gi"}})
    bench.kube.failing["Deployment"] = 422
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    before = bench.kube.find("DaemonSet", "tiny-coordinator")["metadata"]["generation"]
    bench.kube.add(make_node_object("n2", "16Gi", **{"nvidia.com/gpu.present": "true"}))
    bench.run(10)
    assert bench.kube.find("DaemonSet", "tiny-coordinator")["metadata"]["generation"] == before


def test_a_spec_that_is_held_back_can_be_scaled_to_zero() -> None:
    """It is held back to keep workers serving, and none is wanted; that its pool fits nowhere is still told."""
    bench = Bench()
    bench.run()
    bench.serve()
    bench.edit(memory={"hostPool": {"size": "10Ti"}})
    bench.run()
    assert bench.condition("Ready") == ("False", "SpecWithheld")
    assert bench.kube.find("Deployment", "tiny-worker")["spec"]["replicas"] == 1
    bench.edit(replicas=0)
    bench.run()
    assert bench.kube.find("Deployment", "tiny-worker")["spec"]["replicas"] == 0
    assert bench.condition("Ready") == ("False", "RollingOut")
    assert bench.condition("HostMemoryFit") == ("False", "InsufficientMemory")


# Limits and bounds that a layer does not have


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit": 1000}, "spec.memory.expertOffload.limit: want at most 32, the experts of a layer, or a share"),
        ({"min": 100}, "spec.memory.expertOffload.min: want at most 32, the experts of a layer, or a share"),
        (
            {"min": "90%", "max": 3},
            "spec.memory.expertOffload: min must not exceed max, they are 90% and 3:",
        ),
    ],
)
@pytest.mark.parametrize("is_tuning", [True, False])
def test_more_than_a_layer_has_is_refused_when_experts_are_counted(
    fields: Object,
    message: str,
    is_tuning: bool,  # noqa: FBT001 -- a case
) -> None:
    """Field, what is allowed, what was given; no limit is shown or given that no worker could take."""
    bench = Bench(memory=memory_with(**fields, autotune={"enabled": is_tuning}))
    bench.run()
    bench.serve()
    bench.run()
    bench.run(10)
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    assert valid(bench).startswith(message)
    assert bench.condition("Ready") == ("True", "PodsReady")
    assert "offloadLimit" not in bench.resource["status"]
    bench.kube.objects.pop(("Pod", "default", "w"))
    bench.samples.clear()
    bench.kube.add(make_pod_object("w"))
    bench.run(10)
    assert bench.limit() is None
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    bench.edit(memory=memory_with(limit=8))
    bench.run(10)
    assert (bench.condition("ConfigValid"), bench.limit()) == (("True", "Valid"), "8")


def test_the_limit_of_the_last_good_spec_stays_over_one_that_no_layer_has() -> None:
    """As over any other invalid spec."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve()
    bench.run()
    bench.edit(memory=memory_with(limit=33))
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    assert (bench.limit(), bench.resource["status"]["offloadLimit"]) == ("16", 16)
    bench.edit(memory=memory_with(limit=32))
    bench.run()
    assert (bench.condition("ConfigValid"), bench.limit()) == (("True", "Valid"), "32")


def test_a_limit_for_another_model_is_not_judged_by_the_last_ones_experts() -> None:
    """Else a larger model could never be rolled out: its workers count them first."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve()
    bench.run()
    assert bench.resource["status"]["countedModel"] == "path:///models/tiny"
    bench.edit(model={"uri": "path:///models/large"}, memory=memory_with(limit=100))
    bench.run()
    bench.samples.clear()
    bench.run(10)
    assert bench.condition("ConfigValid") == ("True", "Valid")
    assert bench.resource["status"]["countedModel"] == "path:///models/tiny"
    bench.kube.find("Deployment", "tiny-worker")["status"]["observedGeneration"] = 2
    bench.run(10)
    assert bench.condition("Ready") == ("True", "PodsReady")
    assert bench.resource["status"]["countedModel"] == "path:///models/tiny"
    bench.serve(experts_per_layer=64)
    bench.run(10)
    assert bench.resource["status"]["countedModel"] == "path:///models/large"
    bench.run(10)
    assert valid(bench).startswith("spec.memory.expertOffload.limit: want at most 64,")


# What becomes of a limit that goes or is moved


@pytest.mark.parametrize("is_tuning", [True, False])
def test_a_limit_that_goes_from_the_spec_goes_from_the_pods(is_tuning: bool) -> None:  # noqa: FBT001 -- a case
    """Spec, status, running pods and new ones agree."""
    bench = Bench(memory=memory_with(limit=16, autotune={"enabled": is_tuning}))
    bench.run()
    bench.serve()
    bench.run()
    assert bench.limit() == "16"
    bench.edit(memory=memory_with(autotune={"enabled": is_tuning}))
    bench.run()
    assert bench.limit() is None
    assert "offloadLimit" not in bench.resource["status"]
    patches = [call for call in bench.kube.calls if call[0] == "patch"]
    bench.run(10)
    assert [call for call in bench.kube.calls if call[0] == "patch"] == patches


def test_a_limit_stays_while_a_share_can_not_be_resolved() -> None:
    """It is one that is yet to come; and over an invalid spec, too."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve(experts_per_layer=None)
    bench.run()
    bench.edit(memory=memory_with(limit="25%"))
    bench.run()
    assert bench.limit() == "16"
    bench.edit(replicas=-1)
    bench.run()
    assert bench.limit() == "16"
    bench.edit(replicas=1)
    bench.serve()
    bench.run()
    assert bench.limit() == "8"


def test_a_limit_that_bounds_move_is_told_once() -> None:
    """In the status' history and as an Event, like any other change of the autotuner."""
    bench = Bench(memory=memory_with(limit=20))
    bench.run()
    bench.serve()
    bench.run()
    bench.edit(memory=memory_with(limit=20, max=5))
    bench.run()
    bench.run(10)
    (entry,) = bench.resource["status"]["autotuner"]["history"]
    reason = "memory.expertOffload.max is 5, a layer has 32 experts"
    assert entry == {"time": "2026-01-01T00:00:00Z", "from": 20, "to": 5, "reason": reason}
    told = [event["message"] for event in bench.kube.events if event["reason"] == "OffloadLimitChanged"]
    assert told == [f"offload limit 20 → 5: {reason}"]
    assert bench.limit() == "5"
