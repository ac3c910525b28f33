"""Parts that the pods of workers and coordinators share: who they run as, the model's folder, the socket's folder."""

from dataclasses import dataclass
from typing import Any, Final

from elasticmoe.operator.builders.names import Manifest
from elasticmoe.operator.builders.service_account import service_account_name
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import ElasticMoESpec, Image, Section
from elasticmoe.runtime.contract.labels import RUN_AS_USER, socket_dir

MODEL_DIR: Final = "/models/checkpoint"
HOME: Final = "/scratch"
"""The only folders that a pod can write to are this one, /tmp and /dev/shm."""
TELLS_FROM_LOG: Final = "FallbackToLogsOnError"
"""Of a container that fails, the pod's status has the end of its log; so has a condition of ours then."""


@dataclass(frozen=True, slots=True)
class DefaultImages:
    """What the operator runs where a resource names no image."""

    runtime: Image
    coordinator: Image


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a container finds the model; workers and coordinators spell the folder alike."""

    volume: Manifest
    mount: Manifest
    argument: str = MODEL_DIR


def find_model(uri: str) -> ModelSource:
    """Return what a model's URI means for a container."""
    scheme, _, rest = uri.partition("://")
    mount: Manifest = {"name": "model", "mountPath": MODEL_DIR, "readOnly": True}
    if scheme == "path":
        volume: Manifest = {"hostPath": {"path": rest, "type": "Directory"}}
    else:
        claim, _, folder = rest.partition("/")
        volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        mount |= {"subPath": folder} if folder else {}
    return ModelSource({"name": "model", **volume}, mount)


def plain(section: Section) -> Any:  # noqa: ANN401 -- JSON
    """Return a part of the spec as Kubernetes writes it, without what is unset."""
    return section.model_dump(by_alias=True, exclude_none=True, mode="json")


def container_security() -> Manifest:
    """Return the security context of a container that needs no privilege."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def common_pod_spec(identity: Identity, spec: ElasticMoESpec) -> Manifest:
    """Return what the pods of both components have alike."""
    return {
        "serviceAccountName": service_account_name(identity),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": RUN_AS_USER,
            "runAsGroup": RUN_AS_USER,
            "fsGroup": RUN_AS_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "nodeSelector": dict(spec.node_selector),
        "tolerations": [plain(toleration) for toleration in spec.tolerations],
    }


def common_volumes(identity: Identity, model: ModelSource) -> list[Manifest]:
    """Return the volumes of both components: the model, the socket's folder on the node, and room to write."""
    folder = str(socket_dir(identity.namespace, identity.name))
    return [
        model.volume,
        {"name": "pool", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]


def common_mounts(identity: Identity, model: ModelSource) -> list[Manifest]:
    """Return the mounts of both components' main container."""
    return [
        model.mount,
        {"name": "pool", "mountPath": str(socket_dir(identity.namespace, identity.name))},
        {"name": "scratch", "mountPath": HOME},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 -- a folder of the container's own
    ]


def common_env() -> list[Manifest]:
    """Return the environment of both components: where they may write."""
    return [{"name": "HOME", "value": HOME}]
