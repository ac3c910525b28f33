"""The adjuster: holds the page table, asks the policy, applies its plans to the table.

The scheduler calls it around each step and ships what `drain` returns; the simulator can do the same. Never touches
memory or vLLM.
"""

from dataclasses import dataclass, field
from itertools import chain
from math import nan

import numpy as np

from elasticmoe.runtime.adjuster.choose import choose_swaps
from elasticmoe.runtime.adjuster.misses import Misses, expected_misses
from elasticmoe.runtime.adjuster.policy import POLICIES
from elasticmoe.runtime.adjuster.prompt_budget import PromptBudget
from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.adjuster.step_model import StepModel
from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.expert_load import ExpertLoad
from elasticmoe.runtime.pages.changes import PageDelta, Plan, Swap
from elasticmoe.runtime.pages.placement import Geometry
from elasticmoe.runtime.pages.pool import BlockPort, PagePool
from elasticmoe.runtime.pages.table import PageTable
from elasticmoe.runtime.units import MATRICES, ceil_div


@dataclass(slots=True)
class AdjusterCounts:
    """What happened since start."""

    evicted: int = 0
    loaded: int = 0
    swapped: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """The load on KV, at the end of a step or where a request failed to get its blocks."""

    waiting_blocks: int
    num_running: int
    num_waiting: int
    """Waiting requests that may run beside the running ones; `waiting_blocks` is what they need."""
    num_tokens: int = 0
    """Tokens in the step, up to and with those of the request that failed to get its blocks."""
    prompt_tokens: int = 0
    """Those of them that are of prompts."""
    waited_s: float = 0.0
    """Seconds that the first of the waiting requests whose first token is still to come has waited."""
    asked_tokens: int = 0
    """Tokens of the step that are of the request that failed to get its blocks."""

    @property
    def has_answers(self) -> bool:
        """Return whether the step computes somebody's next token beside prompts."""
        return self.num_tokens > self.prompt_tokens

    @property
    def has_prompt(self) -> bool:
        """Return whether the step computes a prompt beside that of the request that failed to get its blocks."""
        return 0 < self.asked_tokens < self.prompt_tokens


IDLE = Demand(waiting_blocks=0, num_running=0, num_waiting=0)


def start_table(geometry: Geometry, config: RuntimeConfig, limit: int, load: ExpertLoad, port: BlockPort) -> PageTable:
    """Return the page table at start; the same on the scheduler and on every worker, given the same arguments.

    All experts that fit become resident, with the room left free above which the policy would load more, if the limit
    lets so many leave; with the policy `fixed`, exactly the limit leaves.
    """
    pool = PagePool(geometry.tiers, geometry.num_blocks, port)
    table = PageTable(pool, geometry.num_layers, geometry.num_experts, geometry.loading_depth)
    offloaded = geometry.start_offload(config.adjuster.thresholds.grow_above)
    table.place(load.ranking, limit if config.policy == "fixed" else min(limit, offloaded))
    return table


