"""Small API objects for the operator's tests: a custom resource, pods, nodes, and what controllers report."""

from typing import Any

from elasticmoe.operator.builders.pod import DefaultImages
from elasticmoe.operator.observed import Identity, Pod
from elasticmoe.operator.spec.model import ElasticMoESpec, Image
from elasticmoe.operator.spec.parse import parse_spec

Object = dict[str, Any]
IDENTITY = Identity("tiny", "default", "uid-1", generation=3)
IMAGES = DefaultImages(Image(repository="runtime", tag="1"), Image(repository="coordinator", tag="1"))
SPEC: Object = {"model": {"uri": "path:///models/tiny"}, "memory": {"hostPool": {"size": "1Gi"}}}
LIMIT = "elasticmoe.io/expert-offload-limit"


def make_spec(**fields: Any) -> ElasticMoESpec:  # noqa: ANN401 -- any field
    """Return the least spec with some fields of its own."""
    return parse_spec({**SPEC, **fields})


def offload(**fields: Any) -> Object:  # noqa: ANN401 -- any field
    """Return spec.memory with such an expertOffload."""
    return {"hostPool": {"size": "1Gi"}, "expertOffload": fields}


def make_resource(**fields: Any) -> Object:  # noqa: ANN401 -- any field
    """Return the custom resource of IDENTITY with some fields of its own."""
    metadata = {"name": "tiny", "namespace": "default", "uid": "uid-1", "generation": 3, "resourceVersion": "7"}
    kind = {"apiVersion": "elasticmoe.io/v1alpha1", "kind": "ElasticMoEDeployment"}
    return {**kind, "metadata": metadata, "spec": {**SPEC, **fields}}


def make_pod_object(name: str, component: str = "worker", *, node: str | None = "n1", is_ready: bool = True) -> Object:
    """Return a Pod as the API has it."""
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "labels": {"elasticmoe.io/deployment": "tiny", "app.kubernetes.io/component": component},
    }
    conditions = [{"type": "Ready", "status": str(is_ready)}, {"type": "PodScheduled", "status": str(node is not None)}]
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": node}, "status": status}


def make_pod(name: str = "w", **fields: Any) -> Pod:  # noqa: ANN401 -- any field
    """Return a ready pod on node n1."""
    plain: Object = {
        "uid": f"uid-{name}",
        "node": "n1",
        "ip": "10.0.0.1",
        "is_ready": True,
        "is_leaving": False,
        "limit": None,
        "unschedulable": None,
        "wanted_node": None,
    }
    return Pod(name, **{**plain, **fields})


def make_node_object(name: str, memory: str, **labels: str) -> Object:
    """Return a Node with so much allocatable memory."""
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"allocatable": {"memory": memory}}}


def make_deployment(*, wanted: int = 1, ready: int = 1, updated: int | None = None, generation: int = 1) -> Object:
    """Return a worker Deployment as its controller reports it, which has seen generation 1."""
    status = {
        "observedGeneration": 1,
        "replicas": wanted,
        "readyReplicas": ready,
        "updatedReplicas": wanted if updated is None else updated,
        "availableReplicas": ready,
    }
    return {"metadata": {"generation": generation}, "spec": {"replicas": wanted}, "status": status}


def make_daemonset(
    *, wanted: int = 1, ready: int = 1, updated: int | None = None, memory: str = "1Gi", generation: int = 1
) -> Object:
    """Return a coordinator DaemonSet as its controller reports it, which has seen generation 1."""
    status = {
        "observedGeneration": 1,
        "desiredNumberScheduled": wanted,
        "numberReady": ready,
        "updatedNumberScheduled": wanted if updated is None else updated,
    }
    containers = [{"name": "main", "resources": {"requests": {"memory": memory}}}]
    return {
        "metadata": {"generation": generation},
        "spec": {"template": {"spec": {"containers": containers}}},
        "status": status,
    }
