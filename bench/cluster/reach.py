"""The way from this machine to a Service of the cluster. Called by the Kubernetes demo, its benches and the tests."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cluster.install import PORT, Target
from bench.cluster.kubectl import ClusterFailed
from bench.serving.server import HOST, find_free_port, read_last_lines

FORWARD_S = 30.0


@contextmanager
def reach(target: Target, service: str, logs: Path) -> Iterator[str]:
    """Give a Service's URL: its cluster IP where this machine is the node, else a port forwarded by kubectl."""
    if target.is_ours:
        found = target.kube.get("service", service)
        if found is None:
            raise ClusterFailed(f"want the Service {service}, there is none; see `kubectl get emoe`")
        yield f"http://{found['spec']['clusterIP']}:{PORT}"
        return
    port, log = find_free_port(), logs / f"port-forward-{service}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = target.kube.command("port-forward", f"--address={HOST}", f"service/{service}", f"{port}:{PORT}")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as forwarder:
        try:
            _wait_forwarding(forwarder, log)
            yield f"http://{HOST}:{port}"
        finally:
            forwarder.terminate()


def _wait_forwarding(forwarder: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + FORWARD_S
    while "Forwarding" not in read_last_lines(log):
        if forwarder.poll() is not None or time.monotonic() > deadline_s:
            raise ClusterFailed(f"wanted kubectl to forward a port, it did not: {read_last_lines(log)}")
        time.sleep(0.1)
