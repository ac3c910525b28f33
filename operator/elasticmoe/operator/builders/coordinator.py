"""The coordinator's DaemonSet: one on each node that the deployment may use, CPU-only, with the host pool's memory."""

from typing import Any, Final

from elasticmoe.operator.builders.names import Manifest, child_name, labels, metadata, selector
from elasticmoe.operator.builders.pod import (
    TELLS_FROM_LOG,
    DefaultImages,
    ModelSource,
    common_env,
    common_mounts,
    common_pod_spec,
    common_volumes,
    container_security,
    find_model,
)
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.operator.spec.quantity import parse_quantity
from elasticmoe.runtime.contract.labels import (
    COORDINATOR,
    RUN_AS_USER,
    SOCKET_NAME,
    socket_dir,
)
from elasticmoe.runtime.contract.pool_names import METRICS_PORT

_DRAIN_S: Final = 20
"""How long a coordinator that is told to end stays for its workers."""
_OWN_FOLDER: Final = "import os, sys; os.chown(sys.argv[1], int(sys.argv[2]), int(sys.argv[2]))"


def coordinator_bytes(spec: ElasticMoESpec) -> int:
    """Return the memory that one coordinator requests: the pool and its headroom."""
    pool = spec.memory.host_pool
    return parse_quantity(pool.size) + parse_quantity(pool.headroom)


def build_coordinator_daemonset(identity: Identity, spec: ElasticMoESpec, images: DefaultImages) -> Manifest:
    """Return the DaemonSet."""
    model = find_model(spec.model.uri)
    pod_spec = {
        **common_pod_spec(identity, spec),
        "terminationGracePeriodSeconds": _DRAIN_S + 10,
        "initContainers": [_folder_owner(identity, spec, images)],
        "containers": [_main(identity, spec, images, model)],
        "volumes": common_volumes(identity, model),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(identity, child_name(identity, COORDINATOR), COORDINATOR),
        "spec": {
            "selector": {"matchLabels": selector(identity, COORDINATOR)},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": labels(identity, COORDINATOR)}, "spec": pod_spec},
        },
    }


def _main(identity: Identity, spec: ElasticMoESpec, images: DefaultImages, model: ModelSource) -> Manifest:
    image = spec.coordinator.image or images.coordinator
    probe = {"httpGet": {"path": "/metrics", "port": "metrics"}, "timeoutSeconds": 5}
    return {
        "name": "main",
        "image": image.reference,
        "imagePullPolicy": image.pull_policy,
        "terminationMessagePolicy": TELLS_FROM_LOG,
        "command": ["elasticmoe", "coordinator"],
        "args": _args(identity, model),
        "env": [*common_env(), {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}],
        "resources": coordinator_resources(spec),
        "readinessProbe": {**probe, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "securityContext": container_security(),
        "volumeMounts": common_mounts(identity, model),
    }


def _args(identity: Identity, model: ModelSource) -> list[str]:
    flags = {
        "--socket": socket_dir(identity.namespace, identity.name) / SOCKET_NAME,
        "--model": model.argument,
        "--metrics-port": METRICS_PORT,
        "--drain-s": _DRAIN_S,
    }
    return [str(word) for pair in flags.items() for word in pair]


def coordinator_resources(spec: ElasticMoESpec) -> dict[str, Any]:
    """Return its resources; memory is requested and limited alike, because the pool's pages are charged to it."""
    memory = {"memory": str(coordinator_bytes(spec))}
    given = spec.coordinator.resources
    return {"requests": {"cpu": "100m", **given.requests, **memory}, "limits": {**given.limits, **memory}}


def _folder_owner(identity: Identity, spec: ElasticMoESpec, images: DefaultImages) -> Manifest:
    """Return the init container that gives the socket's folder to our user: the kubelet makes it root's."""
    folder = str(socket_dir(identity.namespace, identity.name))
    image = spec.coordinator.image or images.coordinator
    security = container_security()
    security["capabilities"] |= {"add": ["CHOWN"]}
    return {
        "name": "own-folder",
        "image": image.reference,
        "imagePullPolicy": image.pull_policy,
        "terminationMessagePolicy": TELLS_FROM_LOG,
        "command": ["python3", "-c", _OWN_FOLDER, folder, str(RUN_AS_USER)],
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": {**security, "runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False},
        "volumeMounts": [{"name": "pool", "mountPath": folder}],
    }
