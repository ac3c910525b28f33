"""The account of a deployment's pods; it may do nothing."""

from elasticmoe.operator.builders.names import Manifest, metadata
from elasticmoe.operator.observed import Identity
from elasticmoe.runtime.contract.labels import WORKER


def service_account_name(identity: Identity) -> str:
    """Return the account's name."""
    return f"{identity.name}-elasticmoe"


def build_service_account(identity: Identity) -> Manifest:
    """Return the ServiceAccount."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(identity, service_account_name(identity), WORKER),
        "automountServiceAccountToken": False,
    }
