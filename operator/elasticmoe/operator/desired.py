"""From a spec to the objects that should exist, in the order in which they are applied."""

import re
from typing import Final

from elasticmoe.operator.builders.coordinator import build_coordinator_daemonset
from elasticmoe.operator.builders.names import Manifest
from elasticmoe.operator.builders.pod import DefaultImages
from elasticmoe.operator.builders.service import build_service
from elasticmoe.operator.builders.service_account import build_service_account
from elasticmoe.operator.builders.worker import build_worker_deployment
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import ElasticMoESpec

_SOURCES: Final = {
    "tolerations": ("spec.tolerations", "spec.tolerations"),
    "nodeSelector": ("spec.nodeSelector", "spec.nodeSelector"),
    "imagePullSecrets": ("spec.imagePullSecrets", "spec.imagePullSecrets"),
    "terminationGracePeriodSeconds": ("spec.termination", "spec.coordinator"),
    "lifecycle": ("spec.termination", "spec.coordinator"),
    "env": ("spec.env", "spec.coordinator"),
    "resources": ("spec.resources", "spec.coordinator.resources"),
    "image": ("spec.image", "spec.coordinator.image"),
    "volumes": ("spec.podTemplate.spec.volumes", "spec.model.uri"),
    "volumeMounts": ("spec.podTemplate", "spec.model.uri"),
}
"""A pod's fields, and ours that they come from: in the workers' Deployment, in the coordinators' DaemonSet."""
_FIELD: Final = re.compile(rf"\.({'|'.join(_SOURCES)})\b")


def blame(kind: str, message: str) -> str:
    """Return the field of the spec that a child comes from which the API server refuses in such words."""
    found = _FIELD.search(message)
    worker, coordinator = _SOURCES[found[1]] if found else ("spec.podTemplate", "spec.coordinator")
    return {"Deployment": worker, "DaemonSet": coordinator}.get(kind, "spec")


def build_desired(identity: Identity, spec: ElasticMoESpec, images: DefaultImages) -> tuple[Manifest, ...]:
    """Return every child of a custom resource; the same spec gives the same objects, so that nothing rolls in vain."""
    return (
        build_service_account(identity),
        build_coordinator_daemonset(identity, spec, images),
        build_service(identity),
        build_worker_deployment(identity, spec, images),
    )
