"""The operator as a pod: who it is, what it asks for, and what becomes of its resources while it is away."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from bench.cluster.install import CHART, RELEASE, SYSTEM_NAMESPACE, Target, install_chart
from bench.cluster.kubectl import ClusterFailed, Kubectl, Object
from bench.serving.meta import ROOT
from bench.serving.model import cache_folder
from elasticmoe.operator.loop import MAX_WATCH_AGE_S
from tests.e2e.served import TURN_S, Served, time_until

pytestmark = pytest.mark.cluster

ACCOUNT = f"system:serviceaccount:{SYSTEM_NAMESPACE}:elasticmoe-operator"
RESTART_S = 120.0
WHO_AM_I = """
import json
from kubernetes.client import AuthenticationV1Api
from elasticmoe.operator.handlers import connect
print(json.dumps(AuthenticationV1Api(connect().client).create_self_subject_review({}).status.user_info.username))
"""


def system(target: Target) -> Kubectl:
    """Return kubectl in the operator's namespace."""
    return Kubectl(target.kube.kubeconfig, SYSTEM_NAMESPACE)


def operator_pod(target: Target) -> Object:
    """Return the operator's only living pod."""
    (pod,) = [pod for pod in operator_pods(target) if "deletionTimestamp" not in pod["metadata"]]
    return pod


def operator_pods(target: Target) -> list[Object]:
    """Return the operator's pods, those that are ending too."""
    return system(target).find("pod", f"app.kubernetes.io/instance={RELEASE}")


def audit_log() -> Iterator[Object]:
    """Yield what the API server wrote down of requests for our resources and for Secrets."""
    log = cache_folder(os.environ) / "cluster" / "run" / "log" / "audit.log"
    written, _, _ = log.read_text(encoding="utf-8").rpartition("\n")  # it may be amid a line
    for line in written.splitlines():
        yield json.loads(line)


def test_the_operator_has_its_own_identity_with_both_of_its_clients(tiny: Served) -> None:
    """Ours and kopf's: a client that lost its token is anonymous, and nothing else shows it."""
    name = operator_pod(tiny.target)["metadata"]["name"]
    assert json.loads(system(tiny.target).run("exec", name, "--", "python3", "-c", WHO_AM_I)) == ACCOUNT
    asked = [event for event in audit_log() if event["objectRef"]["resource"] == "elasticmoedeployments"]
    watchers = {event["user"]["username"] for event in asked if event["verb"] == "watch"}
    assert ACCOUNT in watchers
    assert "system:anonymous" not in {event["user"]["username"] for event in asked}


def test_the_operator_reads_no_secret(tiny: Served) -> None:
    """It may not, and it did not ask."""
    for verb in ("get", "list", "watch"):
        for where in (("--all-namespaces",), ("--namespace", SYSTEM_NAMESPACE)):
            with pytest.raises(ClusterFailed, match=r"failed: no$"):
                tiny.target.kube.run("auth", "can-i", verb, "secrets", f"--as={ACCOUNT}", *where)
    secrets = [event for event in audit_log() if event["objectRef"]["resource"] == "secrets"]
    assert not [event for event in secrets if event["user"]["username"] == ACCOUNT]


def test_uninstall_and_install_take_the_resources_over(tiny: Served) -> None:
    """No pod of theirs is restarted, and the new operator rules them."""
    lives, uid = tiny.lives(), tiny.resource()["metadata"]["uid"]
    tiny.target.kube.helm("uninstall", RELEASE, f"--namespace={SYSTEM_NAMESPACE}", "--wait")
    time_until("the operator to be gone", lambda: not operator_pods(tiny.target), TURN_S)
    assert tiny.resource()["metadata"]["uid"] == uid
    tiny.patch('{"spec": {"memory": {"expertOffload": {"limit": 9}}}}')  # while nobody looks
    time.sleep(3)
    assert tiny.metric("worker", "elasticmoe_expert_offload_limit", kind="requested") != 9
    install_chart(tiny.target, print)
    time_until(
        "the new operator to take over",
        lambda: tiny.metric("worker", "elasticmoe_expert_offload_limit", kind="requested") == 9,
        TURN_S,
    )
    tiny.patch('{"spec": {"memory": {"expertOffload": {"limit": "75%"}}}}')
    tiny.wait_condition("Ready", "True")
    assert tiny.lives() == lives


def test_a_dead_watch_fails_the_probe(tiny: Served) -> None:
    """A process that lives but hears of no change is started anew, and serves again when it can hear."""
    lives, pod, restarts = tiny.lives(), operator_pod(tiny.target), num_restarts(tiny.target)
    time_until("the operator to be well", lambda: ask_probe(pod) == httpx.codes.OK, RESTART_S)
    with cut_off(pod):
        time_until(
            "the probe to fail", lambda: ask_probe(pod) == httpx.codes.INTERNAL_SERVER_ERROR, MAX_WATCH_AGE_S + 60
        )
        time_until("a new start", lambda: num_restarts(tiny.target) > restarts, RESTART_S)
    time_until("the operator to be well", lambda: ask_probe(pod) == httpx.codes.OK, RESTART_S)
    tiny.patch('{"spec": {"memory": {"expertOffload": {"limit": 11}}}}')
    time_until("an edit to be heard", lambda: tiny.resource()["status"]["offloadLimit"] == 11, RESTART_S)
    tiny.patch('{"spec": {"memory": {"expertOffload": {"limit": "75%"}}}}')
    assert tiny.lives() == lives


def ask_probe(pod: Object) -> int | None:
    """Return what the kubelet's probes get from the operator, None for no answer."""
    try:
        return httpx.get(f"http://{pod['status']['podIP']}:8080/healthz", timeout=5, trust_env=False).status_code
    except httpx.HTTPError:
        return None


@contextmanager
def cut_off(pod: Object) -> Iterator[None]:
    """Drop, in silence, what a pod sends to the API server."""
    rule = ["INPUT", "-s", pod["status"]["podIP"], "-p", "tcp", "--dport", "6443", "-j", "DROP"]
    subprocess.run(["iptables", "-I", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-D", *rule], check=True)


def num_restarts(target: Target) -> int:
    """Return how often the operator's container was restarted."""
    statuses = operator_pod(target)["status"].get("containerStatuses") or [{"restartCount": 0}]
    return int(statuses[0]["restartCount"])


def test_the_crd_in_the_cluster_is_the_models(tiny: Served) -> None:
    """What the API server stores is what the chart ships and the model makes."""
    crd = ROOT / "crds" / "elasticmoe.io_elasticmoedeployments.yaml"
    assert (CHART / "crds" / crd.name).read_bytes() == crd.read_bytes()
    assert tiny.target.kube.run("diff", "--server-side", "--force-conflicts", "-f", str(crd)) == ""
