"""From a spec to the objects that should exist, in the order in which they are applied."""

from elasticmoe.operator.builders.coordinator import build_coordinator_daemonset
from elasticmoe.operator.builders.names import Manifest
from elasticmoe.operator.builders.pod import DefaultImages
from elasticmoe.operator.builders.service import build_service
from elasticmoe.operator.builders.service_account import build_service_account
from elasticmoe.operator.builders.worker import build_worker_deployment
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import ElasticMoESpec


def build_desired(identity: Identity, spec: ElasticMoESpec, images: DefaultImages) -> tuple[Manifest, ...]:
    """Return every child of a custom resource; the same spec gives the same objects, so that nothing rolls in vain."""
    return (
        build_service_account(identity),
        build_coordinator_daemonset(identity, spec, images),
        build_service(identity),
        build_worker_deployment(identity, spec, images),
    )
