"""The adjuster around its policies: rescue, adjust, idle growth, limits and what is reported."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from elasticmoe.runtime.adjuster.adjuster import IDLE, Adjuster, Demand, start_table
from elasticmoe.runtime.adjuster.prompt_budget import SHARE
from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.contract.config import AdjusterConfig, PolicyName, RuntimeConfig
from elasticmoe.runtime.contract.names import ARENA_OWNERS
from elasticmoe.runtime.expert_load import ExpertLoad
from elasticmoe.runtime.pages.placement import Geometry
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers
from elasticmoe.runtime.units import BlockId, ExpertKey
from tests.fakes.block_port import FakeBlockPort

ONE_PAGE = fit_tiers(64, 32)  # k = 1, m = 2
FOUR_PAGES = Tiers(expert_bytes=32, block_bytes=64, raw_block_bytes=64, pages_per_huge=4, blocks_per_huge=2)


SAMPLE = StepSample(
    num_steps=16,
    duration_s=0.2,
    num_tokens=80,
    num_requests=80,
    num_prompt_steps=0,
    num_prompt_tokens=0,
    num_new_tokens=80,
    num_missed=0,
    exposed_s=0.0,
    copied_bytes=0,
    copy_s=0.0,
    num_preempted=0,
)


class Fixture:
    """An adjuster of 4 layers of 8 experts (96 pages) if not said otherwise, 2 loading buffers, a fake KV side."""

    def __init__(  # noqa: PLR0913 -- what tests vary
        self,
        num_huge: int,
        *,
        tiers: Tiers = ONE_PAGE,
        num_layers: int = 4,
        num_experts: int = 8,
        loading_depth: int = 2,
        limit: int | None = None,
        policy: PolicyName = "threshold",
        bytes_per_step: int = 10**6,
    ) -> None:
        """Start with so many huge pages beside huge page 0, where one request needs one block."""
        num_blocks = (1 + num_huge) * tiers.blocks_per_huge
        self.geometry = Geometry(tiers, num_blocks, num_layers, num_experts, loading_depth, request_blocks=1)
        self.config = RuntimeConfig(policy=policy, adjuster=AdjusterConfig(bytes_per_step=bytes_per_step))
        self.port = FakeBlockPort(num_blocks)
        load = ExpertLoad(num_layers, num_experts, half_life_tokens=1000, top_k=2)
        self.adjuster = Adjuster(self.geometry, self.config, load, self.port, limit)
        self.table = self.adjuster.table

    def use_all(self) -> None:
        """Have requests take every free block."""
        for block in sorted(self.port.free):
            self.table.pool.use_block(block)
            self.port.use(block)

    def let_go(self, num: int, *, is_cached: bool = False) -> None:
        """Have requests free so many blocks, neighbours together."""
        for block in sorted(self.port.used, reverse=True)[:num]:
            self.table.pool.free_block(block, is_cached=is_cached)
            self.port.let_go(block, is_cached=is_cached)

    def step(self, demand: Demand = IDLE) -> None:
        """Take one whole step."""
        self.adjuster.begin_step()
        self.adjuster.adjust(demand)
        self.adjuster.drain()


# The start


def test_all_experts_that_fit_are_resident_at_start_with_headroom() -> None:
    """With 105 pages all 96 fit and 9 stay free; with 104 one expert of each layer leaves for the headroom."""
    assert Fixture(105).table.num_resident == 32
    assert Fixture(104).table.num_resident == 28


def test_headroom_never_exceeds_the_limit() -> None:
    """With limit 0 no expert leaves for headroom alone."""
    assert Fixture(104, limit=0).table.num_resident == 32


def test_fixed_starts_at_the_limit() -> None:
    """However much would fit, each layer has exactly the limit out."""
    assert Fixture(200, policy="fixed", limit=3).table.num_resident == 4 * 5


def test_scheduler_and_workers_start_equal() -> None:
    """start_table with the same arguments gives the same rows."""
    f = Fixture(90)
    port = FakeBlockPort(f.geometry.num_blocks)
    other = start_table(f.geometry, f.config, f.adjuster.limit, ExpertLoad(4, 8, 1000, 2), port)
    assert other.entries() == f.table.entries()


# Short of blocks


def test_rescue_evicts_until_enough_blocks_are_free() -> None:
    """5 blocks short are 3 pages: 2 experts' worth goes net, and 2 more pay for a slot in each buffer."""
    f = Fixture(105)
    f.use_all()
    assert f.adjuster.rescue(5)
    assert f.table.pool.num_free_blocks >= 5
    assert f.adjuster.counts.evicted == 4
    assert f.adjuster.short_pages == 3
    assert [plan.reason for plan in f.adjuster.decisions] == ["short of 3 pages"]


