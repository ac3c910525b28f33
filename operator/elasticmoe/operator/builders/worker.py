"""The workers' Deployment: vLLM with our plugin; no offload limit is in the pod template (LIMIT_ANNOTATION)."""

from typing import Any, Final

from elasticmoe.operator.builders.merge import merge
from elasticmoe.operator.builders.names import Manifest, child_name, labels, metadata, selector, served_name
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
    plain,
)
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import ElasticMoESpec, Resources
from elasticmoe.operator.spec.quantity import parse_quantity
from elasticmoe.runtime.contract.labels import (
    COORDINATOR,
    LIMIT_ANNOTATION,
    LIMIT_FILE,
    PODINFO_DIR,
    SOCKET_NAME,
    WORKER,
    WORKER_PORT,
    socket_dir,
)

GPU: Final = "nvidia.com/gpu"
_PROBE_PERIOD_S: Final = 2
"""Of the startup probe: as long as a worker that has started may stay unnoticed."""


def build_worker_deployment(identity: Identity, spec: ElasticMoESpec, images: DefaultImages) -> Manifest:
    """Return the Deployment, with the user's pod template merged in."""
    template = {
        "metadata": {"labels": labels(identity, WORKER)},
        "spec": _pod_spec(identity, spec, images),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(identity, child_name(identity, WORKER), WORKER),
        "spec": {
            "replicas": spec.replicas,
            "selector": {"matchLabels": selector(identity, WORKER)},
            "strategy": {"type": "Recreate"},  # a second pod would wait for the GPU that the first one holds
            "progressDeadlineSeconds": spec.probes.startup_budget_seconds + 600,
            "template": merge(template, spec.pod_template),
        },
    }


def _pod_spec(identity: Identity, spec: ElasticMoESpec, images: DefaultImages) -> Manifest:
    model = find_model(spec.model.uri)
    return {
        **common_pod_spec(identity, spec),
        "terminationGracePeriodSeconds": spec.termination.grace_period_seconds,
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_beside_a_pool(identity)]}},
        "containers": [_main(identity, spec, images, model)],
        "volumes": [*common_volumes(identity, model), *_worker_volumes(spec)],
    }


def _beside_a_pool(identity: Identity) -> Manifest:
    """Return the affinity that places a worker only where a coordinator found room for the pool."""
    return {
        "labelSelector": {"matchLabels": selector(identity, COORDINATOR)},
        "topologyKey": "kubernetes.io/hostname",
    }


def _worker_volumes(spec: ElasticMoESpec) -> list[Manifest]:
    limit = {"path": LIMIT_FILE.name, "fieldRef": {"fieldPath": f"metadata.annotations['{LIMIT_ANNOTATION}']"}}
    return [
        {"name": "podinfo", "downwardAPI": {"items": [limit]}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.memory.shm_size}},
    ]


def _main(identity: Identity, spec: ElasticMoESpec, images: DefaultImages, model: ModelSource) -> Manifest:
    image = spec.image or images.runtime
    return {
        "name": "main",
        "image": image.reference,
        "imagePullPolicy": image.pull_policy,
        "terminationMessagePolicy": TELLS_FROM_LOG,
        "command": ["elasticmoe", "serve"],
        "args": _args(identity, spec, model),
        "env": _env(spec),
        "ports": [{"name": "http", "containerPort": WORKER_PORT, "protocol": "TCP"}],
        "resources": plain(_resources(spec)),
        **_probes(spec.probes.startup_budget_seconds),
        **_drain(spec.termination.drain_seconds),
        "securityContext": container_security(),
        "volumeMounts": [
            *common_mounts(identity, model),
            {"name": "podinfo", "mountPath": str(PODINFO_DIR), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 -- shared memory of the pod's own
        ],
    }


def _args(identity: Identity, spec: ElasticMoESpec, model: ModelSource) -> list[str]:
    """Return the command line of `elasticmoe serve`; the user's flags come last."""
    memory = spec.memory
    flags: dict[str, Any] = {
        "--served-model-name": served_name(identity, spec),
        "--host": "0.0.0.0",  # noqa: S104 -- the pod's own network
        "--port": WORKER_PORT,
        "--tensor-parallel-size": spec.parallelism.tensor,
        "--shutdown-timeout": spec.termination.shutdown_timeout_seconds,
        "--elastic-policy": memory.expert_offload.policy,
        "--elastic-limit-file": LIMIT_FILE,
        "--elastic-transport": "map",
        "--elastic-socket": socket_dir(identity.namespace, identity.name) / SOCKET_NAME,
    }
    if spec.slo.tpot_milliseconds is not None:
        flags["--elastic-tpot-ms"] = spec.slo.tpot_milliseconds
    if spec.slo.ttft_milliseconds is not None:
        flags["--elastic-ttft-ms"] = spec.slo.ttft_milliseconds
    if memory.arena is not None:
        flags["--elastic-arena-bytes"] = parse_quantity(memory.arena)
    return [model.argument, *(str(word) for pair in flags.items() for word in pair), *spec.engine_args]


def _env(spec: ElasticMoESpec) -> list[Manifest]:
    """Return the environment; the user's own wins, and a worker without a GPU sees none."""
    limits = _resources(spec).limits
    hidden = [] if GPU in limits else [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    own = {item["name"]: item for item in [*common_env(), *hidden]}
    return list((own | {item.name: plain(item) for item in spec.env}).values())


def _resources(spec: ElasticMoESpec) -> Resources:
    """Return the worker's resources: one GPU for each tensor-parallel rank, if the spec says nothing."""
    if spec.resources is not None:
        return spec.resources
    gpus = {GPU: str(spec.parallelism.tensor)}
    return Resources(requests=gpus, limits=gpus)


def _probes(startup_budget_s: int) -> Manifest:
    probe = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    failures = -(-startup_budget_s // _PROBE_PERIOD_S)
    return {
        "startupProbe": {**probe, "periodSeconds": _PROBE_PERIOD_S, "failureThreshold": failures},
        "readinessProbe": {**probe, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
    }


def _drain(seconds: int) -> Manifest:
    """Return the pause between leaving the Service and SIGTERM; Kubernetes refuses a sleep of nothing."""
    return {"lifecycle": {"preStop": {"sleep": {"seconds": seconds}}}} if seconds else {}
