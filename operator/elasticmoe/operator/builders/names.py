"""Names, labels and owner references of a deployment's children."""

from typing import Any, Final

from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.runtime.contract.labels import COMPONENT_LABEL, DEPLOYMENT_LABEL, GROUP, KIND, VERSION

Manifest = dict[str, Any]
MANAGER: Final = "elasticmoe-operator"


def child_name(identity: Identity, component: str) -> str:
    """Return the name of the child of that component."""
    return f"{identity.name}-{component}"


def selector(identity: Identity, component: str) -> dict[str, str]:
    """Return the labels that find the pods of one component; they never change."""
    return {DEPLOYMENT_LABEL: identity.name, COMPONENT_LABEL: component}


def labels(identity: Identity, component: str) -> dict[str, str]:
    """Return all labels of a child."""
    return {
        "app.kubernetes.io/name": "elasticmoe",
        "app.kubernetes.io/instance": identity.name,
        "app.kubernetes.io/managed-by": MANAGER,
        **selector(identity, component),
    }


def metadata(identity: Identity, name: str, component: str) -> Manifest:
    """Return a child's metadata; its owner is the custom resource, so it goes when that goes."""
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": identity.name,
        "uid": identity.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {
        "name": name,
        "namespace": identity.namespace,
        "labels": labels(identity, component),
        "ownerReferences": [owner],
    }


def served_name(identity: Identity, spec: ElasticMoESpec) -> str:
    """Return the model's name in the API."""
    return spec.model.served_name or identity.name
