"""Kubernetes names that operator, coordinator and runtime share: group, labels, annotations, paths in a pod, ports."""

from pathlib import PurePosixPath

GROUP = "elasticmoe.io"
VERSION = "v1alpha1"
KIND = "ElasticMoEDeployment"
PLURAL = "elasticmoedeployments"

DEPLOYMENT_LABEL = "elasticmoe.io/deployment"
"""On every object of a custom resource; its value is the resource's name."""
COMPONENT_LABEL = "app.kubernetes.io/component"
WORKER = "worker"
COORDINATOR = "coordinator"

LIMIT_ANNOTATION = "elasticmoe.io/expert-offload-limit"
"""On live worker pods only, never in a pod template: a tuned limit must not roll pods."""
PODINFO_DIR = PurePosixPath("/etc/elasticmoe/podinfo")
"""A downward API volume, mounted as a whole: a subPath would not be updated."""
LIMIT_FILE = PODINFO_DIR / "expert-offload-limit"

SOCKET_ROOT = PurePosixPath("/run/elasticmoe")
SOCKET_NAME = "pool.sock"

WORKER_PORT = 8000
RUN_AS_USER = 10001
"""User and group of worker and coordinator; the images have them in passwd."""

EXPERTS_PER_LAYER = "elasticmoe_experts_per_layer"
"""Gauge: routed experts of one layer, what a limit in per cent is a share of."""


def socket_dir(namespace: str, name: str) -> PurePosixPath:
    """Return the folder on the node that one deployment's coordinator and workers share."""
    return SOCKET_ROOT / namespace / name
