"""The Service in front of a deployment's workers."""

from elasticmoe.operator.builders.names import Manifest, metadata, selector
from elasticmoe.operator.observed import Identity
from elasticmoe.runtime.contract.labels import WORKER, WORKER_PORT


def build_service(identity: Identity) -> Manifest:
    """Return the Service; it has the custom resource's own name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(identity, identity.name, WORKER),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(identity, WORKER),
            "ports": [{"name": "http", "port": WORKER_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def service_url(identity: Identity) -> str:
    """Return where the model is served inside the cluster."""
    return f"http://{identity.name}.{identity.namespace}.svc:{WORKER_PORT}"
