"""The page table and the adjuster against a naive model, and against a worker that knows only what it is sent.

A run is what a scheduler does: requests grow (evicting where blocks are short) and end, a step is adjusted and shipped,
the worker applies it and runs a forward that writes every block in use and every slot. What steps may last is kept
beside, from what they were expected to take and what they were measured to.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from elasticmoe.runtime.adjuster.adjuster import IDLE, Adjuster, Demand, start_table
from elasticmoe.runtime.adjuster.prompt_budget import SHARE
from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.contract.config import AdjusterConfig, PolicyName, RuntimeConfig
from elasticmoe.runtime.expert_load import ExpertLoad
from elasticmoe.runtime.pages.changes import Pages
from elasticmoe.runtime.pages.placement import Geometry
from elasticmoe.runtime.pages.table import OFFLOADED, RESIDENT
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import BlockId, HugeId, ceil_div
from tests.fakes.block_port import FakeBlockPort
from tests.fakes.mirror_worker import MirrorWorker
from tests.fakes.tier_shapes import TIER_SHAPES

PATIENT_STEPS = 100_000
POLICY_NAMES: tuple[PolicyName, ...] = ("threshold", "fixed", "goodput", "goodput")
MOST_EXPERT_BYTES = 3 * max(tiers.expert_bytes for tiers in TIER_SHAPES)
HALF_LIFE_TOKENS = 100
TOP_K = 2
STEP_S, TOKEN_S = 0.01, 0.0005
"""What a busy engine's step takes, and each of its tokens: a prompt of 400 takes two TPOTs."""


def smallest_arena(tiers: Tiers, num_layers: int, num_experts: int, depth: int, request_blocks: int) -> int:
    """Return the fewest blocks that hold all experts in slots, one request and the null block."""
    least = ceil_div(3 * num_experts * min(depth, num_layers), tiers.pages_per_huge)
    return max(1 + request_blocks, tiers.blocks_per_huge) + least * tiers.blocks_per_huge


def make_config(policy: PolicyName, swaps_per_step: int, swap_margin: float) -> RuntimeConfig:
    """Return the configuration of a policy that may swap so many experts a step, of the largest pages tried here."""
    adjuster = AdjusterConfig(bytes_per_step=swaps_per_step * MOST_EXPERT_BYTES, swap_margin=swap_margin)
    return RuntimeConfig(policy=policy, adjuster=adjuster)


