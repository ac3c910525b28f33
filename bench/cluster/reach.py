"""The way from this machine to a Service of the cluster. Called by the Kubernetes demo."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cluster.install import PORT, Target
from bench.cluster.kubectl import ClusterFailed
from bench.serving.server import HOST, find_free_port, read_last_lines

START_S = 30.0


@contextmanager
def reach(target: Target, service: str, logs: Path) -> Iterator[str]:
    """Give a Service's URL: its cluster IP where this machine is the node, else one through the API server.

    `kubectl proxy` it is and not `kubectl port-forward`, which goes past the Service and breaks under a burst.
    """
    if target.is_ours:
        found = target.kube.get("service", service)
        if found is None:
            raise ClusterFailed(f"want the Service {service}, there is none; see `kubectl get emoe`")
        yield f"http://{found['spec']['clusterIP']}:{PORT}"
        return
    port, log = find_free_port(), logs / "kubectl-proxy.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = target.kube.command("proxy", f"--address={HOST}", f"--port={port}")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as proxy:
        try:
            _wait_serving(proxy, log)
            yield f"http://{HOST}:{port}/api/v1/namespaces/{target.kube.namespace}/services/{service}:{PORT}/proxy"
        finally:
            proxy.terminate()


def _wait_serving(proxy: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while "Starting to serve" not in read_last_lines(log):
        if proxy.poll() is not None or time.monotonic() > deadline_s:
            raise ClusterFailed(f"wanted kubectl proxy to serve, it did not: {read_last_lines(log)}")
        time.sleep(0.1)