@dataclass(slots=True)
class Adjuster:
    """Keeps every layer within the limit in force; owns the page table of the whole node's ranks."""

    geometry: Geometry
    config: RuntimeConfig
    load: ExpertLoad
    port: BlockPort
    requested_limit: int | None = None
    counts: AdjusterCounts = field(default_factory=AdjusterCounts)
    short_pages: int = 0
    """The largest R_b of the current step."""
    _demand: Demand = IDLE
    """As of the last step."""
    decisions: list[Plan] = field(default_factory=list)
    """What was decided since the step began, in order: plans that were applied, and shortages that were refused."""
    table: PageTable = field(init=False)
    model: StepModel = field(init=False)
    budget: PromptBudget = field(init=False)

    def __post_init__(self) -> None:
        """Place the experts."""
        share = self.load.top_k / self.geometry.num_experts
        half_life = self.config.adjuster.goodput.half_life_steps
        self.model = StepModel(share, half_life, self.geometry.num_layers, self.expert_bytes)
        self.budget = PromptBudget(self.config.slo.tpot_ms / 1000)
        self.table = start_table(self.geometry, self.config, self.limit, self.load, self.port)

    @property
    def limit(self) -> int:
        """Return the effective limit."""
        return self.geometry.effective_limit(self.requested_limit)

    def begin_step(self) -> None:
        """Start a step: what was sent to be loaded with the last one is resident now.

        Pages that were freed since may go to experts before requests that wait are given them, if the policy says so.
        """
        self.table.land()
        self.short_pages = 0
        self.decisions = []
        could_load = self.table.pool.num_free_pages >= MATRICES
        if could_load and self.config.policy == "goodput" and self._demand.num_waiting:
            self._apply(self._plan(self.snapshot(self._demand)))

    def learn(self, sample: StepSample) -> None:
        """Take in what the engine measured; under asynchronous scheduling, of steps that ended a while ago."""
        self.budget.settle(sample.num_steps, sample.duration_s)
        self.budget.learn(sample.answers)
        num, prompts = max(sample.num_steps, 1), sample.num_prompt_steps
        weights = np.array([num - prompts, prompts]) / num
        decoding = sample.num_requests / num
        tokens = np.array([decoding, decoding + sample.num_prompt_tokens / max(prompts, 1)])
        each = expected_misses(self.load.coldest_spared, np.full(2, self.table.num_slotted().mean()), tokens)
        self.model.learn(sample, Misses(weights @ each.mean, weights @ each.variance))

    def rescue(self, short_blocks: int, demand: Demand = IDLE, lost_tokens: int = 0) -> bool:
        """Free at least `short_blocks` more blocks for KV by evicting; False, and nothing changed, if that won't be.

        `lost_tokens` is what a preemption would throw away if this fails, 0 where a waiting request just waits.
        Lends no cached block, so a prefix that a request has found but not yet taken is safe.
        """
        pool, tiers = self.table.pool, self.geometry.tiers
        num_huge = ceil_div(short_blocks, tiers.blocks_per_huge)
        short = num_huge * tiers.pages_per_huge - pool.num_free_split_pages
        self.short_pages = max(self.short_pages, short)
        plan = self._plan(self.snapshot(demand, short_pages=short, lost_tokens=lost_tokens)) if short > 0 else Plan()
        if short > 0 and not plan:
            self.decisions.append(plan)
            return False
        if not 0 < num_huge <= self.table.num_movable_huge:
            return False
        wanted = pool.num_free_blocks + short_blocks
        self._apply(plan)
        while pool.num_free_blocks < wanted:
            is_vacated = self.table.vacate()
            assert is_vacated, f"{pool.num_free_blocks} blocks free of {wanted} wanted after {plan}"
        return True

    def adjust(self, demand: Demand) -> None:
        """Let the policy evict as a precaution, or load, once the step is scheduled; where it does neither, swap.

        Under `goodput`, a step in which experts left for a request brings none back.
        """
        self._demand = demand
        is_goodput = self.config.policy == "goodput"
        if is_goodput and demand.num_tokens:
            self._spend(demand)
        has_judged = is_goodput and any(plan.evict for plan in self.decisions)
        if not has_judged:
            self._apply(self._plan_or_swap(self.snapshot(demand)))

    def wants_step(self) -> bool:
        """Return whether an idle engine has something left to load or land."""
        return self.table.is_loading or bool(self._plan_or_swap(self.snapshot(IDLE)))

    def drain(self) -> PageDelta:
        """Return what the workers must apply before this step's forward."""
        return self.table.drain()

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert on one rank."""
        return MATRICES * self.geometry.tiers.expert_bytes

    def snapshot(self, demand: Demand, short_pages: int = 0, lost_tokens: int = 0) -> Snapshot:
        """Return the policy's input as of now."""
        tiers = self.geometry.tiers
        return Snapshot(
            short_pages=short_pages,
            free_pages=self.table.pool.num_free_pages,
            waiting_pages=ceil_div(demand.waiting_blocks, tiers.blocks_per_huge) * tiers.pages_per_huge,
            num_waiting=demand.num_waiting,
            waited_s=demand.waited_s,
            num_running=demand.num_running,
            kv_pages=self._num_used_blocks * tiers.block_bytes / tiers.expert_bytes,
            prompt_tokens=demand.prompt_tokens,
            step_budget_s=self.budget.step_s(is_owed=demand.has_answers, has_prompt=demand.has_prompt),
            lost_tokens=lost_tokens,
            limit=self.limit,
            state=self.table.state.copy(),
            num_slotted=self.table.num_slotted(),
            buffer_depth=self.table.buffer_depth(),
            probability=self.load.probability,
            heat=self.load.heat,
            spared=self.load.spared,
            coldest_spared=self.load.coldest_spared,
            fit=self.model.fit,
        )

    def arena_by_owner(self) -> dict[str, int]:
        """Return the arena's bytes by owner; they sum to its size."""
        pool, tiers = self.table.pool, self.geometry.tiers
        loading = self.table.num_loading_pages
        free = pool.num_whole * tiers.huge_bytes + pool.num_free_split_pages * tiers.expert_bytes
        return {
            "expert": (pool.num_owned_pages - loading) * tiers.expert_bytes,
            "kv": self._num_used_blocks * tiers.block_bytes,
            "ssm": 0,
            "loading": loading * tiers.expert_bytes,
            "free": free,
            "trapped": pool.num_trapped_blocks * tiers.block_bytes + pool.padding_bytes,
        }

    @property
    def _num_used_blocks(self) -> int:
        pool = self.table.pool
        return pool.num_blocks - pool.num_lent_blocks - pool.num_free_blocks

    def _spend(self, demand: Demand) -> None:
        """Take the scheduled step out of the budget by what its compute should take; samples add what it waits for."""
        fit = self.model.fit
        step_s = fit.compute_alone_s(demand.num_tokens) if fit.is_ready else nan
        self.budget.spend(step_s, is_owed=demand.has_answers)

    def _plan(self, snap: Snapshot) -> Plan:
        return POLICIES[self.config.policy](snap, self.config)

    def _plan_or_swap(self, snap: Snapshot) -> Plan:
        """Return the policy's plan, or the swaps that the byte budget allows where it has none."""
        plan, config = self._plan(snap), self.config.adjuster
        if plan:
            return plan
        swaps = choose_swaps(snap, config.bytes_per_step // self.expert_bytes, config.swap_margin)
        return Plan(swap=swaps, reason=_swap_reason(swaps, snap), cause="hotter") if swaps else plan

    def _apply(self, plan: Plan) -> None:
        for key in chain(plan.evict, (swap.leaving for swap in plan.swap)):
            self.table.evict(key)
        for key in chain(plan.load, (swap.coming for swap in plan.swap)):
            self.table.load(key)
        self.counts.swapped += len(plan.swap)
        self.counts.evicted += len(plan.evict)
        self.counts.loaded += len(plan.load)
        if plan:
            self.decisions.append(plan)


def _swap_reason(swaps: tuple[Swap, ...], snap: Snapshot) -> str:
    """Return the swap that gains most in words."""
    (layer, leaving), coming = swaps[0].leaving, swaps[0].coming.expert
    shares = snap.probability[layer]
    return f"layer {layer}'s expert {coming} drew {shares[coming]:.2%} of its tokens, {leaving} {shares[leaving]:.2%}"
