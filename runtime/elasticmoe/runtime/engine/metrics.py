"""Our series on vLLM's /metrics, written by the engine core alone (with tensor parallel, workers would multiply them).

They reach the API server's /metrics through prometheus_client's multiprocess files, so PROMETHEUS_MULTIPROC_DIR must
be set before vLLM starts; `elasticmoe serve` does that.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from elasticmoe.runtime.adjuster.adjuster import Adjuster
from elasticmoe.runtime.contract import labels, names
from elasticmoe.runtime.device.report import StepReport
from elasticmoe.runtime.pages.changes import Plan


@dataclass(slots=True)
class Recovery:
    """Times how long experts take to come back: from the first eviction until as many are resident as before.

    An engine at rest has brought back all that it will, which may be a few less: the policy keeps some pages free.
    """

    home: int = 0
    since_s: float | None = None
    last_s: float = 0.0

    def observe(self, resident: int, now_s: float, *, is_at_rest: bool) -> None:
        """Take note of the residency at a time."""
        if resident >= self.home or is_at_rest:
            self.home = resident
            if self.since_s is not None:
                self.last_s = now_s - self.since_s
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s


class Metrics:
    """Gauges and counters of one engine core."""

    def __init__(self, expert_bytes: int) -> None:
        """Create the series; `expert_bytes` is what one fetch copies on one rank."""
        registry = CollectorRegistry()

        def gauge(name: str, text: str, *label_names: str) -> Gauge:
            return Gauge(name, text, label_names, registry=registry, multiprocess_mode="mostrecent")

        def counter(name: str, text: str, *label_names: str) -> Counter:
            return Counter(name, text, label_names, registry=registry)

        self._expert_bytes = expert_bytes
        self._arena = gauge(names.ARENA_BYTES, "Bytes of the arena by owner", "owner")
        self._resident = gauge(names.RESIDENT_EXPERTS, "Experts whose weights are on the GPU")
        self._limit = gauge(names.OFFLOAD_LIMIT, "Experts of a layer that may leave the GPU", "kind")
        self._at_limit = gauge(names.LAYERS_AT_LIMIT, "Layers that may offload no further expert")
        self._short = gauge(names.PAGES_SHORT, "Expert pages that the last step was short of")
        self._ratio = gauge(names.ROUTED_RESIDENT_RATIO, "Share of routed tokens that found their expert resident")
        self._recovery = gauge(names.RECOVERY_SECONDS, "How long experts took to come back after the last burst")
        self._per_layer = gauge(labels.EXPERTS_PER_LAYER, "Routed experts of one layer, what a limit may be a share of")
        self._usage = gauge(names.KV_CURRENT_USAGE_RATIO, "Used blocks as a share of what KV has now")
        self._fetches = counter(names.EXPERT_FETCHES, "Experts copied to the GPU", "kind")
        self._fetch_bytes = counter(names.FETCH_BYTES, "Bytes copied to the GPU on each rank")
        self._exposed = counter(names.EXPOSED_FETCH_SECONDS, "Seconds that compute waited for fetches")
        self._changes = counter(names.ADJUSTER_CHANGES, "Experts that the adjuster moved", "kind")
        self._totals = dict.fromkeys(("missed", "predicted", "foreseen", "planned", "exposed_s"), 0.0)
        self._decisions = counter(names.ADJUSTER_DECISIONS, "What the adjuster decided, by its cause", "reason")
        self._told = dict.fromkeys(names.CHANGE_KINDS, 0)
        self._recovering = Recovery()
        self._show_from_the_start()

    def observe(self, adjuster: Adjuster, current_usage: float, *, has_requests: bool) -> None:
        """Write the adjuster's state as it stands."""
        table = adjuster.table
        for owner, num_bytes in adjuster.arena_by_owner().items():
            self._arena.labels(owner).set(num_bytes)
        self._resident.set(table.num_resident)
        self._per_layer.set(table.num_experts)
        effective, requested = adjuster.limit, adjuster.requested_limit
        self._limit.labels("effective").set(effective)
        self._limit.labels("requested").set(effective if requested is None else requested)
        self._at_limit.set(int((table.num_slotted() >= effective).sum()))
        self._short.set(adjuster.short_pages)
        self._usage.set(current_usage)
        is_at_rest = not has_requests and not adjuster.wants_step()
        self._recovering.observe(table.num_resident, time.monotonic(), is_at_rest=is_at_rest)
        self._recovery.set(self._recovering.last_s)
        self._count("evict", adjuster.counts.evicted)
        self._count("load", adjuster.counts.loaded)
        self._count("swap", adjuster.counts.swapped)

    def add_decisions(self, decisions: Iterable[Plan]) -> None:
        """Count what was decided in one step."""
        for plan in decisions:
            self._decisions.labels(plan.cause).inc()

    def add_report(self, report: StepReport) -> None:
        """Add what a worker counted."""
        self._fetches.labels("missed").inc(report.missed)
        self._fetches.labels("predicted").inc(report.predicted)
        self._fetches.labels("planned").inc(report.planned)
        self._fetch_bytes.inc((report.missed + report.predicted + report.planned) * self._expert_bytes)
        self._exposed.inc(report.exposed_s)
        for name in self._totals:
            self._totals[name] += getattr(report, name)
        routed = int(report.routed.sum())
        if routed:
            self._ratio.set(report.routed_resident / routed)

    def totals(self) -> dict[str, float]:
        """Return what the workers' reports add up to since start."""
        return dict(self._totals)

    def _show_from_the_start(self) -> None:
        """Export the series that only events would bring, at the value that nothing happened yet."""
        for kind in names.CHANGE_KINDS:
            self._changes.labels(kind)
        for kind in names.FETCH_KINDS:
            self._fetches.labels(kind)
        for cause in names.CAUSES:
            self._decisions.labels(cause)
        self._ratio.set(1)  # nothing was routed yet, so nothing missed

    def _count(self, kind: str, total: int) -> None:
        self._changes.labels(kind).inc(total - self._told[kind])
        self._told[kind] = total
