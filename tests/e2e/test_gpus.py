"""GPUs that aren't there: where pods are placed and what they ask for can be seen without one."""

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import yaml

from bench.cluster.install import Target, wait_gone
from bench.cluster.kubectl import Object
from bench.serving.meta import ROOT
from tests.e2e.served import Served, time_until

pytestmark = pytest.mark.cluster

GPU = "nvidia.com/gpu"
EXAMPLE = ROOT / "examples" / "qwen3-30b-a3b.yaml"
PLACED_S = 60.0
BEAT_S = 3.0


@pytest.fixture
def gpu_node(operator: Target) -> Iterator[str]:
    """Give a node of 8 GPUs and 128 GiB that the scheduler takes for real; no kubelet runs what it places there."""
    node: Object = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "gpus", "labels": {"nvidia.com/gpu.present": "true", "kubernetes.io/hostname": "gpus"}},
        "spec": {"taints": [{"key": GPU, "value": "present", "effect": "NoSchedule"}]},
    }
    operator.kube.apply(node)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        done = threading.Event()
        beating = threads.submit(beat, operator, done)
        yield "gpus"
        done.set()
        beating.result()
    operator.kube.run("delete", "node", "gpus")


def beat(target: Target, done: threading.Event) -> None:
    """Say what the node has and that it lives, as its kubelet would: else it is soon taken for lost."""
    room = {"cpu": "32", "memory": "128Gi", "pods": "110", GPU: "8"}
    while True:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Made", "lastHeartbeatTime": now}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        target.kube.run("patch", "node", "gpus", "--subresource=status", "-p", json.dumps({"status": status}))
        if done.wait(BEAT_S):
            return


@pytest.fixture
def claim(operator: Target) -> Iterator[None]:
    """Give the claim that the example's model lies in."""
    size = {"storage": "64Gi"}
    spec: Object = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "models"},
        "spec": {**spec, "capacity": size, "hostPath": {"path": "/var/lib/elasticmoe/models"}},
    }
    claim: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {**spec, "volumeName": "models", "resources": {"requests": size}},
    }
    operator.kube.apply(volume, claim)
    yield
    operator.kube.run("delete", "pvc/models", "pv/models")


def placed(served: Served, component: str) -> str | None:
    """Return the node of the component's pod."""
    pods = served.pods(component)
    node: str | None = pods[0]["spec"].get("nodeName") if pods else None
    return node


@pytest.mark.usefixtures("claim")
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_example_for_gpus_is_placed_and_asks_for_one_gpu_a_rank(
    operator: Target, gpu_node: str, tensor: int
) -> None:
    """Beside the pool, whose memory the node must have."""
    resource = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    resource["spec"]["parallelism"] = {"tensor": tensor}
    operator.kube.apply(resource)
    served = Served(operator, "qwen3")
    try:
        time_until("both pods on the node", lambda: is_placed(served, gpu_node, tensor), PLACED_S)
        assert served.wait_condition("HostMemoryFit", "True")["message"].startswith(f"need {56 * 1024}Mi")
    finally:
        operator.kube.run("delete", "emoe", "qwen3")
        operator.kube.run("delete", "pod", "-l", "elasticmoe.io/deployment=qwen3", "--force", "--grace-period=0")
    wait_gone(operator.kube, "qwen3", print)


def is_placed(served: Served, node: str, num_gpus: int) -> bool:
    """Return whether both pods are on the node and the worker asks for that many GPUs."""
    if placed(served, "coordinator") != node or placed(served, "worker") != node:
        return False
    (main,) = served.pods("worker")[0]["spec"]["containers"]
    return {main["resources"][kind].get(GPU) for kind in ("requests", "limits")} == {str(num_gpus)}
