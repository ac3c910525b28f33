"""A custom resource that serves on a real cluster, as the tests look at it: its pods, their metrics, its tokens."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster.install import PORT, READY_S, Target, wait_ready
from bench.cluster.kubectl import Object, find_condition, wait_until
from bench.serving.meta import ROOT
from elasticmoe.runtime.contract.pool_names import METRICS_PORT
from tests.engine.engines import Requests, Tokens
from tests.engine.over_http import generate

Record = Callable[[str, object], None]
"""pytest's record_property: a figure for the report."""
EXAMPLE = ROOT / "examples" / "tiny-qwen3-moe.yaml"
POOL_MEMFD = "/memfd:elasticmoe"
TURN_S = 60.0
"""How long a condition may take to turn."""


def example(name: str, **spec: object) -> Object:
    """Return the example's resource by another name, with parts of its spec replaced."""
    resource: Object = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    resource["metadata"]["name"] = name
    resource["spec"] |= spec
    return resource


@dataclass(frozen=True, slots=True)
class Served:
    """One custom resource."""

    target: Target
    name: str

    def resource(self) -> Object:
        """Return the custom resource as it is now."""
        found = self.target.kube.get("emoe", self.name)
        assert found is not None
        return found

    def condition(self, kind: str) -> Object:
        """Return one of its conditions."""
        return find_condition(self.resource(), kind)

    def wait_condition(self, kind: str, status: str) -> Object:
        """Return a condition of its newest spec once it has a status."""

        def look() -> str | None:
            resource, condition = self.resource(), self.condition(kind)
            is_current = condition.get("observedGeneration") == resource["metadata"]["generation"]
            return None if is_current and condition["status"] == status else str(condition)

        wait_until(f"{kind}={status} of {self.name}", look, TURN_S, print)
        return self.condition(kind)

    def wait_ready(self) -> float:
        """Return the seconds until its newest spec is Ready and its Service answers: kube-proxy may lag by a second."""
        seconds = wait_ready(self.target.kube, self.name, print)
        return seconds + time_until("the Service to answer", self.answers, TURN_S)

    def answers(self) -> bool:
        """Return whether a worker answers through the Service."""
        try:
            answer = httpx.get(f"{self.url()}/health", timeout=5, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def kill(self, component: str) -> str:
        """Kill its only pod of one component as a lost node would; returns the pod's name."""
        name: str = self.pod(component)["metadata"]["name"]
        self.target.kube.run("delete", "pod", name, "--grace-period=0", "--force")
        return name

    def wait_next(self, component: str, killed: str) -> None:
        """Wait until another pod of the component is ready; the resource's status follows a moment later."""

        def is_there() -> bool:
            pods = [pod for pod in self.pods(component) if pod["metadata"]["name"] != killed]
            return bool(pods) and find_condition(pods[0], "Ready").get("status") == "True"

        time_until(f"the next {component}", is_there, READY_S)

    def patch(self, patch: str) -> None:
        """Merge JSON into it."""
        self.target.kube.run("patch", "emoe", self.name, "--type=merge", "-p", patch)

    def pods(self, component: str) -> list[Object]:
        """Return its living pods of one component."""
        label = f"elasticmoe.io/deployment={self.name},app.kubernetes.io/component={component}"
        return [pod for pod in self.target.kube.find("pod", label) if "deletionTimestamp" not in pod["metadata"]]

    def pod(self, component: str) -> Object:
        """Return its only living pod of one component."""
        (pod,) = self.pods(component)
        return pod

    def lives(self) -> dict[str, tuple[str, int]]:
        """Return each pod's uid and restarts: what changes if any of them is started anew."""
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
            for component in ("worker", "coordinator")
            for pod in self.pods(component)
        }

    def metric(self, component: str, name: str, **labels: str) -> float:
        """Return the sum of a series on the component's only pod, over what labels it has beside these."""
        port = PORT if component == "worker" else METRICS_PORT
        url = f"http://{self.pod(component)['status']['podIP']}:{port}/metrics"
        text = httpx.get(url, timeout=10, trust_env=False, follow_redirects=True).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{url} has no {name} {labels}"
        return sum(found)

    def url(self) -> str:
        """Return its Service's address as this machine, which is the node, reaches it."""
        service = self.target.kube.get("service", self.name)
        assert service is not None
        return f"http://{service['spec']['clusterIP']}:{PORT}"

    def generate(self, requests: Requests) -> Tokens:
        """Return each request's greedy tokens through the Service, all sent at once."""
        return generate(self.url(), self.name, requests)


def time_until(what: str, is_so: Callable[[], bool], timeout_s: float) -> float:
    """Return the seconds until something is so; fails the test if it isn't in time."""
    started_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - started_s < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)
    return time.monotonic() - started_s


def find_pools() -> set[str]:
    """Return the inodes of the host pools that any process of this node holds."""
    inodes = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes come and go
            if str(link.readlink()).startswith(POOL_MEMFD):
                inodes.add(str(link.stat().st_ino))
    return inodes


def find_on_node(namespace: str, name: str) -> list[str]:
    """Return what of a resource is left on the node: its socket, and processes that name its folder."""
    folder = f"/run/elasticmoe/{namespace}/{name}"
    left = [str(path) for path in Path(folder).glob("*")]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder in (process / "cmdline").read_text(encoding="utf-8", errors="replace"):
                left.append(str(process))
    return left
