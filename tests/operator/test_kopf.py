"""The operator as a process of its own: the real kopf and the real client, against a fake API server over HTTP.

No controller runs there, so the tests write what controllers would. The rest is tested on a real cluster.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, socket

import pytest

from tests.fakes.kube_api import FakeKube, Object
from tests.fakes.kube_http import FakeServer, serve
from tests.fakes.kube_objects import LIMIT, make_node_object, make_pod_object, make_resource, offload

DEADLINE_S = 60.0
QUIET_S = 1.0
OPERATOR = """
from elasticmoe.operator import loop
from kopf.cli import main
loop.RESYNC_S = 3600.0
main()
"""
"""kopf's command, but for the resyncs: what happens after the first one, a watch has brought about."""


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    """Return when it is so; a test that waits too long says for what."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.02)


class Operator:
    """A running operator and the API server that it works with."""

    def __init__(self, server: FakeServer, folder: Path) -> None:
        """Start it with all that it writes in a folder."""
        self.server = server
        self.port = socket()
        self.port.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # bound and not listening: the operator's, and nobody else's
        self.port.bind(("127.0.0.1", 0))
        self.health = f"http://127.0.0.1:{self.port.getsockname()[1]}/healthz"
        env = {
            **os.environ,
            "KUBECONFIG": str(folder / "kubeconfig"),
            "TMPDIR": str(folder),
            "ELASTICMOE_RUNTIME_IMAGE": "runtime:1",
            "ELASTICMOE_COORDINATOR_IMAGE": "coordinator:1",
            "ELASTICMOE_WATCH_NAMESPACE": "default",
        }
        command = [sys.executable, "-c", OPERATOR, "run", "--standalone", "--namespace=default"]
        command += [f"--liveness={self.health}", "--module=elasticmoe.operator.handlers"]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    @property
    def kube(self) -> FakeKube:
        """What the API server holds."""
        return self.server.kube

    def has(self, kind: str, name: str) -> bool:
        """Return whether an object is there."""
        return (kind, "default", name) in self.kube.objects

    def change(self, kind: str, name: str, **fields: Object) -> None:
        """Change an object as a user does, so that the watch tells of it."""
        with self.server.lock:
            obj = self.kube.find(kind, name)
            metadata = {**obj["metadata"], "generation": obj["metadata"].get("generation", 1) + 1}
            self.kube.add({**obj, "metadata": metadata, **fields})

    def wait_quiet(self) -> None:
        """Return when all that woke it so far has been heard: its own changes come back as events."""
        num_calls = -1
        while len(self.kube.calls) != num_calls:
            num_calls = len(self.kube.calls)
            time.sleep(QUIET_S)

    def limit(self) -> str | None:
        """The limit that the worker was given."""
        annotations = self.kube.find("Pod", "w")["metadata"].get("annotations") or {}
        found: str | None = annotations.get(LIMIT)
        return found

    def stop(self) -> int:
        """End it as Kubernetes does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    """An operator that has found one resource."""
    kube = FakeKube()
    kube.add(make_resource(memory=offload(limit=16)))
    kube.add(make_node_object("n1", "8Gi", **{"nvidia.com/gpu.present": "true"}))
    with serve(kube, tmp_path / "kubeconfig") as server:
        running = Operator(server, tmp_path)
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
            running.port.close()
            sys.stdout.write(running.log.read_text(encoding="utf-8"))  # pytest shows it if the test fails


def test_the_operator_serves_a_resource_that_it_finds(operator: Operator) -> None:
    """Children and status appear; a pod gets its limit, and a changed one without a resync; no finalizer is left."""
    resource = ("ElasticMoEDeployment", "tiny")
    wait_for("the workers' Deployment", lambda: operator.has("Deployment", "tiny-worker"))
    wait_for("a status", lambda: "status" in operator.kube.find(*resource))
    with operator.server.lock:
        operator.kube.add(make_pod_object("w", is_ready=False))  # else it would be asked for metrics
    wait_for("the pod's limit", lambda: operator.limit() == "16")

    operator.wait_quiet()
    spec = {**operator.kube.find(*resource)["spec"], "memory": offload(limit=8)}
    operator.change(*resource, spec=spec)
    wait_for("the new limit", lambda: operator.limit() == "8")

    metadata = operator.kube.find(*resource)["metadata"]
    assert "finalizers" not in metadata
    assert {name.partition("/")[0] for name in metadata.get("annotations", {})} <= {"elasticmoe.io"}
    with urllib.request.urlopen(operator.health, timeout=DEADLINE_S) as answer:  # noqa: S310 -- http, see above
        assert json.load(answer)["watch_age_s"] < 60.0
    assert operator.stop() == 0


def test_a_changed_child_is_put_right(operator: Operator) -> None:
    """Whoever changed it: what the spec says holds."""
    wait_for("the workers' Deployment", lambda: operator.has("Deployment", "tiny-worker"))
    operator.wait_quiet()
    with operator.server.lock:
        deployment = operator.kube.find("Deployment", "tiny-worker")
    operator.change("Deployment", "tiny-worker", spec={**deployment["spec"], "replicas": 5})
    wait_for("one replica", lambda: operator.kube.find("Deployment", "tiny-worker")["spec"]["replicas"] == 1)
