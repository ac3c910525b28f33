"""What goes wrong: pods that are killed, specs that are wrong, nodes that are too small, a resource that is deleted."""

import concurrent.futures
import json
import threading

import pytest

from bench.cluster.install import Target, list_children, wait_gone
from bench.cluster.kubectl import ClusterFailed, Object
from tests.e2e.served import TURN_S, Record, Served, example, find_on_node, find_pools, time_until
from tests.engine.engines import draw_requests

pytestmark = pytest.mark.cluster

READ = "elasticmoe_checkpoint_bytes_read_total"
POOL = "elasticmoe_host_pool_bytes"


def test_a_killed_workers_successor_reads_nothing_again(tiny: Served) -> None:
    """It attaches to the pool that the coordinator kept."""
    read, requests = tiny.metric("coordinator", READ), draw_requests(12, seed=1)
    want = tiny.generate(requests)
    tiny.wait_next("worker", tiny.kill("worker"))
    tiny.wait_ready()
    assert tiny.metric("coordinator", READ) == read
    assert tiny.generate(requests) == want


def test_a_killed_coordinators_successor_adopts_the_pool_while_serving_goes_on(tiny: Served) -> None:
    """Nothing is read again, and the node's memory never holds the pool twice."""
    lives, pool_bytes, pools = tiny.lives(), tiny.metric("coordinator", POOL), find_pools()
    worker = tiny.pod("worker")["metadata"]["name"]
    requests, done, most = draw_requests(12, seed=2), threading.Event(), [len(pools)]
    want = tiny.generate(requests)

    def count_pools() -> None:
        while not done.wait(0.2):
            most.append(len(find_pools()))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        counting = threads.submit(count_pools)
        waiting = threads.submit(tiny.wait_next, "coordinator", tiny.kill("coordinator"))
        while not waiting.done():
            assert tiny.generate(requests) == want
        waiting.result()
        time_until("the lease", lambda: tiny.metric("coordinator", "elasticmoe_host_pool_leases") == 1, 60)
        done.set()
        counting.result()
    assert tiny.metric("coordinator", READ) == 0
    assert tiny.metric("coordinator", "elasticmoe_host_pools_adopted_total") == 1
    assert tiny.metric("coordinator", POOL) == pool_bytes
    assert find_pools() == pools
    assert max(most) == len(pools)
    assert tiny.lives()[worker] == lives[worker]
    assert tiny.generate(requests) == want


@pytest.mark.parametrize(
    ("patch", "field", "reason"),
    [
        ({"engineArgs": ["--port=1"]}, "spec.engineArgs.0", "--port is set by the operator"),
        ({"model": {"uri": "hf://somebody/some-model"}}, "spec.model.uri", "the coordinator reads a folder"),
        ({"podTemplate": {"containers": []}}, "spec.podTemplate.containers", "metadata and spec only"),
    ],
)
def test_an_invalid_spec_is_told_and_what_serves_goes_on(tiny: Served, patch: Object, field: str, reason: str) -> None:
    """ConfigValid=False says which field and why; the pods of the last good spec stay."""
    lives, before = tiny.lives(), tiny.resource()["spec"]
    requests = draw_requests(4, seed=3)
    want = tiny.generate(requests)
    try:
        tiny.patch(json.dumps({"spec": patch}))
        condition = tiny.wait_condition("ConfigValid", "False")
        assert condition["reason"] == "InvalidSpec"
        assert field in condition["message"]
        assert reason in condition["message"]
        assert tiny.condition("Ready")["status"] == "True"
        assert tiny.generate(requests) == want
    finally:
        whole = json.dumps([{"op": "replace", "path": "/spec", "value": before}])
        tiny.target.kube.run("patch", "emoe", "tiny", "--type=json", "-p", whole)
    tiny.wait_condition("ConfigValid", "True")
    assert tiny.lives() == lives


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"termination": {"gracePeriodSeconds": 10}}, "gracePeriodSeconds must be at least"),
        ({"model": {"uri": "s3://bucket"}}, "should match"),
        ({"replicas": -1}, "should be greater than or equal to 0"),
        ({"arenas": {}}, 'unknown field "spec.arenas"'),
    ],
)
def test_what_the_schema_can_tell_is_refused_at_once(tiny: Served, patch: Object, message: str) -> None:
    """By the API server, to whoever applies it."""
    resource = example("refused", **patch)
    with pytest.raises(ClusterFailed, match=message):
        tiny.target.kube.run("apply", "-f", "-", stdin=json.dumps(resource))


