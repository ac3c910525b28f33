"""The status of a custom resource, rebuilt from what was observed.

Of the former one it keeps times of transition, and what only workers can tell while none does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from elasticmoe.operator.builders.coordinator import coordinator_bytes
from elasticmoe.operator.builders.names import child_name, selector
from elasticmoe.operator.builders.service import service_url
from elasticmoe.operator.causes import explain_no_pods, find_cause, find_refusal
from elasticmoe.operator.errors import SpecError
from elasticmoe.operator.observed import Object, Observed, Pod
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.operator.spec.quantity import show_bytes
from elasticmoe.runtime.contract.labels import COORDINATOR, WORKER

Truth = Literal["True", "False", "Unknown"]
_NO_MEMORY: Final = "Insufficient memory"
_NO_NODE: Final = (
    "want a node that spec.nodeSelector matches, without a taint that spec.tolerations doesn't name; there is none: "
    "label one or mend these fields"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, before it is known since when."""

    type: str
    status: Truth
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What planning found out: the spec or why there is none, the limit that workers get, and what is held back."""

    spec: ElasticMoESpec | SpecError
    limit: int | None = None
    autotuner: Object | None = None
    is_withheld: bool = False
    """Whether the spec is not rolled out, since its pool fits no node and a former one serves."""


def build_status(observed: Observed, verdict: Verdict, now: str) -> dict[str, Any]:
    """Return the whole status; the same observation gives the same one."""
    deployment = (observed.worker_deployment or {}).get("status", {})
    status = {
        "observedGeneration": observed.identity.generation,
        "replicas": deployment.get("replicas", 0),
        "readyReplicas": deployment.get("readyReplicas", 0),
        "updatedReplicas": deployment.get("updatedReplicas", 0),
        "availableReplicas": deployment.get("availableReplicas", 0),
        "selector": ",".join(f"{key}={value}" for key, value in sorted(selector(observed.identity, WORKER).items())),
        "url": service_url(observed.identity),
        "conditions": _stamp(build_conditions(observed, verdict), observed, now),
        "coordinators": [_coordinator(pod, observed) for pod in _by_node(observed.coordinators)],
        "pods": [_worker(pod, observed) for pod in observed.workers],
        "offloadLimit": verdict.limit,
        "expertsPerLayer": observed.num_experts,
        "autotuner": verdict.autotuner,
    }
    return {key: value for key, value in status.items() if value is not None}


def build_conditions(observed: Observed, verdict: Verdict) -> list[Condition]:
    """Return the conditions, Ready first."""
    if isinstance(verdict.spec, SpecError):
        valid = Condition("ConfigValid", "False", "InvalidSpec", str(verdict.spec))
        last_fit = _former(observed, "HostMemoryFit")
        return [_ready(observed, None), valid, _coordinators_ready(observed), *([last_fit] if last_fit else [])]
    return [
        _withheld(observed) if verdict.is_withheld else _ready(observed, verdict.spec),
        Condition("ConfigValid", "True", "Valid"),
        _coordinators_ready(observed),
        _host_memory_fit(observed, coordinator_bytes(verdict.spec)),
    ]


def _ready(observed: Observed, spec: ElasticMoESpec | None) -> Condition:
    """Return Ready: all pods of the newest template answer; with an invalid spec, those of the last good one."""
    deployment = observed.worker_deployment
    if deployment is None or _is_new(deployment):
        reason = "InvalidSpec" if spec is None else "Creating"
        return Condition("Ready", "False", reason, "there are no workers yet")
    wanted = deployment["spec"].get("replicas", 1)
    counts = deployment.get("status", {})
    updated, ready = counts.get("updatedReplicas", 0), counts.get("readyReplicas", 0)
    if (spec is not None and spec.replicas != wanted) or _is_stale(deployment):
        return Condition("Ready", "False", "RollingOut", "the newest spec has not reached the workers yet")
    if wanted == 0 and counts.get("replicas", 0) == 0:
        return Condition("Ready", "True", "ScaledToZero", "no replica is wanted and none runs")
    if updated >= wanted and ready >= wanted and counts.get("replicas", 0) == wanted:
        return Condition("Ready", "True", "PodsReady", f"{ready} of {wanted} pods are ready")
    return _not_ready(observed, deployment, f"{ready} of {wanted} pods are ready, {updated} of the newest template")


def _withheld(observed: Observed) -> Condition:
    """Return Ready of a spec that reaches no worker, whatever those of the former one do."""
    counts = (observed.worker_deployment or {}).get("status", {})
    message = (
        "the newest spec is not rolled out: its pool fits on no node (HostMemoryFit tells the numbers); "
        f"the former spec goes on serving, ready pods: {counts.get('readyReplicas', 0)}"
    )
    return Condition("Ready", "False", "SpecWithheld", message)


def _is_new(child: Object) -> bool:
    """Return whether the cluster has not looked at a child at all yet."""
    return child.get("status", {}).get("observedGeneration") is None


def _is_stale(deployment: Object) -> bool:
    """Return whether the cluster has not looked at the Deployment's newest spec yet."""
    seen: int = deployment.get("status", {}).get("observedGeneration", 0)
    newest: int = deployment["metadata"].get("generation", 0)
    return seen < newest


def _not_ready(observed: Observed, deployment: Object, counts: str) -> Condition:
    """Return Ready of workers that aren't, with what keeps them back."""
    cause = find_refusal(deployment) or find_cause(observed.workers, observed.identity.namespace)
    if cause is not None:
        return Condition("Ready", "False", cause.reason or "PodsNotReady", f"{counts}; {cause.message}")
    if any(pod.node for pod in observed.workers):
        return Condition("Ready", "False", "LoadingModel", counts)
    return Condition("Ready", "False", "PodsNotReady", counts)


