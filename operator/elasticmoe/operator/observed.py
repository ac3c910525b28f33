"""What the cluster holds for one custom resource, as frozen values made from plain API objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from elasticmoe.operator.spec.model import Toleration
from elasticmoe.operator.spec.quantity import parse_quantity
from elasticmoe.runtime.contract.labels import COMPONENT_LABEL, COORDINATOR, LIMIT_ANNOTATION, WORKER

Object = Mapping[str, Any]
"""An API object as JSON."""

_BARRING: Final = frozenset({"NoSchedule", "NoExecute"})
_PASSING: Final = "node.kubernetes.io/"
"""Taints that say how a node fares; DaemonSets tolerate them by themselves."""
_REPORT_LAG_S: Final = 10.0
"""The kubelet may tell that a pod has ceased to be ready only after its container runs anew."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The custom resource that children belong to."""

    name: str
    namespace: str
    uid: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class PodSample:
    """One worker's metrics at one moment; counters since its start, histograms as cumulative counts by upper bound."""

    at_s: float
    waiting: float = 0.0
    generated_tokens: float = 0.0
    exposed_s: float = 0.0
    recovery_s: float = 0.0
    layers_at_limit: float = 0.0
    resident_experts: int | None = None
    requested_limit: int | None = None
    effective_limit: int | None = None
    experts_per_layer: int | None = None
    tpot_buckets: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolSample:
    """One coordinator's metrics at one moment."""

    pool_bytes: int
    leases: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Metrics by pod; one that could not be asked has none."""

    workers: Mapping[str, PodSample] = field(default_factory=dict)
    coordinators: Mapping[str, PoolSample] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class End:
    """How one run of a container ended."""

    exit_code: int
    reason: str
    """The kubelet's word, as OOMKilled."""
    message: str
    """The end of its log, if it failed."""
    ran_s: float


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod as the kubelet reports it, init containers too."""

    name: str
    is_ready: bool
    """Of an init container: it has done its work."""
    restarts: int = 0
    waiting: str | None = None
    """Why it does not run, in the kubelet's word."""
    waiting_message: str = ""
    end: End | None = None
    """Of this run."""
    past_end: End | None = None
    """Of the run before, unless the pod was ready in this one: then it says nothing of the present."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a deployment, worker or coordinator."""

    name: str
    uid: str
    node: str | None
    ip: str | None
    is_ready: bool
    is_leaving: bool
    limit: str | None
    """The annotation that says its offload limit."""
    unschedulable: str | None
    """Why the scheduler places it nowhere, in its words."""
    wanted_node: str | None
    """The node that a DaemonSet made it for."""
    containers: tuple[Container, ...] = ()
    """In the order in which they start; none before a kubelet has the pod."""


