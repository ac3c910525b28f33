"""The next step of a rollout: which of the desired objects are applied now.

What serves keeps serving while a change could only end it: a pool that fits no node is not rolled out.
"""

from collections.abc import Sequence
from typing import Final

from elasticmoe.operator.builders.names import Manifest
from elasticmoe.operator.observed import Object, Observed
from elasticmoe.operator.spec.quantity import parse_quantity

_ROLLS: Final = frozenset({"DaemonSet", "Deployment"})


def next_step(desired: Sequence[Manifest], observed: Observed, need_bytes: int) -> tuple[Manifest, ...]:
    """Return what to apply in this pass; nothing of a resource that is being deleted, lest it come back."""
    if observed.is_leaving:
        return ()
    if would_end_serving(observed, need_bytes):
        return tuple(manifest for manifest in desired if manifest["kind"] not in _ROLLS)
    return tuple(desired)


def would_end_serving(observed: Observed, need_bytes: int) -> bool:
    """Return whether there is a pool that fits, and the new one would fit none of the nodes."""
    daemonset = observed.coordinator_daemonset
    current = None if daemonset is None else pool_request(daemonset)
    if current is None or not observed.nodes or need_bytes <= current:
        return False
    return len(observed.small_nodes(need_bytes)) == len(observed.nodes)


def pool_request(daemonset: Object) -> int | None:
    """Return the memory that a coordinator DaemonSet's pods request; None if somebody took that out of it."""
    for container in daemonset["spec"]["template"]["spec"]["containers"]:
        if container["name"] == "main":
            memory = container.get("resources", {}).get("requests", {}).get("memory")
            return None if memory is None else parse_quantity(memory)
    return None
