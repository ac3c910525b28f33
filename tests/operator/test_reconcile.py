"""Whole passes over one resource, against a fake of the API server in which no controller runs.

The controllers' part (pods, counts) is written by the tests; the real one is tested on a real cluster.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from elasticmoe.operator.apply import Cluster
from elasticmoe.operator.observed import Pod, PodSample, Samples
from elasticmoe.operator.reconcile import Key, Readings, Reconciler
from tests.fakes.kube_api import FakeKube, Object
from tests.fakes.kube_objects import IMAGES, LIMIT, make_deployment, make_node_object, make_pod_object, make_resource
from tests.fakes.kube_objects import offload as memory_with

KEY = Key("default", "tiny")
START = datetime(2026, 1, 1, tzinfo=UTC)


class Bench:
    """A resource, a fake API server, and workers whose metrics the test sets."""

    def __init__(self, **spec: Any) -> None:  # noqa: ANN401 -- any field
        """Have a resource with such fields, and one node with room."""
        self.kube = FakeKube()
        self.kube.add(make_resource(**spec))
        self.kube.add(make_node_object("n1", "8Gi", **{"nvidia.com/gpu.present": "true"}))
        self.samples: dict[str, PodSample] = {}
        self.now = START
        client: Any = self.kube
        self.reconciler = Reconciler(Cluster(client), self.scrape, IMAGES, Readings())

    def scrape(self, workers: tuple[Pod, ...], _: tuple[Pod, ...], at_s: float) -> Samples:
        """Return what the test set for those workers that are there."""
        assert at_s == self.now.timestamp()
        return Samples({pod.name: self.samples[pod.name] for pod in workers if pod.name in self.samples})

    def run(self, after_s: float = 0.0) -> None:
        """Make a pass, so many seconds after the last one."""
        self.now += timedelta(seconds=after_s)
        self.reconciler.reconcile(KEY, self.now)

    def edit(self, **spec: Any) -> None:  # noqa: ANN401 -- any field
        """Change the spec as a user does."""
        self.resource["spec"] |= spec
        self.resource["metadata"]["generation"] += 1

    def serve(self, **numbers: Any) -> None:  # noqa: ANN401 -- any number of a sample
        """Have one ready worker with such metrics now."""
        if ("Pod", "default", "w") not in self.kube.objects:
            self.kube.add(make_pod_object("w"))
            self.kube.find("Deployment", "tiny-worker").update(status=make_deployment()["status"])
        plain = {"requested_limit": 16, "experts_per_layer": 32}
        self.samples["w"] = PodSample(at_s=self.now.timestamp(), **{**plain, **numbers})

    @property
    def resource(self) -> Object:
        """The custom resource as it stands."""
        return self.kube.find("ElasticMoEDeployment", "tiny")

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        (found,) = [found for found in self.resource["status"]["conditions"] if found["type"] == kind]
        return found["status"], found["reason"]

    def limit(self) -> str | None:
        """The limit that the worker was given."""
        found: str | None = self.kube.find("Pod", "w")["metadata"].get("annotations", {}).get(LIMIT)
        return found

    def reasons(self) -> list[str]:
        """The reasons of all Events so far."""
        return [event["reason"] for event in self.kube.events]


def test_the_first_pass_makes_all_children_and_tells() -> None:
    """In order; the status comes last."""
    bench = Bench()
    bench.run()
    assert bench.kube.calls == [
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


# The limit


def test_a_pod_gets_the_specs_limit_as_soon_as_it_is_seen() -> None:
    """And a changed one at the next pass, by annotation alone."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve()
    bench.run()
    assert bench.limit() == "16"
    template = bench.kube.find("Deployment", "tiny-worker")["spec"]["template"]
    bench.edit(memory=memory_with(limit=8))
    bench.run()
    assert bench.limit() == "8"
    assert bench.kube.find("Deployment", "tiny-worker")["spec"]["template"] == template


def test_a_pod_that_has_its_limit_is_not_patched_again() -> None:
    """Nor one that is leaving."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve()
    bench.run()
    leaving = make_pod_object("w2")
    leaving["metadata"]["deletionTimestamp"] = "now"
    bench.kube.add(leaving)
    bench.run()
    assert [call for call in bench.kube.calls if call[0] == "patch"] == [("patch", "Pod", "w")]


def test_a_share_is_resolved_when_a_pod_has_told_the_number_of_experts() -> None:
    """No limit before that."""
    bench = Bench(memory=memory_with(limit="25%"))
    bench.run()
    bench.serve(experts_per_layer=None)
    bench.run()
    assert bench.limit() is None
    bench.serve()
    bench.run()
    assert bench.limit() == "8"


def test_without_a_limit_pods_keep_their_own() -> None:
    """Until the autotuner moves it, from there."""
    bench = Bench()
    bench.run()
    bench.serve()
    bench.run()
    assert bench.limit() is None
    tune(bench)
    assert bench.limit() == "18"


def tune(bench: Bench, step: Callable[[], None] = lambda: None) -> None:
    """Let two intervals pass under a queue; `step` comes between the two."""
    bench.serve(waiting=5.0, layers_at_limit=3.0, generated_tokens=100.0)
    bench.run(15)
    step()
    bench.now += timedelta(seconds=15)
    bench.serve(waiting=5.0, layers_at_limit=3.0, generated_tokens=1600.0)
    bench.run()


def test_the_autotuner_raises_the_limit_and_tells() -> None:
    """In the annotation, the status with its history, and an Event."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    tune(bench)
    assert bench.limit() == "18"
    status = bench.resource["status"]
    assert status["offloadLimit"] == 18
    (entry,) = status["autotuner"]["history"]
    assert (entry["from"], entry["to"], entry["time"]) == (16, 18, "2026-01-01T00:00:30Z")
    assert bench.kube.events[-1]["message"] == (
        "offload limit 16 → 18: 5 requests wait and 3 layers are at their limit"
    )


def test_a_new_operator_goes_on_from_the_status() -> None:
    """And a changed limit of the spec starts tuning anew."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    tune(bench)
    client: Any = bench.kube
    bench.reconciler = Reconciler(Cluster(client), bench.scrape, IMAGES, Readings())
    bench.run()
    assert bench.limit() == "18"
    bench.edit(memory=memory_with(limit=10))
    bench.run()
    assert bench.limit() == "10"
    assert bench.resource["status"]["autotuner"]["history"] == []


def test_autotuning_is_off_by_one_field() -> None:
    """The spec's limit is then the limit, and the status has no autotuner."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    tune(bench)
    bench.edit(memory=memory_with(limit=16, autotune={"enabled": False}))
    tune(bench)
    assert bench.limit() == "16"
    assert "autotuner" not in bench.resource["status"]


def test_the_autotuner_holds_still_while_workers_come_and_go() -> None:
    """Half of the numbers would be missing."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    tune(bench, lambda: bench.kube.add(make_pod_object("w2", is_ready=False)))
    assert bench.limit() == "16"


def test_a_reading_is_judged_when_the_interval_has_passed() -> None:
    """Passes in between don't shorten it."""
    readings, first, second = Readings(), {"w": PodSample(0.0)}, {"w": PodSample(20.0)}
    assert readings.take(KEY, first, 0.0, 15) == {}
    assert readings.take(KEY, {"w": PodSample(10.0)}, 10.0, 15) == {}
    assert readings.take(KEY, second, 20.0, 15) == first
    assert readings.take(KEY, first, 35.0, 15) == second
    readings.forget(KEY)
    assert readings.take(KEY, first, 99.0, 15) == {}


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