@dataclass(frozen=True, slots=True)
class Taint:
    """Keeps pods off a node that don't tolerate it."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node that the deployment's selector matches."""

    name: str
    allocatable_bytes: int
    taints: tuple[Taint, ...] = ()

    def takes(self, tolerations: Sequence[Toleration]) -> bool:
        """Return whether a DaemonSet with such tolerations places a pod here."""
        barring = (taint for taint in self.taints if taint.effect in _BARRING and not taint.key.startswith(_PASSING))
        return all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in barring)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    is_same_effect = toleration.effect in (None, taint.effect)
    if toleration.operator == "Exists":
        return is_same_effect and toleration.key in (None, taint.key)
    return is_same_effect and toleration.key == taint.key and (toleration.value or "") == taint.value


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a plan and a status are made from."""

    identity: Identity
    is_leaving: bool = False
    previous_status: Object = field(default_factory=dict)
    worker_deployment: Object | None = None
    coordinator_daemonset: Object | None = None
    workers: tuple[Pod, ...] = ()
    coordinators: tuple[Pod, ...] = ()
    nodes: tuple[Node, ...] = ()
    samples: Samples = Samples()

    @property
    def num_experts(self) -> int | None:
        """Return the experts of a layer that workers report; while none does, the last number, if there is one."""
        reported = (sample.experts_per_layer for sample in self.samples.workers.values())
        last: int | None = self.previous_status.get("expertsPerLayer")
        return max((number for number in reported if number is not None), default=last)

    def after(self, applied: Object) -> "Observed":
        """Return this with a child as it is since it was applied: what was seen before says nothing of the new spec."""
        match applied["kind"]:
            case "Deployment":
                return replace(self, worker_deployment=applied)
            case "DaemonSet":
                return replace(self, coordinator_daemonset=applied)
            case _:
                return self

    def small_nodes(self, need_bytes: int) -> tuple[Node, ...]:
        """Return the nodes whose allocatable memory is less than this."""
        return tuple(node for node in self.nodes if node.allocatable_bytes < need_bytes)


def parse_pod(obj: Object) -> Pod:
    """Return what matters of a Pod."""
    metadata, status = obj["metadata"], obj.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=obj["spec"].get("nodeName"),
        ip=status.get("podIP"),
        is_ready=ready.get("status") == "True",
        is_leaving="deletionTimestamp" in metadata,
        limit=(metadata.get("annotations") or {}).get(LIMIT_ANNOTATION),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else None,
        wanted_node=_wanted_node(obj["spec"]),
        containers=tuple(
            _parse_container(found, ready.get("lastTransitionTime"))
            for kind in ("initContainerStatuses", "containerStatuses")
            for found in status.get(kind) or ()
        ),
    )


def _parse_container(found: Object, turned: str | None) -> Container:
    """Return what matters of a container; `turned` is when its pod became ready or ceased to be."""
    state = found.get("state") or {}
    waiting = state.get("waiting")
    started = (state.get("running") or {}).get("startedAt")
    was_ready = started and turned and _seconds_between(started, turned) > _REPORT_LAG_S
    return Container(
        name=found["name"],
        is_ready=found["ready"],
        restarts=found["restartCount"],
        waiting=None if waiting is None else waiting.get("reason", ""),
        waiting_message=(waiting or {}).get("message", ""),
        end=_parse_end(state.get("terminated")),
        past_end=None if was_ready else _parse_end((found.get("lastState") or {}).get("terminated")),
    )


def _parse_end(terminated: Object | None) -> End | None:
    if terminated is None:
        return None
    started, finished = terminated.get("startedAt"), terminated.get("finishedAt")
    ran_s = _seconds_between(started, finished) if started and finished else 0.0
    return End(terminated["exitCode"], terminated.get("reason", ""), terminated.get("message", ""), ran_s)


def _seconds_between(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def _wanted_node(spec: Object) -> str | None:
    """Return the node that a DaemonSet's controller wrote into its pod's affinity."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    fields = [match for term in terms for match in term.get("matchFields") or ()]
    return next((match["values"][0] for match in fields if match["key"] == "metadata.name"), None)


def parse_node(obj: Object) -> Node:
    """Return what matters of a Node."""
    memory = obj.get("status", {}).get("allocatable", {}).get("memory", "0")
    taints = obj.get("spec", {}).get("taints") or ()
    return Node(
        obj["metadata"]["name"],
        parse_quantity(memory),
        tuple(Taint(taint["key"], taint.get("value", ""), taint["effect"]) for taint in taints),
    )


def parse_pods(objects: Sequence[Object]) -> tuple[tuple[Pod, ...], tuple[Pod, ...]]:
    """Return the workers and the coordinators among pods, each by name; ended pods are left out."""
    living = [obj for obj in objects if obj.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
    by_name = sorted(living, key=lambda obj: str(obj["metadata"]["name"]))
    workers, coordinators = (
        tuple(parse_pod(obj) for obj in by_name if obj["metadata"]["labels"].get(COMPONENT_LABEL) == component)
        for component in (WORKER, COORDINATOR)
    )
    return workers, coordinators