def test_a_node_too_small_for_the_pool_is_named(operator: Target) -> None:
    """With what is needed and what there is; nothing runs meanwhile, and a size that fits heals it."""
    memory = {"hostPool": {"size": "10Ti"}}
    operator.kube.apply(example("huge", memory=memory))
    served = Served(operator, "huge")
    try:
        condition = served.wait_condition("HostMemoryFit", "False")
        assert condition["reason"] == "InsufficientMemory"
        assert f"node1: need {10 * 1024**2 + 1024}Mi" in condition["message"]
        assert "allocatable" in condition["message"]
        assert served.condition("Ready")["status"] == "False"
        assert all(not pod["spec"].get("nodeName") for pod in served.pods("worker"))
        served.patch('{"spec": {"memory": {"hostPool": {"size": "32Mi"}}}}')
        assert served.wait_condition("HostMemoryFit", "True")["reason"] == "Fits"
    finally:
        operator.kube.run("delete", "emoe", "huge")
    wait_gone(operator.kube, "huge", print)


def test_a_deleted_resource_leaves_nothing(tiny: Served, record_property: Record) -> None:
    """No object with our label, no socket, no process and no pool, within a minute; its neighbour serves on.

    An empty folder stays on the node: the pods that could remove it are gone.
    """
    kube, lives, pools = tiny.target.kube, tiny.lives(), find_pools()
    kube.apply(example("leaving"))
    leaving = Served(tiny.target, "leaving")
    leaving.wait_ready()
    assert len(find_pools()) == len(pools) + 1
    assert find_on_node("default", "leaving")
    kube.run("delete", "emoe", "leaving", "--wait=false")
    seconds = time_until(
        "nothing to be left",
        lambda: not list_children(kube, "leaving") and not find_on_node("default", "leaving") and find_pools() == pools,
        60,
    )
    record_property("seconds", round(seconds, 1))
    assert kube.get("emoe", "leaving") is None
    assert tiny.lives() == lives


def test_a_worker_that_still_starts_ends_at_once(tiny: Served, record_property: Record) -> None:
    """Told to end while it waits for its engine, when vLLM itself hears nothing; it has no answers to finish."""
    kube, lives = tiny.target.kube, tiny.lives()
    patience = {"drainSeconds": 0, "shutdownTimeoutSeconds": 600, "gracePeriodSeconds": 600}
    kube.apply(example("starting", termination=patience))
    starting = Served(tiny.target, "starting")
    try:
        time_until("its worker to run", lambda: is_running(starting), 120)
        log = ("logs", starting.pod("worker")["metadata"]["name"])
        time_until("its engine to load", lambda: "EngineCore" in kube.run(*log), 240)
    finally:
        kube.run("delete", "emoe", "starting", "--wait=false")
        record_property("seconds", round(time_until("nothing to be left", lambda: is_gone(starting), TURN_S), 1))
    assert tiny.lives() == lives


def is_running(served: Served) -> bool:
    """Return whether its worker's process runs, ready or not."""
    return any(
        "running" in status["state"]
        for pod in served.pods("worker")
        for status in pod["status"].get("containerStatuses", [])
    )


def is_gone(served: Served) -> bool:
    """Return whether nothing of a custom resource is left."""
    return not list_children(served.target.kube, served.name)


def test_why_a_start_fails_is_told(tiny: Served) -> None:
    """A flag that vLLM does not know, in the last line of the worker's log; and what to do."""
    kube = tiny.target.kube
    kube.apply(example("failing", engineArgs=["--no-such-flag"], termination={"drainSeconds": 0}))
    failing, seen = Served(tiny.target, "failing"), list[Object]()

    def has_cause() -> bool:  # for a moment: while its container is started again, it has none
        seen.append(failing.condition("Ready"))
        return "unrecognized arguments" in seen[-1].get("message", "")

    try:
        time_until("the cause", has_cause, 240)
        condition = seen[-1]
        assert condition["reason"] in {"Restarting", "CrashLooping"}
        assert "--no-such-flag" in condition["message"]
        assert "kubectl -n default logs failing-worker-" in condition["message"]
    finally:
        kube.run("delete", "emoe", "failing", "--wait=false")
        wait_gone(kube, "failing", print)