def _coordinators_ready(observed: Observed) -> Condition:
    daemonset = observed.coordinator_daemonset
    if daemonset is None or _is_new(daemonset):
        return Condition("CoordinatorsReady", "False", "Creating", "there are no coordinators yet")
    counts = daemonset.get("status", {})
    wanted, ready = counts.get("desiredNumberScheduled", 0), counts.get("numberReady", 0)
    updated = counts.get("updatedNumberScheduled", 0)
    if _is_stale(daemonset):
        return Condition("CoordinatorsReady", "False", "RollingOut", "the newest spec has not reached them yet")
    if wanted == 0:
        return Condition("CoordinatorsReady", "False", "NoNodeMatches", _NO_NODE)
    message = f"{ready} of {wanted} coordinators are ready"
    if ready >= wanted and updated >= wanted:
        return Condition("CoordinatorsReady", "True", "CoordinatorsReady", message)
    if updated < wanted and observed.coordinators:
        message += f", {updated} of the newest spec"
        return _coordinators_late(observed, "RollingOut", message)
    return _coordinators_late(observed, "CoordinatorsNotReady", message)


def _coordinators_late(observed: Observed, reason: str, message: str) -> Condition:
    """Return CoordinatorsReady with the nodes that have no ready one and with what keeps it back, if that is known."""
    late = dict.fromkeys(place for pod in observed.coordinators if not pod.is_ready and (place := _place(pod)))
    cause = find_cause(observed.coordinators, observed.identity.namespace)
    parts = [message]
    if late:
        parts.append(f"not on {', '.join(late)}")
    if cause is not None:
        parts.append(cause.message)
        reason = cause.reason or reason
    if not observed.coordinators:
        parts.append(explain_no_pods(child_name(observed.identity, COORDINATOR), observed.identity.namespace))
    return Condition("CoordinatorsReady", "False", reason, "; ".join(parts))


def _host_memory_fit(observed: Observed, need_bytes: int) -> Condition:
    """Return whether each matching node has room for the pool: in its size, and in what the scheduler finds free."""
    if not observed.nodes:
        return Condition("HostMemoryFit", "Unknown", "NoNodeMatches", _NO_NODE)
    need = f"need {show_bytes(need_bytes)} (pool and headroom)"
    small = {node.name for node in observed.small_nodes(need_bytes)}
    full = {pod.wanted_node for pod in observed.coordinators if pod.unschedulable and _NO_MEMORY in pod.unschedulable}
    lacking = [
        f"{node.name}: {need}, allocatable {show_bytes(node.allocatable_bytes)}"
        + ("" if node.name in small else ", other pods have requested too much of it")
        for node in observed.nodes
        if node.name in small or node.name in full
    ]
    if lacking:
        message = "; ".join(lacking) + "; narrow spec.nodeSelector or free memory there"
        return Condition("HostMemoryFit", "False", "InsufficientMemory", message)
    return Condition("HostMemoryFit", "True", "Fits", f"{need} on each of {len(observed.nodes)} nodes")


def _place(pod: Pod) -> str | None:
    return pod.node or pod.wanted_node


def _by_node(pods: Sequence[Pod]) -> list[Pod]:
    """Return one pod for each node, in the order of nodes: one that leaves only if it has no successor."""
    placed = [(place, pod) for pod in pods if (place := _place(pod))]
    placed.sort(key=lambda pair: (pair[0], not pair[1].is_leaving))
    return list(dict(placed).values())


def _coordinator(pod: Pod, observed: Observed) -> dict[str, Any]:
    """Return a node's line; numbers that could not be read are left out."""
    line = {"nodeName": _place(pod), "podName": pod.name, "ready": pod.is_ready}
    sample = observed.samples.coordinators.get(pod.name)
    return line if sample is None else {**line, "poolBytes": sample.pool_bytes, "leases": sample.leases}


def _worker(pod: Pod, observed: Observed) -> dict[str, Any]:
    """Return a worker's line; numbers that could not be read are left out."""
    line: dict[str, Any] = {"name": pod.name, "ready": pod.is_ready}
    sample = observed.samples.workers.get(pod.name)
    if sample is not None:
        numbers = {
            "requestedLimit": sample.requested_limit,
            "effectiveLimit": sample.effective_limit,
            "residentExperts": sample.resident_experts,
        }
        line |= {key: value for key, value in numbers.items() if value is not None}
    return line


def _former(observed: Observed, kind: str) -> Condition | None:
    """Return a condition of the former status as it stood."""
    for kept in observed.previous_status.get("conditions", ()):
        if kept["type"] == kind:
            return Condition(kind, kept["status"], kept["reason"], kept.get("message", ""))
    return None


def _stamp(conditions: Sequence[Condition], observed: Observed, now: str) -> list[dict[str, Any]]:
    """Return conditions with the time since when each has its status: the former time if that did not change."""
    former = {kept["type"]: kept for kept in observed.previous_status.get("conditions", ())}
    stamped = []
    for condition in conditions:
        kept = former.get(condition.type, {})
        is_same = kept.get("status") == condition.status
        stamped.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "observedGeneration": observed.identity.generation,
                "lastTransitionTime": kept["lastTransitionTime"] if is_same else now,
            }
        )
    return stamped


def transitions(former: Object, status: Object) -> list[Condition]:
    """Return the conditions whose status is not what it was."""
    before = {kept["type"]: kept["status"] for kept in former.get("conditions", ())}
    return [
        Condition(new["type"], new["status"], new["reason"], new["message"])
        for new in status["conditions"]
        if before.get(new["type"]) != new["status"]
    ]
