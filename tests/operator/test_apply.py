"""What reaches the API server, seen from a fake of it; how a real one answers is tested on a real cluster."""

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from elasticmoe.operator.apply import Cluster
from elasticmoe.operator.builders.service import build_service
from elasticmoe.operator.desired import build_desired
from elasticmoe.operator.errors import ForeignObjectError, RefusedObjectError
from elasticmoe.operator.observed import Node
from tests.fakes.kube_api import FakeKube
from tests.fakes.kube_objects import (
    IDENTITY,
    IMAGES,
    LIMIT,
    make_node_object,
    make_pod,
    make_pod_object,
    make_resource,
    make_spec,
)

UNTYPED = "failed to create typed patch object (default/tiny; /v1, Kind=Service)"
"""What a real API server's answer starts with, whatever is wrong with a field."""


@pytest.fixture
def kube() -> FakeKube:
    """An API server that has the custom resource."""
    kube = FakeKube()
    kube.add(make_resource())
    return kube


@pytest.fixture
def cluster(kube: FakeKube) -> Cluster:
    """The operator's side of it."""
    client: Any = kube
    return Cluster(client)


def test_a_resource_that_is_gone_is_none(kube: FakeKube, cluster: Cluster) -> None:
    """And one that is there comes whole."""
    assert cluster.find_resource("tiny", "default") == kube.find("ElasticMoEDeployment", "tiny")
    assert cluster.find_resource("other", "default") is None
    assert len(cluster.list_resources(None)) == len(cluster.list_resources("default")) == 1
    assert cluster.list_resources("elsewhere") == []


def test_an_error_of_the_server_is_not_a_missing_object(kube: FakeKube, cluster: Cluster) -> None:
    """Else the operator would forget what it can't see."""
    kube.get = _raise_503  # type: ignore[method-assign]  # an API server that is away
    with pytest.raises(ApiException, match="503"):
        cluster.find_resource("tiny", "default")


def _raise_503(*_: object, **__: object) -> Any:  # noqa: ANN401 -- never returns
    raise ApiException(status=503)


def test_everything_of_a_resource_is_observed_by_label_and_name(kube: FakeKube, cluster: Cluster) -> None:
    """Pods and children of others, and nodes that the selector doesn't match, are not."""
    other = make_pod_object("x")
    other["metadata"]["labels"]["elasticmoe.io/deployment"] = "other"
    for obj in (make_pod_object("w"), make_pod_object("c", "coordinator"), other):
        kube.add(obj)
    kube.add(make_node_object("n2", "2Ki", gpu="yes"))
    kube.add(make_node_object("n1", "1Ki", gpu="yes"))
    kube.add(make_node_object("n3", "1Ki", gpu="no"))
    owned = {"namespace": "default", "ownerReferences": [{"uid": "uid-1"}]}
    kube.add({"kind": "Deployment", "metadata": {"name": "tiny-worker", **owned}})
    kube.add({"kind": "DaemonSet", "metadata": {"name": "tiny-coordinator", "namespace": "default"}})
    observed = cluster.observe(make_resource(), make_spec(nodeSelector={"gpu": "yes"}))
    assert [pod.name for pod in (*observed.workers, *observed.coordinators)] == ["w", "c"]
    assert observed.nodes == (Node("n1", 1024), Node("n2", 2048))
    assert observed.worker_deployment is not None
    assert observed.coordinator_daemonset is None
    assert (observed.identity, observed.is_leaving, observed.previous_status) == (IDENTITY, False, {})


def test_without_a_spec_no_node_is_looked_at(kube: FakeKube, cluster: Cluster) -> None:
    """An empty selector means all, but for those whose taints keep coordinators off."""
    kube.add(make_node_object("n1", "1Ki"))
    tainted = make_node_object("n2", "1Ki")
    tainted["spec"] = {"taints": [{"key": "a", "effect": "NoSchedule"}]}
    kube.add(tainted)
    assert cluster.observe(make_resource(), None).nodes == ()
    everywhere = cluster.observe(make_resource(), make_spec(nodeSelector={}))
    assert [node.name for node in everywhere.nodes] == ["n1"]


def test_an_object_is_applied_and_applied_again(kube: FakeKube, cluster: Cluster) -> None:
    """By server-side apply under our field manager, with force."""
    cluster.apply(build_service(IDENTITY))
    cluster.apply(build_service(IDENTITY))
    assert kube.find("Service", "tiny")["spec"]["ports"][0]["port"] == 8000
    assert kube.calls == [("apply", "Service", "tiny")] * 2