def test_rescue_that_cannot_succeed_changes_nothing() -> None:
    """At limit 1 four experts can leave for two slots: 6 pages, 12 blocks; 13 are refused, and nobody is evicted."""
    f = Fixture(105, limit=1)
    f.use_all()
    assert not f.adjuster.rescue(13)
    assert (f.adjuster.counts.evicted, f.table.num_resident, f.table.pool.num_free_blocks) == (0, 32, 0)
    assert not f.adjuster.drain()
    assert f.adjuster.rescue(12)


@pytest.mark.parametrize("short", [0, -3])
def test_rescue_from_no_shortage_does_nothing(short: int) -> None:
    """A failure that is none of ours is not called rescued, so a caller that retries comes to an end."""
    f = Fixture(105)
    assert not f.adjuster.rescue(short)
    assert f.adjuster.short_pages == 0


def test_rescue_gathers_scattered_pages_into_whole_huge_pages() -> None:
    """Where a huge page holds four expert pages, evicted ones are scattered: others move until blocks are free."""
    f = Fixture(28, tiers=FOUR_PAGES)
    f.use_all()
    cold = [[1 if expert == coldest else 9 for expert in range(8)] for coldest in (0, 2, 4, 6)]
    f.adjuster.load.add(np.array(cold))
    assert f.adjuster.rescue(2)
    assert f.table.pool.num_free_blocks >= 2
    assert f.adjuster.drain().moves


def test_rescue_uses_free_pages_before_it_evicts() -> None:
    """Scattered free pages that fill a huge page are gathered, and nobody is evicted for them."""
    f = Fixture(28, tiers=FOUR_PAGES)
    f.use_all()
    for layer, expert in ((0, 0), (1, 0), (2, 1), (3, 1)):
        f.table.evict(ExpertKey(layer, expert))
    assert (f.table.pool.num_free_split_pages, f.table.pool.num_free_blocks) == (6, 0)
    assert f.adjuster.rescue(2)
    assert (f.adjuster.counts.evicted, f.table.pool.num_free_blocks) == (0, 2)


def test_rescue_evicts_nobody_in_vain_while_copies_are_under_way() -> None:
    """With a load under way in every huge page that experts hold none could be emptied; once landed, one can."""
    twelve_pages = Tiers(expert_bytes=32, block_bytes=64, raw_block_bytes=64, pages_per_huge=12, blocks_per_huge=6)
    f = Fixture(2, tiers=twelve_pages, num_layers=3, num_experts=2, loading_depth=1, limit=0)
    f.adjuster.requested_limit = 2
    f.use_all()
    for change in (f.table.evict, f.table.load):
        for layer in range(2):
            change(ExpertKey(layer, 0))
    assert (f.table.pool.num_lent_huge, f.table.num_movable_huge) == (2, 0)
    assert not f.adjuster.rescue(1)
    assert f.adjuster.counts.evicted == 0
    f.adjuster.begin_step()
    assert f.adjuster.rescue(1)


def test_the_largest_shortage_of_a_step_is_kept() -> None:
    """short_pages is the largest R_b since the step began."""
    f = Fixture(105)
    f.use_all()
    f.adjuster.rescue(8)
    f.adjuster.rescue(2)
    assert f.adjuster.short_pages == 4
    f.adjuster.begin_step()
    assert f.adjuster.short_pages == 0


def test_fixed_rescues_nobody() -> None:
    """A fixed split evicts nothing for KV, even where a layer is above or below its limit."""
    f = Fixture(105, policy="fixed", limit=2)
    f.use_all()
    for limit in (1, 2, 3):
        f.adjuster.requested_limit = limit
        assert not f.adjuster.rescue(1)
    assert not f.adjuster.drain()


# Growth


