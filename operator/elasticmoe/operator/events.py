"""Events about a custom resource, on transitions only: a condition that turned, a limit that moved."""

from typing import Any, Final

from elasticmoe.operator.builders.names import MANAGER
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.status import Condition
from elasticmoe.runtime.contract.labels import GROUP, KIND, VERSION

LIMIT_CHANGED: Final = "OffloadLimitChanged"
_FAULTS: Final = frozenset({"ConfigValid", "HostMemoryFit"})
_MAX_MESSAGE: Final = 1024


def condition_event(identity: Identity, condition: Condition, now: str) -> dict[str, Any]:
    """Return the Event of a condition that turned; a fault that a user must mend is a warning."""
    is_fault = condition.status == "False" and condition.type in _FAULTS
    message = f"{condition.type} is {condition.status}: {condition.message or condition.reason}"
    return build_event(identity, condition.reason, message, now, kind="Warning" if is_fault else "Normal")


def limit_event(identity: Identity, before: int, after: int, reason: str, now: str) -> dict[str, Any]:
    """Return the Event of a limit that the autotuner moved."""
    return build_event(identity, LIMIT_CHANGED, f"offload limit {before} → {after}: {reason}", now)


def build_event(identity: Identity, reason: str, message: str, now: str, kind: str = "Normal") -> dict[str, Any]:
    """Return an Event about a custom resource."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{identity.name}-", "namespace": identity.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": identity.name,
            "namespace": identity.namespace,
            "uid": identity.uid,
        },
        "type": kind,
        "reason": reason,
        "message": message[:_MAX_MESSAGE],
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": MANAGER,
    }
