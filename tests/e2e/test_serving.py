"""What a user gets from one custom resource: tokens, a limit that can be moved, replicas that can be scaled."""

import json
from pathlib import Path

import pytest

from bench.cluster.kubectl import Object
from bench.serving.server import Server, elastic_spec, stock_spec
from tests.e2e.conftest import NODE_MODEL
from tests.e2e.served import TURN_S, Record, Served, time_until
from tests.engine.engines import Requests, Tokens, draw_requests
from tests.engine.over_http import generate

pytestmark = pytest.mark.cluster

FLAGS = ("--dtype=float32", "--block-size=16", "--max-model-len=512", "--max-num-seqs=48")
NUM_REQUESTS = 48
START_S = 300.0
LIMIT_S = 15.0
"""By itself the kubelet looks at a pod once a minute or less. That the operator needs no resync, test_kopf.py shows."""


def serve_here(server: Server, requests: Requests) -> Tokens:
    """Return a server's tokens and end it."""
    with server:
        server.wait_healthy(START_S, print)
        return generate(server.spec.base_url, "tiny", requests)


def test_tokens_through_the_service_are_those_of_serve_and_of_stock(tiny: Served, tmp_path: Path) -> None:
    """With experts leaving meanwhile: the arena is too small for all of them and the requests."""
    requests = draw_requests(NUM_REQUESTS)
    evicted = tiny.metric("worker", "elasticmoe_adjuster_changes_total", kind="evict")
    through_service = tiny.generate(requests)
    assert tiny.metric("worker", "elasticmoe_adjuster_changes_total", kind="evict") > evicted
    arena = ("--elastic-arena-bytes", str(25664 * 1024), "--elastic-limit", "24")
    assert through_service == serve_here(
        Server(elastic_spec(NODE_MODEL, tmp_path / "ours", (*FLAGS, *arena))), requests
    )
    stock = ("--enforce-eager", "--kv-cache-memory-bytes", str(64 * 1024**2))
    assert through_service == serve_here(Server(stock_spec(NODE_MODEL, tmp_path / "stock", (*FLAGS, *stock))), requests)


def set_limit(tiny: Served, limit: int | str) -> None:
    """Edit the spec's limit."""
    tiny.patch(json.dumps({"spec": {"memory": {"expertOffload": {"limit": limit}}}}))


def test_an_edited_limit_reaches_the_running_engine(tiny: Served, record_property: Record) -> None:
    """In seconds, without a restart and without a new pod template; status and columns show it."""
    lives, revisions = tiny.lives(), tiny.target.kube.find("replicaset", "elasticmoe.io/deployment=tiny")
    try:
        for limit in (7, 13):
            set_limit(tiny, limit)
            seconds = time_until(
                f"limit {limit} in the engine",
                lambda limit=limit: tiny.metric("worker", "elasticmoe_expert_offload_limit", kind="requested") == limit,  # type: ignore[misc]
                LIMIT_S,
            )
            record_property(f"seconds_to_{limit}", round(seconds, 2))
        time_until(
            "the limit in the status", lambda: tiny.resource()["status"]["pods"][0].get("requestedLimit") == 13, TURN_S
        )
        assert tiny.resource()["status"]["offloadLimit"] == 13
    finally:
        set_limit(tiny, "75%")
    time_until("24 of 32 experts", lambda: tiny.resource()["status"]["offloadLimit"] == 24, TURN_S)
    assert tiny.lives() == lives
    assert len(tiny.target.kube.find("replicaset", "elasticmoe.io/deployment=tiny")) == len(revisions)


def test_kubectl_shows_what_users_look_for(tiny: Served) -> None:
    """Columns, conditions, per-node coordinators, per-pod limits."""
    head, line = tiny.target.kube.run("get", "emoe", "tiny").splitlines()
    assert head.split() == ["NAME", "READY", "REASON", "DESIRED", "READY-REPLICAS", "OFFLOAD-LIMIT", "URL", "AGE"]
    assert line.split()[:5] == ["tiny", "True", "PodsReady", "1", "1"]
    time_until("a pass that has read the pods' metrics", lambda: shows_metrics(tiny.resource()["status"]), TURN_S)
    status = tiny.resource()["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]} == dict.fromkeys(
        ("Ready", "ConfigValid", "CoordinatorsReady", "HostMemoryFit"), "True"
    )
    (coordinator,) = status["coordinators"]
    assert coordinator["nodeName"] == "node1"
    assert coordinator["leases"] == 1
    assert coordinator["poolBytes"] == tiny.metric("coordinator", "elasticmoe_host_pool_bytes")
    (pod,) = status["pods"]
    assert pod["name"] == tiny.pod("worker")["metadata"]["name"]
    assert pod["residentExperts"] >= 0


def shows_metrics(status: Object) -> bool:
    """Return whether a status has what only the worker's and its coordinator's metrics tell."""
    (coordinator,), (pod,) = status["coordinators"], status["pods"]
    return coordinator.get("leases") == 1 and pod.get("residentExperts") is not None


def test_pods_have_no_more_rights_than_they_need(tiny: Served) -> None:
    """A numeric user that exists, no token, a root that can't be written, no capability."""
    for component in ("worker", "coordinator"):
        pod = tiny.pod(component)
        assert pod["spec"]["automountServiceAccountToken"] is False
        name = pod["metadata"]["name"]
        assert tiny.target.kube.run("exec", name, "-c", "main", "--", "id", "-u").strip() == "10001"
        assert tiny.target.kube.run("exec", name, "-c", "main", "--", "id", "-un").strip() == "elasticmoe"
        script = "touch /x 2>/dev/null || touch /usr/x 2>/dev/null && echo written || echo refused"
        assert tiny.target.kube.run("exec", name, "-c", "main", "--", "sh", "-c", script).strip() == "refused"
        capabilities = tiny.target.kube.run("exec", name, "-c", "main", "--", "grep", "^Cap[EPB]", "/proc/1/status")
        assert {int(line.split()[1], 16) for line in capabilities.splitlines()} == {0}


def test_kubectl_scale(tiny: Served) -> None:
    """Up to two that share one pool, down to none, and back; HPA goes the same way."""
    kube, read = tiny.target.kube, tiny.metric("coordinator", "elasticmoe_checkpoint_bytes_read_total")
    kube.run("scale", "emoe", "tiny", "--replicas=2")
    tiny.wait_ready()
    assert len(tiny.pods("worker")) == 2
    assert tiny.metric("coordinator", "elasticmoe_host_pool_leases") == 2
    kube.run("scale", "emoe", "tiny", "--replicas=0")
    assert tiny.wait_condition("Ready", "True")["reason"] == "ScaledToZero"
    kube.run("scale", "emoe", "tiny", "--replicas=1")
    tiny.wait_ready()
    assert tiny.metric("coordinator", "elasticmoe_checkpoint_bytes_read_total") == read