def test_an_idle_engine_grows_until_all_is_back() -> None:
    """Once requests end, experts come back step by step, five at most in each, until all are resident."""
    f = Fixture(112)
    f.use_all()
    assert f.adjuster.rescue(60)
    f.let_go(len(f.port.used))
    steps = 0
    while f.adjuster.wants_step():
        resident = f.table.num_resident
        f.step()
        assert f.table.num_resident - resident <= 5
        steps += 1
    assert (f.table.num_resident, f.table.num_loading_pages) == (32, 0)
    assert steps > 2
    assert f.adjuster.counts.loaded == f.adjuster.counts.evicted


def test_a_load_under_way_wants_a_step_to_land() -> None:
    """Even if nothing more can be loaded."""
    f = Fixture(105, policy="fixed", limit=1)
    f.adjuster.requested_limit = 0
    f.step()
    assert f.table.is_loading
    assert f.adjuster.wants_step()


def test_growth_gives_up_cached_prefixes_last() -> None:
    """Free plain pages are taken first; cached ones count as free."""
    f = Fixture(112)
    f.use_all()
    f.adjuster.rescue(30)
    f.let_go(len(f.port.used), is_cached=True)
    while f.adjuster.wants_step():
        f.step()
    assert f.table.num_resident == 32
    assert f.port.lost


def test_waiting_requests_keep_their_room() -> None:
    """Pages that waiting requests need are not loaded into."""
    f = Fixture(112)
    f.use_all()
    f.adjuster.rescue(12)
    f.let_go(24)
    waiting = replace(IDLE, waiting_blocks=2 * f.table.pool.num_free_pages)
    f.step(waiting)
    assert f.adjuster.counts.loaded == 0
    f.step()
    assert f.adjuster.counts.loaded > 0


@pytest.mark.parametrize(("num_waiting", "loaded"), [(0, 0), (9, 1)])
def test_pages_freed_between_steps_go_to_experts_first_where_too_many_are_away(num_waiting: int, loaded: int) -> None:
    """Under `goodput`, on a bus that makes misses dear, a step begins by bringing experts back ahead of the queue."""
    f = Fixture(112, policy="goodput")
    f.use_all()
    f.adjuster.rescue(60)
    f.adjuster.learn(replace(SAMPLE, copied_bytes=1, copy_s=10.0))
    f.step(Demand(waiting_blocks=40, num_running=5, num_waiting=num_waiting))
    f.let_go(12)
    before = f.adjuster.counts.loaded
    f.adjuster.begin_step()
    assert f.adjuster.counts.loaded - before == loaded


def test_a_step_of_many_prompts_is_owed_to_who_waits_for_a_next_token() -> None:
    """It takes from the budget what its tokens take, then what it took: the next one has so much less."""
    f = Fixture(112, policy="goodput")
    running = Demand(waiting_blocks=0, num_running=5, num_waiting=0, num_tokens=5)
    f.adjuster.learn(replace(SAMPLE, copied_bytes=1, copy_s=1e-9))
    f.adjuster.learn(replace(SAMPLE, num_tokens=16000, num_prompt_steps=16, num_prompt_tokens=15920, duration_s=8.0))
    f.step(running)
    assert f.adjuster.snapshot(running).step_budget_s == inf
    prompts = replace(running, num_tokens=1000, prompt_tokens=995)
    f.step(prompts)
    left_s = f.adjuster.snapshot(running).step_budget_s
    budget = f.adjuster.budget
    assert left_s == pytest.approx(SHARE * budget.window * budget.tpot_s - 0.5, abs=0.03)
    assert f.adjuster.snapshot(replace(running, prompt_tokens=5)).step_budget_s == inf, "nobody waits for a token"
    f.adjuster.learn(replace(SAMPLE, num_steps=2, duration_s=0.9))  # the two that were expected to take 0.52 s
    assert f.adjuster.snapshot(running).step_budget_s < left_s
    assert f.adjuster.snapshot(prompts).prompt_tokens == 995
    f.step(replace(running, prompt_tokens=5))
    assert f.adjuster.snapshot(running).step_budget_s == inf, "that step is owed to nobody"
    assert f.adjuster.snapshot(replace(prompts, asked_tokens=995)).step_budget_s == inf, "the first prompt of a step"
    assert f.adjuster.snapshot(replace(prompts, asked_tokens=400)).step_budget_s < inf, "not the second one"
    f.adjuster.learn(replace(SAMPLE, answers=(6, 6)))
    assert budget.window == 5


