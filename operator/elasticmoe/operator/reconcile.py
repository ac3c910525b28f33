"""One pass over one custom resource: observe → plan → apply → status. Level-triggered: it remembers no event.

Called by the loop, in a thread, never twice at once for one resource.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from elasticmoe.operator.apply import Cluster
from elasticmoe.operator.autotuner import (
    Reading,
    Tuned,
    added,
    decide,
    dump_tuned,
    load_tuned,
    measure,
    start,
    take,
)
from elasticmoe.operator.builders.coordinator import coordinator_bytes
from elasticmoe.operator.builders.pod import DefaultImages
from elasticmoe.operator.desired import build_desired
from elasticmoe.operator.errors import ForeignObjectError, RefusedObjectError, SpecError
from elasticmoe.operator.events import condition_event, limit_event
from elasticmoe.operator.observed import Object, Observed, Pod, PodSample, Samples
from elasticmoe.operator.rollout import next_step, would_end_serving
from elasticmoe.operator.spec.limits import find_misfit
from elasticmoe.operator.spec.model import ElasticMoESpec
from elasticmoe.operator.spec.parse import parse_spec
from elasticmoe.operator.spec.quantity import parse_duration
from elasticmoe.operator.status import Verdict, build_status, transitions


class Key(NamedTuple):
    """Which custom resource."""

    namespace: str
    name: str


Scrape = Callable[[tuple[Pod, ...], tuple[Pod, ...], float], Samples]


@dataclass(slots=True)
class Readings:
    """The workers' last reading for each custom resource; a new one replaces it when an interval has passed."""

    _last: dict[Key, tuple[float, Mapping[str, PodSample]]] = field(default_factory=dict)

    def take(
        self, key: Key, samples: Mapping[str, PodSample], now_s: float, interval_s: int
    ) -> Mapping[str, PodSample]:
        """Return the reading before this one, if it is an interval old; else nothing, and it stays."""
        at_s, before = self._last.setdefault(key, (now_s, samples))
        if now_s - at_s < interval_s:
            return {}
        self._last[key] = (now_s, samples)
        return before

    def forget(self, key: Key) -> None:
        """Drop what is kept of a custom resource that is gone."""
        self._last.pop(key, None)


@dataclass(frozen=True, slots=True)
class Reconciler:
    """What a pass works with."""

    cluster: Cluster
    scrape: Scrape
    images: DefaultImages
    readings: Readings

    def reconcile(self, key: Key, now: datetime) -> None:
        """Bring one custom resource's children and status in step with its spec; raises what the API server answers."""
        resource = self.cluster.find_resource(key.name, key.namespace)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self.readings.forget(key)
            return
        spec = _parse(resource)
        observed = self.cluster.observe(resource, spec if isinstance(spec, ElasticMoESpec) else None)
        spec = self._try(spec, observed)
        # Before the metrics, which may take seconds to come.
        observed = self._limit(observed, _known_limit(spec, observed, show_time(now)), spec)
        observed = replace(observed, samples=self.scrape(observed.workers, observed.coordinators, now.timestamp()))
        if isinstance(spec, SpecError):
            kept = _kept(spec, observed)
            self._limit(observed, kept.limit, spec)
            self._report(observed, kept, now)
            return
        self._serve(key, spec, observed, now)

    def _try(self, spec: ElasticMoESpec | SpecError, observed: Observed) -> ElasticMoESpec | SpecError:
        """Return the spec, or what of it the API server would not take: then no part of it holds, nor its limit."""
        if isinstance(spec, SpecError) or _was_taken(observed):
            return spec
        try:
            for manifest in build_desired(observed.identity, spec, self.images):  # also what may be withheld now
                self.cluster.apply(manifest, is_trial=True)
        except (ForeignObjectError, RefusedObjectError) as error:
            return _refusal(error)
        return spec

    def _serve(self, key: Key, spec: ElasticMoESpec, observed: Observed, now: datetime) -> None:
        """Apply the children of a valid spec and its limit, then tell."""
        tuned = self._tune(key, spec, observed, now)
        need_bytes = coordinator_bytes(spec) if spec.replicas else 0  # who wants no worker has none to protect
        is_withheld = would_end_serving(observed, need_bytes)
        verdict = Verdict(spec, tuned.limit, dump_tuned(tuned) if _is_tuning(spec) else None, is_withheld)
        desired = build_desired(observed.identity, spec, self.images)
        try:
            for manifest in next_step(desired, observed, need_bytes):
                observed = observed.after(self.cluster.apply(manifest))
        except (ForeignObjectError, RefusedObjectError) as error:
            verdict = replace(verdict, spec=_refusal(error))
        self._limit(observed, tuned.limit, spec)
        self._report(observed, verdict, now)
        for entry in added(load_tuned(observed.previous_status), tuned):
            event = limit_event(observed.identity, entry.before, entry.after, entry.reason, entry.time)
            self.cluster.post_event(event)

    def _tune(self, key: Key, spec: ElasticMoESpec, observed: Observed, now: datetime) -> Tuned:
        """Return where the limit stands after this pass; it stays while workers come and go or tell too little."""
        tuned = start(spec, load_tuned(observed.previous_status), observed.num_experts, show_time(now))
        interval_s = parse_duration(spec.memory.expert_offload.autotune.interval)
        samples = observed.samples.workers
        before = self.readings.take(key, samples, now.timestamp(), interval_s)
        signals = measure(before, samples) if _is_steady(spec, observed) else None
        current = tuned.limit if tuned.limit is not None else _requested(observed)
        if signals is None or current is None or observed.num_experts is None or not _is_tuning(spec):
            return tuned
        reading = Reading(signals, now.timestamp(), current, observed.num_experts)
        step = decide(spec, tuned, reading)
        return take(spec, tuned, step, reading, show_time(now))

    def _limit(self, observed: Observed, limit: int | None, spec: ElasticMoESpec | SpecError) -> Observed:
        """Give every live worker its limit and return them so; without one, take it away if the spec wants none."""
        if limit is None and not _wants_no_limit(spec):
            return observed
        annotation = None if limit is None else str(limit)
        workers = []
        for pod in observed.workers:
            if not pod.is_leaving and pod.limit != annotation:
                self.cluster.set_limit(pod, observed.identity.namespace, limit)
                pod = replace(pod, limit=annotation)  # noqa: PLW2901 -- the same pod, as it is now
            workers.append(pod)
        return replace(observed, workers=tuple(workers))

    def _report(self, observed: Observed, verdict: Verdict, now: datetime) -> None:
        """Write the status if it is another, and an Event for each condition that turned."""
        status = build_status(observed, verdict, show_time(now))
        if model := _counted_model(observed, verdict, status):
            status["countedModel"] = model
        if status == observed.previous_status:
            return
        self.cluster.write_status(observed.identity, status)
        for condition in transitions(observed.previous_status, status):
            self.cluster.post_event(condition_event(observed.identity, condition, show_time(now)))


