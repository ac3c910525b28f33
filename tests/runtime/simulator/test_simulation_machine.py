"""Any order of arrivals, aborts, limits, shifts of the routing and steps keeps every page and block in one place."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.simulator.hardware import H200
from elasticmoe.runtime.simulator.kv import ElasticKv
from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.routing import make_routing
from elasticmoe.runtime.simulator.scheduler import Limits
from elasticmoe.runtime.simulator.simulation import Simulation
from elasticmoe.runtime.simulator.system import System
from tests.runtime.simulator.models import tiny

pytestmark = pytest.mark.timeout(600)  # half a minute of CPU where nothing else runs

MAX_TOKENS = 128
ROUTINGS = [make_routing("skewed", 4, 16, 2, seed) for seed in range(3)]
MODEL = tiny()
MANY_RUNS = 3200
"""Of up to 50 steps each; the engine takes 35 to 45 in them, as a mean of many runs."""


class SimulationMachine(RuleBasedStateMachine):
    """A small engine that is never idle for long."""

    @initialize(
        policy=st.sampled_from(["threshold", "fixed", "goodput"]),
        blocks=st.integers(12, 60),
        limit=st.integers(0, 16),
        batch=st.integers(8, 96),
    )
    def start(self, policy: str, blocks: int, limit: int, batch: int) -> None:
        """Start an engine; the arena holds all experts and a few requests."""
        config = RuntimeConfig(policy=policy)
        limits = Limits(max_num_seqs=12, max_num_batched_tokens=batch)
        kv_bytes = blocks * MODEL.tiers.block_bytes
        system = System(MODEL, H200, kv_bytes, config, limit, max_model_len=MAX_TOKENS, limits=limits)
        self.engine = Simulation(system, (), ROUTINGS[0])
        kv = self.engine.scheduler.kv
        assert isinstance(kv, ElasticKv)
        self.kv = kv
        self.known: list[Request] = []
        self.aborted: set[int] = set()

    @property
    def alive(self) -> list[Request]:
        """Return the requests that wait or run."""
        return [*self.engine.scheduler.waiting, *self.engine.scheduler.running]

    @rule(prompt=st.integers(1, 100), answer=st.integers(1, 28), num=st.integers(1, 4))
    def arrive(self, prompt: int, answer: int, num: int) -> None:
        """Let requests come."""
        for _ in range(num):
            request = Request(Arrival(self.engine.now_s, prompt, answer), len(self.known) % 32, prompt)
            self.known.append(request)
            self.engine.scheduler.waiting.append(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Let a client go away."""
        request = data.draw(st.sampled_from(self.alive))
        self.engine.scheduler.abort(request)
        self.aborted.add(id(request))

    @rule(limit=st.integers(0, 16))
    def change_limit(self, limit: int) -> None:
        """Ask for another offload limit."""
        self.kv.adjuster.requested_limit = limit

    @rule(routing=st.sampled_from(ROUTINGS))
    def shift(self, routing: object) -> None:
        """Make other experts hot."""
        self.engine.routing = routing  # type: ignore[assignment]

    @rule(num=st.integers(1, 5))
    def step(self, num: int) -> None:
        """Take steps while there is work."""
        for _ in range(num):
            if self.engine.has_work:
                before_s = self.engine.now_s
                self.engine.step()
                assert self.engine.now_s >= before_s

    @invariant()
    def pages_are_in_one_place(self) -> None:
        """The pool's and the table's books agree, and every used block belongs to one running request."""
        self.kv.adjuster.table.check_integrity()
        pool = self.kv.adjuster.table.pool
        held = [block for request in self.engine.scheduler.running for block in request.blocks]
        assert len(held) == len(set(held)) == pool.num_blocks - 1 - pool.num_lent_blocks - pool.num_free_blocks
        assert not any(request.blocks for request in self.engine.scheduler.waiting)

    @invariant()
    def nobody_is_lost(self) -> None:
        """Every request waits, runs, is done or was aborted."""
        alive = set(map(id, self.alive))
        for request in self.known:
            assert (id(request) in alive) + request.is_done + (id(request) in self.aborted and not request.is_done) == 1

    def teardown(self) -> None:
        """Let everything finish: all requests are served in a bounded number of steps."""
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.alive
        assert not self.engine.has_work


TestSimulation = pytest.mark.timeout(600)(SimulationMachine.TestCase)  # half a minute, but minutes on a busy machine


@pytest.mark.slow
@pytest.mark.patient
@pytest.mark.timeout(1800)
def test_many_more_steps() -> None:
    """The same over more than 10⁵ steps of the engine."""
    run_state_machine_as_test(
        SimulationMachine, settings=settings(max_examples=MANY_RUNS, stateful_step_count=50, deadline=None)
    )