@pytest.mark.parametrize("policy", ["threshold", "fixed"])
def test_only_goodput_keeps_a_budget(policy: PolicyName) -> None:
    """The others promise no TPOT, and pay for no bookkeeping."""
    f = Fixture(112, policy=policy)
    f.adjuster.learn(replace(SAMPLE, copied_bytes=1, copy_s=1.0))
    f.step(Demand(waiting_blocks=0, num_running=5, num_waiting=0, num_tokens=9000, prompt_tokens=8996))
    assert f.adjuster.budget.step_s(is_owed=True) == inf


def test_under_goodput_a_step_in_which_experts_left_for_a_request_brings_none_back() -> None:
    """Though others ended in it: experts come with the next step."""
    f = Fixture(105, policy="goodput")
    f.use_all()
    f.adjuster.begin_step()
    assert f.adjuster.rescue(5)
    f.let_go(100)
    f.adjuster.adjust(IDLE)
    assert (f.adjuster.counts.evicted, f.adjuster.counts.loaded) == (2, 0)
    f.step()
    assert f.adjuster.counts.loaded > 0


def test_under_threshold_experts_leave_as_a_precaution_in_such_a_step_too() -> None:
    """The request took the last pages: some more are freed for the next one."""
    f = Fixture(105)
    f.use_all()
    f.adjuster.begin_step()
    assert f.adjuster.rescue(4)
    f.use_all()
    before = f.adjuster.counts.evicted
    f.adjuster.adjust(Demand(waiting_blocks=0, num_running=2, num_waiting=0))
    assert f.adjuster.counts.evicted > before


# Swaps


@pytest.mark.parametrize("policy", ["threshold", "fixed", "goodput"])
def test_in_balance_the_hotter_experts_take_the_places_of_the_colder_ones(policy: PolicyName) -> None:
    """With two of eight experts of each layer away, whoever is hottest ends up resident, page for page."""
    f = Fixture(91, policy=policy, limit=2)
    assert f.table.num_slotted().tolist() == [2] * 4
    free = f.table.pool.num_free_pages
    f.adjuster.load.add(np.tile([0, 0, 50, 50, 50, 50, 50, 50], (4, 1)))
    for _ in range(6):
        f.step(replace(IDLE, num_running=1))
    assert (f.table.state[:, :2] == 0).all()
    assert (f.table.state[:, 2:] == 2).all()
    assert f.adjuster.counts.swapped == 8
    assert f.table.pool.num_free_pages == free
    assert not f.adjuster.wants_step()


@pytest.mark.parametrize(("experts_a_step", "steps"), [(0, 0), (1, 8), (3, 4), (100, 2)])
def test_swaps_keep_to_their_bytes_a_step(experts_a_step: int, steps: int) -> None:
    """Eight swaps at so many experts' bytes a step, one a layer at most; 0 bytes swap nothing."""
    f = Fixture(91, limit=2, bytes_per_step=experts_a_step * 192)
    f.adjuster.load.add(np.tile([0, 0, 50, 50, 50, 50, 50, 50], (4, 1)))
    swapped = []
    while f.adjuster.wants_step():
        before = f.adjuster.counts.swapped
        f.step()
        swapped.append(f.adjuster.counts.swapped - before)
    assert len([num for num in swapped if num]) == steps
    assert sum(swapped) == (8 if experts_a_step else 0)
    assert max(swapped, default=0) <= max(experts_a_step, 0)


def test_a_swap_evicts_and_loads_in_one_step() -> None:
    """Both changes travel with the same delta; the one that comes is resident from the next step on."""
    f = Fixture(91, limit=2, bytes_per_step=192)
    f.adjuster.load.add(np.tile([0, 50, 50, 50, 50, 50, 50, 60], (4, 1)))
    f.adjuster.begin_step()
    f.adjuster.adjust(IDLE)
    delta = f.adjuster.drain()
    assert [load.key for load in delta.loads] == [ExpertKey(0, 7)]
    assert ExpertKey(0, 0) in [entry.key for entry in delta.entries if not entry.is_resident]
    f.adjuster.begin_step()
    assert ExpertKey(0, 7) in [entry.key for entry in f.adjuster.drain().entries if entry.is_resident]


# The limit