def make_demand(running: int, waiting: int, answers: int, prompt_tokens: int) -> Demand:
    """Return a load of so many requests, and of a step with so many answers' next tokens and tokens of prompts."""
    tokens = answers + prompt_tokens
    return Demand(waiting, running, waiting, tokens, prompt_tokens, asked_tokens=prompt_tokens // 2 or prompt_tokens)


DEMANDS = st.builds(
    make_demand, st.integers(0, 3), st.integers(0, 20), st.integers(0, 6), st.sampled_from((0, 0, 16, 400))
)


class AdjusterMachine(RuleBasedStateMachine):
    """Any order of requests, routing, limits and steps keeps every byte where its reader looks for it."""

    @initialize(
        tiers=st.sampled_from(TIER_SHAPES),
        sizes=st.tuples(st.integers(1, 6), st.integers(2, 8), st.integers(1, 3), st.integers(1, 8)),
        spare=st.integers(0, 100),
        config=st.builds(make_config, st.sampled_from(POLICY_NAMES), st.integers(0, 3), st.sampled_from((0.0, 0.5))),
        limit=st.none() | st.integers(0, 8),
        slow_bus=st.none() | st.booleans(),
    )
    def start(  # noqa: PLR0913, PLR0917 -- what a run may start from
        self,
        tiers: Tiers,
        sizes: tuple[int, int, int, int],
        spare: int,
        config: RuntimeConfig,
        limit: int | None,
        slow_bus: bool | None,  # noqa: FBT001 -- hypothesis passes it by name
    ) -> None:
        """Start the scheduler's side and the worker's, each by itself from the same arguments; the bus may be known."""
        num_blocks = smallest_arena(tiers, *sizes) + spare
        self.tiers = tiers
        self.geometry = Geometry(tiers, num_blocks, *sizes)
        self.config = config
        self.port = FakeBlockPort(num_blocks)
        load = ExpertLoad(self.geometry.num_layers, self.geometry.num_experts, HALF_LIFE_TOKENS, TOP_K)
        self.adjuster = Adjuster(self.geometry, self.config, load, self.port, limit)
        self.table = self.adjuster.table
        self.pool = self.table.pool
        self.has_begun = False
        self.foreseen: list[bool] = []
        """Of each step that no sample covers yet, the oldest first: whether it is owed and was foreseen."""
        self.written: set[BlockId] = set()
        self.worker = self.start_worker()
        self.check_worker()
        if slow_bus is not None:
            self.measure(steps=16, times=(1.0 if slow_bus else 1e-6, 1.0), missed=16, new=4)

    def start_worker(self) -> MirrorWorker:
        """Return a worker that places its experts by itself."""
        load = ExpertLoad(self.geometry.num_layers, self.geometry.num_experts, HALF_LIFE_TOKENS, TOP_K)
        port = FakeBlockPort(self.geometry.num_blocks)
        table = start_table(self.geometry, self.config, self.adjuster.limit, load, port)
        assert port.lent == self.port.lent
        return MirrorWorker(self.tiers, table.entries())

    # Requests

    @rule(
        num=st.integers(1, 12),
        near=st.integers(0, 200) | st.none(),
        demand=DEMANDS,
        lost_tokens=st.sampled_from((0, 100)),
    )
    def grow(self, num: int, near: int | None, demand: Demand, lost_tokens: int) -> None:
        """A request takes blocks; short of them, experts are evicted, or nothing changes and it goes without."""
        self.begin()
        if num > len(self.port.free) and not self.rescue(num - len(self.port.free), demand, lost_tokens):
            return
        self.take(num, None if near is None else self.tiers.huge_of_block(BlockId(near % self.geometry.num_blocks)))

    @rule(left=st.integers(0, 6), num=st.integers(1, 8), demand=DEMANDS)
    def press(self, left: int, num: int, demand: Demand) -> None:
        """Requests take all blocks but a few, and one more wants more than that."""
        self.begin()
        self.take(max(0, len(self.port.free) - left), None)
        if num > len(self.port.free) and self.rescue(num - len(self.port.free), demand, 0):
            self.take(num, None)

    def take(self, num: int, near: HugeId | None) -> None:
        """Take free blocks for requests, cached ones last."""
        picked = self.pool.pick_plain(num, near)
        for block in [*picked, *sorted(self.port.cached)[: num - len(picked)]]:
            self.pool.use_block(block)
            self.port.use(block)

    @rule(data=st.data(), is_cached=st.booleans())
    def end(self, data: st.DataObject, is_cached: bool) -> None:  # noqa: FBT001 -- hypothesis passes it by name
        """A request frees blocks; blocks that were never written can't be worth keeping."""
        written = self.written
        for block in self.some_of(data, self.port.used):
            self.pool.free_block(block, is_cached=is_cached and block in written)
            self.port.let_go(block, is_cached=is_cached and block in written)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A request hits cached blocks."""
        for block in self.some_of(data, self.port.cached):
            self.pool.use_block(block)
            self.port.use(block)

    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        """Cached blocks lose their hashes."""
        for block in self.some_of(data, self.port.cached):
            self.pool.uncache_block(block)
            self.port.cached.remove(block)
            self.port.plain.add(block)

    # What the adjuster is told

    @rule(limit=st.none() | st.integers(0, 8))
    def set_limit(self, limit: int | None) -> None:
        """The limit goes up or down."""
        self.adjuster.requested_limit = limit

    @rule(seed=st.integers(0, 1000), tokens=st.integers(0, 300))
    def route(self, seed: int, tokens: int) -> None:
        """Tokens favour some experts, others each time."""
        self.draw(np.random.default_rng(seed), tokens)

    def draw(self, random: np.random.Generator, tokens: int) -> None:
        """Route tokens."""
        shape = (self.geometry.num_layers, self.geometry.num_experts)
        self.adjuster.load.add(random.multinomial(TOP_K * tokens, random.dirichlet(np.ones(shape[1]), size=shape[0])))

    @rule(
        steps=st.integers(0, 16),
        times=st.tuples(*[st.floats(0, 1)] * 2),
        missed=st.integers(0, 50),
        new=st.integers(0, 9),
    )
    def measure(self, steps: int, times: tuple[float, float], missed: int, new: int) -> None:
        """The engine measures steps, whose clocks may say anything."""
        exposed_s, compute_s = times if steps else (0.0, 0.0)
        sample = StepSample(
            num_steps=steps,
            duration_s=exposed_s + compute_s,
            num_tokens=3 * steps * new,
            num_requests=steps * new,
            num_prompt_steps=steps // 2,
            num_prompt_tokens=steps // 2 * new,
            num_new_tokens=new,
            num_missed=missed,
            exposed_s=exposed_s,
            copied_bytes=missed * self.adjuster.expert_bytes,
            copy_s=times[0],
            num_preempted=0,
        )
        self.learn(sample)

    def measure_step(self, demand: Demand, waited_s: float) -> None:
        """A clock measures the step, by its tokens and what it waited, and an expert's copy on a fast bus."""
        sample = StepSample(
            num_steps=1,
            duration_s=STEP_S + TOKEN_S * demand.num_tokens + waited_s,
            num_tokens=demand.num_tokens,
            num_requests=demand.num_running,
            num_prompt_steps=int(demand.prompt_tokens > 0),
            num_prompt_tokens=demand.prompt_tokens,
            num_new_tokens=demand.num_running,
            num_missed=0,
            exposed_s=waited_s,
            copied_bytes=self.adjuster.expert_bytes,
            copy_s=1e-6,
            num_preempted=0,
        )
        self.learn(sample)

    def learn(self, sample: StepSample) -> None:
        """Learn a sample; where something wasn't expected of all its steps, what they took costs nothing."""
        covered, self.foreseen = self.foreseen[: sample.num_steps], self.foreseen[sample.num_steps :]
        left_s = self.left_s
        self.adjuster.learn(sample)
        assert self.left_s == left_s or (len(covered) == sample.num_steps and all(covered))

    # Steps

    @rule(demand=DEMANDS)
    def adjust_twice(self, demand: Demand) -> None:
        """An adjustment that no step follows is odd but harmless: its loads are under way when requests grow."""
        self.adjust(demand)

    @rule(seed=st.integers(0, 10_000), num_steps=st.integers(1, 12))
    def serve(self, seed: int, num_steps: int) -> None:
        """A busy engine takes steps and times them: requests end, others want more blocks than there are."""
        random = np.random.default_rng(seed)
        for _ in range(num_steps):
            for block in sorted(self.port.used):
                if random.random() < 0.2:
                    self.pool.free_block(block, is_cached=False)
                    self.port.let_go(block, is_cached=False)
            self.draw(random, tokens=50)
            running, prompt_tokens = int(random.integers(0, 4)), int(random.choice([0, 16, 400]))
            demand = make_demand(running, 2, running, prompt_tokens)
            self.press(int(random.integers(0, 24)), int(random.integers(1, 26)), demand)
            self.adjust(demand)
            self.ship()
            if demand.num_tokens:
                self.measure_step(demand, float(random.choice([0.0, 0.2, 2.0], p=[0.6, 0.35, 0.05])))

    @rule(demand=DEMANDS)
    def step(self, demand: Demand) -> None:
        """A step begins, is adjusted, shipped and run."""
        self.adjust(demand)
        self.ship()

    @rule()
    def calm(self) -> None:
        """A step that has begun is finished; then an idle engine steps until it wants no more, which comes soon."""
        if self.has_begun:
            self.ship()
        most = 3 + 2 * self.geometry.num_layers * self.geometry.num_experts
        while self.adjuster.wants_step():
            self.adjust(IDLE)
            self.ship()
            most -= 1
            assert most, "an idle engine never comes to rest"
        assert not self.table.is_loading

    def begin(self) -> None:
        """Begin a step, unless it has begun."""
        if not self.has_begun:
            self.has_begun = True
            self.adjuster.begin_step()

    def adjust(self, demand: Demand) -> None:
        """Adjust; an expert leaves only a layer that stays within the limit, or for one that is on its way."""
        self.begin()
        before, swapped = self.resident_or_coming(), self.adjuster.counts.swapped
        left_s = self.left_s
        self.adjuster.adjust(demand)
        self.check_limit(before)
        if self.config.policy == "goodput" and demand.num_tokens:
            self.check_spent(demand, left_s)
        budget = self.config.adjuster.bytes_per_step // self.adjuster.expert_bytes
        assert self.adjuster.counts.swapped - swapped <= budget

    def ship(self) -> None:
        """Send the delta and run the forward."""
        self.worker.apply(self.adjuster.drain())
        self.worker.forward(self.port.used)
        self.written |= self.port.used
        self.check_worker()
        self.has_begun = False

    @property
    def left_s(self) -> float:
        """What the next step may take if it computes prompts already."""
        return self.adjuster.budget.step_s(is_owed=True, has_prompt=True)

    @property
    def all_s(self) -> float:
        """What a window may take."""
        return SHARE * self.adjuster.budget.window * self.adjuster.budget.tpot_s

    def check_spent(self, demand: Demand, left_s: float) -> None:
        """Raise AssertionError unless a step costs nothing where nobody could foresee it, and all is left if unowed."""
        fit = self.adjuster.model.fit
        is_owed = demand.num_tokens > demand.prompt_tokens
        self.foreseen.append(is_owed and fit.is_ready)
        if not is_owed:
            assert self.left_s == self.all_s
        elif not fit.is_ready:
            assert self.left_s >= left_s - 1e-9

    def may_start(self, demand: Demand) -> bool:
        """Return whether a step with the prompt of the request that asks leaves those that run in time."""
        is_owed = demand.num_tokens > demand.prompt_tokens
        may_take_s = self.adjuster.budget.step_s(is_owed=is_owed, has_prompt=demand.has_prompt)
        tokens = float(demand.num_running + demand.prompt_tokens)
        return demand.num_running == 0 or bool(self.adjuster.model.fit.compute_s(tokens) <= may_take_s * (1 + 1e-9))

    def rescue(self, short: int, demand: Demand, lost_tokens: int) -> bool:
        """Evict for KV: so many more blocks are free and no prefix was lost, or nothing changed and nothing could."""
        before = (self.state_of_all(), self.resident_or_coming(), len(self.port.free))
        could = self.most_blocks_to_rescue() >= short
        evicted = self.adjuster.counts.evicted
        self.port.forget()
        is_rescued = self.adjuster.rescue(short, demand, lost_tokens)
        assert not self.port.lost, "an eviction for KV cost KV a prefix"
        self.check_limit(before[1])
        if self.config.policy == "goodput" and not lost_tokens and self.adjuster.counts.evicted > evicted:
            assert self.may_start(demand), "experts left for a prompt that makes who runs late"
        if is_rescued:
            assert len(self.port.free) >= before[2] + short
        else:
            assert self.state_of_all() == before[0]
            is_only = demand.num_running <= bool(lost_tokens)
            may_refuse = self.config.policy == "fixed" or (self.config.policy == "goodput" and not is_only)
            assert may_refuse or not could
        return is_rescued

    # The naive model's arithmetic

    def some_of(self, data: st.DataObject, blocks: set[BlockId]) -> set[BlockId]:
        """Draw some of these blocks."""
        return data.draw(st.sets(st.sampled_from(sorted(blocks)), max_size=40)) if blocks else set()

    def state_of_all(self) -> tuple[object, ...]:
        """Return everything that a change could show in."""
        port, pool = self.port, self.pool
        blocks = tuple(map(frozenset, (port.plain, port.cached, port.used, port.lent)))
        return (*blocks, self.table.entries(), pool.num_owned_pages, pool.num_free_split_pages)

    def most_blocks_to_rescue(self) -> int:
        """Return the blocks that evictions within the limit could free, by trying every depth of every buffer."""
        depth = min(self.geometry.loading_depth, self.geometry.num_layers)
        limit = self.adjuster.limit
        slotted = (self.table.state != RESIDENT).sum(axis=1)
        gain = 0
        for buffer in range(depth):
            layers = range(buffer, self.geometry.num_layers, depth)
            now = int(slotted[buffer::depth].max())
            gains = [
                3 * (sum(max(0, min(limit, deep) - int(slotted[n])) for n in layers) - (deep - now))
                for deep in range(now, max(now, min(limit, self.geometry.num_experts)) + 1)
            ]
            gain += max(gains)
        experts, slots = self.worker_pages_now()
        lent = len(self.port.lent) // self.tiers.blocks_per_huge
        pinned = {self.tiers.huge_of_page(page) for pages in self.pages_being_loaded() for page in pages}
        least = max(len(pinned), ceil_div(experts + slots - gain, self.tiers.pages_per_huge))
        return (lent - least) * self.tiers.blocks_per_huge

    def worker_pages_now(self) -> tuple[int, int]:
        """Return the pages of experts and of slots, counted from the table's states."""
        state = self.table.state
        depth = min(self.geometry.loading_depth, self.geometry.num_layers)
        slotted = (state != RESIDENT).sum(axis=1)
        slots = sum(int(slotted[buffer::depth].max()) for buffer in range(depth))
        return 3 * int((state != OFFLOADED).sum()), 3 * slots

    def pages_being_loaded(self) -> list[Pages]:
        """Return the pages that loads write into."""
        return [self.table._pages[key] for key in self.table._loading]  # no public way to the reserved pages

    def resident_or_coming(self) -> np.ndarray:
        """Return [layers]: the experts of each layer that have pages of their own."""
        return np.asarray((self.table.state != OFFLOADED).sum(axis=1))

    def check_limit(self, before: np.ndarray) -> None:
        """Raise AssertionError if a layer lost an expert beyond the limit."""
        now = self.resident_or_coming()
        beyond = self.geometry.num_experts - now > self.adjuster.limit
        assert not (beyond & (now < before)).any(), "a layer at the limit lost an expert"

    def check_worker(self) -> None:
        """Raise AssertionError unless the worker's table is the scheduler's and everyone reads what is theirs."""
        assert self.worker.entries == {entry.key: entry for entry in self.table.entries()}
        self.worker.check_slots()
        self.worker.check(self.port.cached | (self.port.used & self.written))
        experts, slots = self.worker.owned_pages()
        owned = {self.tiers.huge_of_page(page) for page in experts | slots}
        assert self.port.lent == {block for huge in owned for block in self.tiers.blocks_of(huge)}
        by_owner = self.adjuster.arena_by_owner()
        assert by_owner["expert"] == len(experts) * self.tiers.expert_bytes
        assert by_owner["loading"] == len(slots) * self.tiers.expert_bytes

    # What always holds

    @invariant()
    def books_balance(self) -> None:
        """Every check of the tables passes, and the arena's labels sum to its size."""
        self.table.check_integrity()
        self.written = self.written & (self.port.used | self.port.cached)
        by_owner = self.adjuster.arena_by_owner()
        assert sum(by_owner.values()) == self.geometry.arena_bytes
        assert min(by_owner.values()) >= 0
        assert by_owner["kv"] == (1 + len(self.port.used)) * self.tiers.block_bytes
        assert self.pool.num_free_blocks == len(self.port.free)

    @invariant()
    def what_steps_may_last_is_bounded(self) -> None:
        """By what was promised; only `goodput` promises anything."""
        self.adjuster.budget.check_integrity()
        assert self.left_s <= self.all_s
        assert self.config.policy == "goodput" or self.left_s == self.all_s

    @invariant()
    def one_request_fits(self) -> None:
        """With no load under way, evictions can always make room for the longest request beside the null block."""
        is_above = ((self.table.state != RESIDENT).sum(axis=1) > self.adjuster.limit).any()
        if self.config.policy == "fixed" or self.table.is_loading or is_above:
            return
        room = len(self.port.used) + len(self.port.free) + max(0, self.most_blocks_to_rescue())
        assert room >= self.geometry.request_blocks

    def teardown(self) -> None:
        """When all requests end, the engine comes to rest with all resident that its policy and room allow."""
        if not hasattr(self, "adjuster"):
            return
        for block in sorted(self.port.used):
            self.pool.free_block(block, is_cached=False)
            self.port.let_go(block, is_cached=False)
        self.calm()
        assert self.worker.loading == {}
        if self.config.policy == "fixed":
            slotted = (self.table.state != RESIDENT).sum(axis=1)
            assert (slotted == self.adjuster.limit).all() or self.pool.num_free_pages < 3
        elif (self.table.state != RESIDENT).any():
            assert self.pool.num_free_pages < self.config.adjuster.thresholds.grow_above + 3
        whole = {h for h in range(1, self.pool.num_huge) if self.port.free.issuperset(self.tiers.blocks_of(HugeId(h)))}
        assert self.pool.num_whole + self.pool.num_lent_huge == self.pool.num_huge - 1
        assert len(whole) == self.pool.num_whole


AdjusterMachine.TestCase.settings = settings()
TestAdjuster = pytest.mark.timeout(600)(AdjusterMachine.TestCase)  # ten seconds, but minutes under coverage


@pytest.mark.slow
@pytest.mark.patient
@pytest.mark.timeout(900)
def test_the_adjuster_holds_for_a_hundred_thousand_steps() -> None:
    """The same machine, as patient as a night."""
    runs = PATIENT_STEPS // 150  # a run may end before its 200 steps; 160 is what they take on average
    patient = settings(max_examples=runs, stateful_step_count=200, deadline=None, derandomize=False)
    run_state_machine_as_test(AdjusterMachine, settings=patient)
