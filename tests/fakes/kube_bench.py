"""A resource under whole passes, against the fake API server; no controller runs, the tests write its part."""

from datetime import UTC, datetime, timedelta
from typing import Any

from elasticmoe.operator.apply import Cluster
from elasticmoe.operator.observed import Pod, PodSample, Samples
from elasticmoe.operator.reconcile import Key, Readings, Reconciler
from tests.fakes.kube_api import FakeKube, Object
from tests.fakes.kube_objects import IMAGES, LIMIT, make_deployment, make_node_object, make_pod_object, make_resource

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