def test_a_raised_limit_costs_nothing_by_itself() -> None:
    """Under `threshold` more may leave, but nobody does until pages are short."""
    f = Fixture(105, limit=0)
    f.adjuster.requested_limit = 8
    f.step()
    assert (f.adjuster.limit, f.table.num_resident) == (8, 32)


def test_a_fixed_split_follows_its_limit_both_ways() -> None:
    """Raised, the difference leaves at once; lowered, it comes back."""
    f = Fixture(112, policy="fixed", limit=1)
    f.adjuster.requested_limit = 3
    f.step()
    assert f.table.num_slotted().tolist() == [3] * 4
    f.adjuster.requested_limit = 1
    while f.adjuster.wants_step():
        f.step()
    assert f.table.num_slotted().tolist() == [1] * 4


def test_the_limit_in_force_is_never_below_what_must_leave() -> None:
    """Requested 0 where 90 of 96 pages fit: one expert of each layer must leave."""
    f = Fixture(90, limit=0)
    assert f.adjuster.limit == 1
    f.adjuster.requested_limit = None
    assert f.adjuster.limit == 8


# Decisions


def test_every_decision_of_a_step_is_there_with_its_cause() -> None:
    """A shortage that was covered, one that was refused, what came back, what was swapped; each step anew."""
    f = Fixture(105, limit=1)
    f.use_all()
    f.adjuster.rescue(12)
    f.adjuster.rescue(12)
    assert [plan.cause for plan in f.adjuster.decisions] == ["short", "refused"]
    assert f.adjuster.decisions[1].reason == "short of 6 pages, more than evictions can free"
    f.let_go(len(f.port.used))
    f.step()
    assert [plan.cause for plan in f.adjuster.decisions] == ["room"]
    balanced = Fixture(91, limit=2)
    balanced.adjuster.load.add(np.tile([0, 50, 50, 50, 50, 50, 0, 100], (4, 1)))
    balanced.step()
    assert [plan.cause for plan in balanced.adjuster.decisions] == ["hotter"]
    assert balanced.adjuster.decisions[0].reason == "layer 0's expert 7 drew 28.57% of its tokens, 0 0.00%"


# Numbers


def test_the_arena_is_labelled_whole() -> None:
    """Bytes by owner sum to the arena: residents, the null block, slots, free, trapped and padding."""
    tiers = Tiers(expert_bytes=96, block_bytes=80, raw_block_bytes=64, pages_per_huge=2, blocks_per_huge=3)
    f = Fixture(50, tiers=tiers)
    f.table.pool.use_block(BlockId(1))
    by_owner = f.adjuster.arena_by_owner()
    assert sum(by_owner.values()) == f.geometry.arena_bytes == 51 * 240
    lent = f.table.pool.num_lent_huge
    assert by_owner["kv"] == 2 * 80
    assert by_owner["expert"] == 3 * f.table.num_resident * 96
    assert by_owner["loading"] == f.table.num_loading_pages * 96
    assert by_owner["trapped"] == 80 + lent * 48
    assert by_owner["ssm"] == 0
    assert tuple(by_owner) == ARENA_OWNERS


def test_the_snapshot_counts_in_expert_pages() -> None:
    """What waits is rounded up to whole huge pages; the state is a copy that later changes don't reach."""
    f = Fixture(28, tiers=FOUR_PAGES)
    snap = f.adjuster.snapshot(Demand(waiting_blocks=3, num_running=2, num_waiting=1, waited_s=1.5), short_pages=7)
    assert (snap.waiting_pages, snap.num_running, snap.short_pages, snap.waited_s) == (8, 2, 7, 1.5)
    assert snap.free_pages == f.table.pool.num_free_pages
    f.table.evict(next(e.key for e in f.table.entries() if e.is_resident))
    assert int((snap.state == 2).sum()) == f.table.num_resident + 1


@pytest.mark.parametrize(
    ("asked", "prompts", "has_prompt"), [(0, 5, False), (5, 5, False), (5, 8, True), (1, 0, False)]
)
def test_a_prompt_beside_the_asking_one_is_told(asked: int, prompts: int, has_prompt: bool) -> None:  # noqa: FBT001
    """Where nobody asks there is none beside it; one that runs and asks for its next token's block is no prompt."""
    demand = Demand(0, 3, 1, num_tokens=prompts + 2, prompt_tokens=prompts, asked_tokens=asked)
    assert demand.has_prompt == has_prompt
