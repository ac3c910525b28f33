"""The simulated engine: steps one after the other on a simulated clock, over the real pool, table and policies.

The policy hears what an engine measures (StepSample and routed counts, every 16 steps) and nothing else.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from elasticmoe.runtime.pages.table import OFFLOADED, RESIDENT
from elasticmoe.runtime.simulator.kv import ElasticKv
from elasticmoe.runtime.simulator.outcome import Load, Outcome, Trail
from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.routing import Routing, make_routing
from elasticmoe.runtime.simulator.sampling import Meter
from elasticmoe.runtime.simulator.scheduler import Scheduler
from elasticmoe.runtime.simulator.step_cost import Batch, StepCost
from elasticmoe.runtime.simulator.system import System


class Simulation:
    """Time only goes forward; every request that arrived waits, runs, or is done."""

    def __init__(self, system: System, arrivals: Iterable[Arrival], routing: Routing | None = None) -> None:
        """Build the engine's parts; `routing` may be shared between simulations of one model."""
        shape, model = system.model.shape, system.model
        dims = (shape.num_layers, shape.num_experts, shape.top_k)
        self.routing = routing or make_routing(system.routing, *dims, system.seed)
        self.now_s = 0.0
        self.trail = Trail()
        self.requests = [
            Request(one, index % self.routing.num_groups, one.prompt_tokens)
            for index, one in enumerate(sorted(arrivals, key=lambda one: one.at_s))
        ]
        kv = system.make_kv()
        self.scheduler = Scheduler(kv, system.limits)
        self._top_k = shape.top_k
        self._steps = system.make_steps()
        self._meter = Meter(self.routing.num_groups, model.expert_bytes, self._steps.expert_s)
        self._pending = deque(self.requests)
        self._rng = np.random.default_rng(system.seed)
        self._away_at_start = 0
        self._elastic = kv if isinstance(kv, ElasticKv) else None
        if self._elastic is not None:
            self._elastic.ask_demand = self.scheduler.demand
            self._away_at_start = self._elastic.num_away
            self._meter.add_copies(self._elastic.adjuster.table.num_resident)

    @property
    def has_work(self) -> bool:
        """Return whether a step is due: for requests, or for experts that can come back."""
        return self.scheduler.has_requests or (self._elastic is not None and self._elastic.adjuster.wants_step())

    def run(self) -> Outcome:
        """Serve every request and return what happened; an elastic pool is left to recover at the end."""
        while True:
            self._accept()
            if self.has_work:
                self.step()
            elif self._pending:
                self.now_s = self._pending[0].arrival.at_s
            else:
                return self.outcome()

    def outcome(self) -> Outcome:
        """Return what happened so far."""
        counts = None if self._elastic is None else self._elastic.adjuster.counts
        moved = (0, 0, 0) if counts is None else (counts.evicted, counts.loaded, counts.swapped)
        return Outcome(tuple(self.requests), self.scheduler.num_preemptions, self.trail, moved, self._away_at_start)

    def step(self) -> None:
        """Take one step: schedule, adjust, pay for it, count its tokens, report."""
        elastic, scheduler = self._elastic, self.scheduler
        if elastic is not None:
            elastic.adjuster.begin_step()
        before = scheduler.num_preemptions
        scheduler.now_s = self.now_s
        scheduler.schedule()
        num_loads = 0 if elastic is None else elastic.adjust(scheduler.demand())
        groups = self._meter.add_batch(scheduler.scheduled, scheduler.num_preemptions - before)
        cost = self._cost(groups, num_loads) if scheduler.scheduled else self._steps.idle_cost(num_loads)
        self._meter.add_copies(num_loads)
        self.now_s += cost.total_s
        num_running = len(scheduler.running)
        self._meter.add_answers(scheduler.finish_step(self.now_s))
        load = Load(num_running, len(scheduler.waiting))
        if elastic is not None:
            self._report(elastic)
            load = Load(num_running, load.waiting, elastic.num_away, elastic.adjuster.table.pool.num_free_pages)
        self.trail.add(self.now_s, load, cost)

    # Inside

    def _accept(self) -> None:
        """Let requests in that have arrived by now."""
        while self._pending and self._pending[0].arrival.at_s <= self.now_s:
            self.scheduler.waiting.append(self._pending.popleft())

    def _cost(self, groups: np.ndarray, num_loads: int) -> StepCost:
        """Return the cost of the scheduled step, and meter it."""
        touched = self.routing.touched(groups).reshape(self.routing.num_layers, self.routing.num_experts)
        missed, may_miss = self._missed(touched)
        work = (touched.sum(axis=1), missed)
        cost = self._steps.cost(make_batch(self.scheduler.scheduled), *work, num_loads, may_miss=may_miss)
        self._meter.add_cost(cost, int(missed.sum()))
        return cost

    def _missed(self, touched: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return [layers] experts that were routed to while offloaded, and whether any expert is away."""
        none = np.zeros(touched.shape[0])
        if self._elastic is None:
            return none, False
        state = self._elastic.adjuster.table.state
        layers, experts = np.nonzero(state == OFFLOADED)
        if not len(layers):
            return none, bool((state != RESIDENT).any())
        is_hit = self._rng.random(len(layers)) < touched[layers, experts]
        return np.bincount(layers[is_hit], minlength=touched.shape[0]).astype(np.float64), True

    def _report(self, elastic: ElasticKv) -> None:
        """Every so often, tell the adjuster what the engine's own counters would say."""
        if not self._meter.is_due(has_tokens=bool(self.scheduler.scheduled)):
            return
        adjuster = elastic.adjuster
        counts = self._rng.poisson(self.routing.expected_counts(self._meter.tokens_by_group))
        if counts.any():
            adjuster.load.add(counts)
        adjuster.learn(self._meter.drain())


def make_batch(scheduled: list[tuple[Request, int]]) -> Batch:
    """Return what a scheduled step computes."""
    num_tokens = kv_tokens = attended = 0
    for request, num_new in scheduled:
        num_tokens += num_new
        kv_tokens += request.computed + num_new
        if num_new > 1:
            attended += num_new * (request.computed + num_new // 2)
    return Batch(num_tokens, len(scheduled), kv_tokens, attended)