@pytest.mark.parametrize("owners", [None, [{"uid": "another"}]])
def test_an_object_of_another_owner_is_never_taken_over(
    kube: FakeKube, cluster: Cluster, owners: list[dict[str, str]] | None
) -> None:
    """Force would."""
    theirs = {"kind": "Service", "metadata": {"name": "tiny", "namespace": "default", "ownerReferences": owners}}
    kube.add(theirs)
    with pytest.raises(ForeignObjectError, match=r"^need Service tiny in default, another has it; rename or delete it"):
        cluster.apply(build_service(IDENTITY))
    assert kube.find("Service", "tiny") == theirs


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (422, '{"message": "spec.ports: Required"}', "Service tiny: spec.ports: Required"),
        (500, f'{{"message": "{UNTYPED}: .spec.prots: field not declared in schema"}}', ".spec.prots: field not"),
        (500, f'{{"message": "{UNTYPED}: .spec.selector: expected map, got &{{x}}"}}', ".spec.selector: expected map"),
        (500, f'{{"message": "{UNTYPED}: .spec.ports: duplicate entries for key [port=1]"}}', ".spec.ports: duplicate"),
        (400, "not JSON", "Service tiny: as the test wants"),
        (422, None, "Service tiny: as the test wants"),
    ],
)
def test_an_object_that_the_server_finds_invalid_is_told_in_its_words(
    kube: FakeKube, cluster: Cluster, status: int, body: str | None, message: str
) -> None:
    """A pod template is the user's own, and only the server knows all of its fields."""
    kube.failing["Service"], kube.body = status, body
    with pytest.raises(RefusedObjectError, match=message):
        cluster.apply(build_service(IDENTITY))


@pytest.mark.parametrize(
    ("kind", "path", "told"),
    [
        ("Deployment", "tolerations[0].key", "spec.tolerations: mend it here or in spec.podTemplate"),
        ("Deployment", "containers[1].tty", "spec.podTemplate: mend it here"),
        ("DaemonSet", "containers[0].image", "spec.coordinator.image: mend it here"),
    ],
)
def test_a_refused_object_is_told_with_the_field_that_it_comes_from(
    kube: FakeKube, cluster: Cluster, kind: str, path: str, told: str
) -> None:
    """And what to do about it: a Deployment's pods are also the pod template's."""
    (manifest,) = [child for child in build_desired(IDENTITY, make_spec(), IMAGES) if child["kind"] == kind]
    said = f"spec.template.spec.{path}: Invalid value"
    kube.failing[kind], kube.body = 422, f'{{"message": "{said}"}}'
    with pytest.raises(RefusedObjectError) as refusal:
        cluster.apply(manifest)
    field, _, advice = told.partition(": ")
    assert refusal.value.field == field
    assert str(refusal.value) == f"the API server refuses {kind} {manifest['metadata']['name']}: {said}; {advice}"


def test_a_server_that_fails_finds_nothing_invalid(kube: FakeKube, cluster: Cluster) -> None:
    """The next pass tries again."""
    kube.failing["Service"] = 500
    with pytest.raises(ApiException, match="500"):
        cluster.apply(build_service(IDENTITY))


def test_a_limit_is_an_annotation_of_a_live_pod(kube: FakeKube, cluster: Cluster) -> None:
    """What else the pod has stays."""
    kube.add(make_pod_object("w"))
    cluster.set_limit(make_pod("w"), "default", 7)
    metadata = kube.find("Pod", "w")["metadata"]
    assert metadata["annotations"] == {LIMIT: "7"}
    assert metadata["labels"]["elasticmoe.io/deployment"] == "tiny"


def test_a_limit_is_taken_away_with_its_annotation(kube: FakeKube, cluster: Cluster) -> None:
    """Null in a merge patch removes the key."""
    kube.add(make_pod_object("w"))
    cluster.set_limit(make_pod("w"), "default", 7)
    cluster.set_limit(make_pod("w"), "default", None)
    assert kube.find("Pod", "w")["metadata"]["annotations"] == {}


def test_a_pod_that_has_gone_needs_no_limit(kube: FakeKube, cluster: Cluster) -> None:
    """Any other refusal is an error."""
    cluster.set_limit(make_pod("gone"), "default", 7)
    kube.add(make_pod_object("w"))
    kube.failing["Pod"] = 403
    with pytest.raises(ApiException, match="403"):
        cluster.set_limit(make_pod("w"), "default", 7)


def test_a_status_replaces_the_former_one(kube: FakeKube, cluster: Cluster) -> None:
    """Through the subresource, which leaves the spec alone."""
    cluster.write_status(IDENTITY, {"replicas": 1})
    cluster.write_status(IDENTITY, {"readyReplicas": 1})
    resource = kube.find("ElasticMoEDeployment", "tiny")
    assert (resource["status"], resource["spec"]) == ({"readyReplicas": 1}, make_resource()["spec"])


def test_a_resource_that_has_gone_needs_no_status(kube: FakeKube, cluster: Cluster) -> None:
    """Any other refusal is an error."""
    kube.objects.clear()
    cluster.write_status(IDENTITY, {"replicas": 1})
    assert kube.objects == {}
    kube.add(make_resource())
    kube.failing["ElasticMoEDeployment"] = 422
    with pytest.raises(ApiException, match="422"):
        cluster.write_status(IDENTITY, {"replicas": 1})


def test_an_event_is_created_beside_its_resource(kube: FakeKube, cluster: Cluster) -> None:
    """In the same namespace."""
    event = {"metadata": {"namespace": "default"}, "reason": "Why"}
    cluster.post_event(event)
    assert kube.events == [event]