def show_time(now: datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _parse(resource: Object) -> ElasticMoESpec | SpecError:
    try:
        spec = parse_spec(resource.get("spec") or {})
    except SpecError as error:
        return error
    status = resource.get("status") or {}
    num_experts = status.get("expertsPerLayer")
    if num_experts is None or status.get("countedModel") != spec.model.uri:
        return spec
    return find_misfit(spec.memory.expert_offload, num_experts) or spec


def _refusal(error: ForeignObjectError | RefusedObjectError) -> SpecError:
    return SpecError("metadata.name" if isinstance(error, ForeignObjectError) else error.field, str(error))


def _was_taken(observed: Observed) -> bool:
    """Return whether the API server has taken all children of this very spec before."""
    conditions = observed.previous_status.get("conditions", ())
    told = {(found["type"], found["status"], found.get("observedGeneration")) for found in conditions}
    return ("ConfigValid", "True", observed.identity.generation) in told


def _kept(error: SpecError, observed: Observed) -> Verdict:
    """Return the verdict on an invalid spec: the limit and the tuning of the last good one stay."""
    former = observed.previous_status
    limit = former.get("offloadLimit")
    if limit is not None and observed.num_experts is not None and limit > observed.num_experts:
        limit = None  # set before the experts were counted: no worker took it
    return Verdict(error, limit, former.get("autotuner"))


def _counted_model(observed: Observed, verdict: Verdict, status: Object) -> str | None:
    """Return the model that `expertsPerLayer` is of: the spec's, when all of its workers are there and one told it.

    Until then the last one: another model's number must refuse no spec.
    """
    samples = observed.samples.workers.values()
    is_ready = any((found["type"], found["reason"]) == ("Ready", "PodsReady") for found in status["conditions"])
    if isinstance(verdict.spec, ElasticMoESpec) and is_ready and any(sample.experts_per_layer for sample in samples):
        return verdict.spec.model.uri
    last: str | None = observed.previous_status.get("countedModel")
    return last


def _wants_no_limit(spec: ElasticMoESpec | SpecError) -> bool:
    """Return whether workers are to have their own; a share of experts not counted yet is a limit to come."""
    return isinstance(spec, ElasticMoESpec) and spec.memory.expert_offload.limit is None


def _known_limit(spec: ElasticMoESpec | SpecError, observed: Observed, now: str) -> int | None:
    """Return the limit as it is without new metrics."""
    if isinstance(spec, SpecError):
        return _kept(spec, observed).limit
    return start(spec, load_tuned(observed.previous_status), observed.num_experts, now).limit


def _is_tuning(spec: ElasticMoESpec) -> bool:
    return spec.memory.expert_offload.autotune.enabled


def _is_steady(spec: ElasticMoESpec, observed: Observed) -> bool:
    """Return whether as many workers as wanted are ready, none is leaving, and all have told their numbers."""
    is_settled = len(observed.workers) == spec.replicas and not any(pod.is_leaving for pod in observed.workers)
    return is_settled and len(observed.samples.workers) == spec.replicas


def _requested(observed: Observed) -> int | None:
    """Return the limit that workers started with, for want of another."""
    limits = (sample.requested_limit for sample in observed.samples.workers.values())
    return max((limit for limit in limits if limit is not None), default=None)
