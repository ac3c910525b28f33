"""The offload limit over whole passes: from the spec or the autotuner to the pods' annotations and the status."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elasticmoe.operator.apply import Cluster
from elasticmoe.operator.observed import Pod, PodSample, Samples
from elasticmoe.operator.reconcile import Readings, Reconciler
from tests.fakes.kube_bench import KEY, Bench
from tests.fakes.kube_objects import IMAGES, make_pod_object
from tests.fakes.kube_objects import offload as memory_with


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


def test_a_new_limit_does_not_wait_for_metrics() -> None:
    """A worker under a burst, or a coordinator that hangs, tells them late."""
    bench = Bench(memory=memory_with(limit="50%"))
    bench.run()
    bench.serve()
    bench.run()
    bench.edit(memory=memory_with(limit="25%"))
    limits_then = []

    def scrape(workers: tuple[Pod, ...], coordinators: tuple[Pod, ...], at_s: float) -> Samples:
        limits_then.append(bench.limit())
        return bench.scrape(workers, coordinators, at_s)

    bench.reconciler = replace(bench.reconciler, scrape=scrape)
    bench.run()
    assert limits_then == ["8"]
    assert len([call for call in bench.kube.calls if call[0] == "patch"]) == 2


def test_the_limit_of_a_spec_that_is_refused_holds_nowhere() -> None:
    """Neither for pods nor in the status, until the API server takes the spec."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.serve()
    bench.run()
    bench.edit(memory=memory_with(limit=8))
    bench.kube.failing["Deployment"] = 422
    for _ in range(2):
        bench.run(10)
        assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
        assert (bench.limit(), bench.resource["status"]["offloadLimit"]) == ("16", 16)
    bench.kube.failing.clear()
    bench.run(10)
    assert bench.limit() == "8"


def test_a_new_pod_gets_the_limit_of_the_last_good_spec() -> None:
    """While the newest spec is invalid, what the status says holds for pods that come, too."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    bench.edit(engineArgs=["--port=1"])
    bench.serve()
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    assert bench.resource["status"]["offloadLimit"] == 16
    assert bench.limit() == "16"


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


@pytest.mark.parametrize("is_tuning", [True, False])
def test_a_share_stays_resolved_while_no_worker_answers(is_tuning: bool) -> None:  # noqa: FBT001 -- a case
    """A missed scrape changes no status, and a new only worker has its limit before it tells anything."""
    bench = Bench(memory=memory_with(limit="25%", autotune={"enabled": is_tuning}))
    bench.run()
    bench.serve()
    bench.run()
    assert bench.resource["status"]["offloadLimit"] == 8
    bench.samples.clear()
    bench.kube.objects.pop(("Pod", "default", "w"))
    bench.kube.add(make_pod_object("w"))
    bench.run()
    assert bench.resource["status"]["offloadLimit"] == 8
    assert bench.limit() == "8"
    bench.edit(memory=memory_with(limit="50%", autotune={"enabled": is_tuning}))
    bench.run()
    assert bench.limit() == "16"


def test_the_number_of_experts_outlasts_an_invalid_spec() -> None:
    """A status that forgot it would resolve no share after it."""
    bench = Bench(memory=memory_with(limit="25%", autotune={"enabled": False}))
    bench.run()
    bench.serve()
    bench.run()
    bench.samples.clear()
    bench.edit(replicas=-1)
    bench.run()
    bench.edit(replicas=1)
    bench.run()
    assert bench.resource["status"]["offloadLimit"] == 8


def test_a_model_of_another_size_resolves_a_share_anew() -> None:
    """As soon as its worker has told its number; the last model's held until then."""
    bench = Bench(memory=memory_with(limit="25%", autotune={"enabled": False}))
    bench.run()
    bench.serve()
    bench.run()
    bench.serve(experts_per_layer=128)
    bench.run()
    assert bench.limit() == "32"
    assert bench.resource["status"]["expertsPerLayer"] == 128


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


def test_an_edited_bound_reaches_the_pods_at_the_next_pass() -> None:
    """Without waiting for a signal."""
    bench = Bench(memory=memory_with(limit=16))
    bench.run()
    tune(bench)
    bench.edit(memory=memory_with(limit=16, max="25%"))
    bench.run()
    assert bench.limit() == "8"
    assert bench.resource["status"]["offloadLimit"] == 8


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
