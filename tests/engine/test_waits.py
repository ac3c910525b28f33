"""How long a first token has been waited for, who waits, only whom memory can help, and which answers have ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from elasticmoe.runtime.adjuster.adjuster import Adjuster, Demand
from elasticmoe.runtime.engine.step_clock import StepClock
from tests.engine.engines import BLOCK_SIZE, Engine, draw_requests, running
from tests.engine.sizes import arena_bytes, read_shape

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),  # vLLM's use of xgrammar
]
FULL_TOKENS = 200


class _Clock:
    """The scheduler's seconds, which pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """Return the clock that the scheduler reads."""
    made = _Clock()
    monkeypatch.setattr("elasticmoe.runtime.engine.scheduler.time", made)
    return made


class _Served:
    """An engine whose steps are the test's."""

    def __init__(self, engine: Engine, clock: _Clock) -> None:
        self.scheduler = engine.scheduler
        self.core = engine.llm.llm_engine.engine_core.engine_core
        self._clock = clock

    def come(self, name: str, num_prompt: int = 20, num_out: int = 2, **more: Any) -> Any:
        """Have a request, or a session's next input, come now."""
        request = self.make(name, num_prompt, num_out, **more)
        self.scheduler.add_request(request)
        return request

    def make(self, name: str, num_prompt: int, num_out: int, *, is_session: bool = False, priority: int = 0) -> Any:
        """Return a request of vLLM's."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        ids = [3 + (7 * n + len(name)) % 500 for n in range(num_prompt)]
        hasher = self.core.request_block_hasher
        return Request(name, ids, params, None, block_hasher=hasher, resumable=is_session, priority=priority)

    def make_elsewhere(self, name: str, num_prompt: int, **more: Any) -> Any:
        """Return a request whose KV is still to come, as a connector leaves it; none is served, see limits."""
        from vllm.v1.request import RequestStatus

        request = self.make(name, num_prompt, 2, **more)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    def come_asking(self, name: str) -> Any:
        """Have a request come whose answer follows a grammar, which is compiled first."""
        request, _ = self.core.preprocess_add_request(_asking_for_letters(name, FULL_TOKENS))
        self.scheduler.add_request(request)
        return request

    @contextmanager
    def compiling_nothing(self) -> Iterator[None]:
        """Have no grammar compiled meanwhile."""
        compilers, may_compile = self.core.structured_output_manager.executor, Event()
        for _ in range(compilers._max_workers):
            compilers.submit(may_compile.wait, 30)
        yield
        may_compile.set()

    def step_until(self, is_there: Callable[[], bool], most: int = 50) -> None:
        """Step until it is so."""
        for _ in range(most):
            if is_there():
                return
            self.core.step_fn()
        raise AssertionError(f"{most} steps, and it isn't so")

    def fill(self, room: int) -> int:
        """Have as many run as memory holds, and let `room` more run by their number alone; returns how many run."""
        num: int = self.scheduler.pool.get_num_free_blocks() // -(-FULL_TOKENS // BLOCK_SIZE)
        for n in range(num):
            self.come("x" * n, FULL_TOKENS, 30)
        self.core.step_fn()
        assert len(self.scheduler.running) == num
        self.scheduler.max_num_running_reqs = num + room
        return num

    def asked(self) -> tuple[int, int]:
        """Return how many wait for memory, and for how many blocks."""
        demand = self.scheduler._demand()
        return demand.num_waiting, demand.waiting_blocks

    def waited_s(self, now_s: float) -> float:
        """Return how long a first token has been waited for at that time."""
        self._clock.now_s = now_s
        waited_s: float = self.scheduler._demand().waited_s
        return waited_s


@contextmanager
def _serving(model: Path, clock: _Clock, kv_blocks: int = 40, **flags: Any) -> Iterator[_Served]:
    with running(model, {"arena_bytes": arena_bytes(model, BLOCK_SIZE, kv_blocks)}, **flags) as engine:
        engine.scheduler._on_limit(0)
        yield _Served(engine, clock)


def test_a_sessions_input_is_waited_for_from_when_it_came(tiny: Path, clock: _Clock) -> None:
    """Later inputs, and the session's end, come without making an earlier one's first token late to be waited for."""
    from vllm.v1.request import RequestStatus

    with _serving(tiny, clock) as served:
        session = served.come("s", is_session=True)
        assert served.waited_s(103) == 3
        served.come("s", is_session=True)  # at 103, and the first input has no token yet
        assert served.waited_s(106) == 6
        served.come("s", is_session=True)
        assert served.waited_s(108) == 8
        for num_queued, came_s in ((1, 103), (0, 106)):
            served.step_until(partial(_has_queued, session, num_queued))
            assert session.status == RequestStatus.WAITING
            assert served.waited_s(110) == 110 - came_s
        served.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
        assert served.waited_s(200) == 0
        served.come("s", is_session=True)
        assert served.waited_s(201) == 1
        served.come("s")  # the session's end, which is no input
        assert served.waited_s(203) == 3


def test_a_session_without_input_keeps_its_place_and_waits_for_nothing(tiny: Path, clock: _Clock) -> None:
    """As vLLM counts it among those that run: beside it and another that runs, two at most let nobody start."""
    from vllm.v1.request import RequestStatus

    with _serving(tiny, clock, max_num_seqs=2) as served:
        session = served.come("s", is_session=True)
        served.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
        served.come("runs", num_out=100)
        served.core.step_fn()
        demand = served.scheduler._demand()
        assert (demand.num_running, demand.num_waiting, demand.waiting_blocks) == (1, 0, 0)
        served.come("waits")
        demand = served.scheduler._demand()
        assert (demand.num_running, demand.num_waiting, demand.waiting_blocks) == (1, 0, 0)
        assert served.waited_s(300) == 0
        served.core.step_fn()
        assert len(served.scheduler.running) == 1


def test_experts_come_back_beside_a_session_without_input(tiny: Path) -> None:
    """It may stay so for hours, and an engine that does nothing else is idle."""
    from vllm.v1.request import RequestStatus

    with running(tiny, {"arena_bytes": arena_bytes(tiny, BLOCK_SIZE, 40)}) as engine:
        engine.scheduler._on_limit(read_shape(tiny).num_experts)
        served = _Served(engine, _Clock())
        session = served.come("s", is_session=True)
        served.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
        engine.generate(draw_requests(24))
        assert engine.adjuster.counts.evicted > 0
        engine.idle()
        assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        assert engine.adjuster.counts.loaded == engine.adjuster.counts.evicted


def test_who_waits_for_kv_from_elsewhere_hides_nobody(tiny: Path, clock: _Clock) -> None:
    """However few may still start: vLLM passes over whoever isn't ready, and so does what is told of who waits."""
    with _serving(tiny, clock, max_num_seqs=2) as served:
        served.come("runs", num_out=100)
        served.core.step_fn()
        elsewhere = served.make_elsewhere("elsewhere", 5 * BLOCK_SIZE)
        served.scheduler.add_request(elsewhere)
        assert served.waited_s(150) == 0
        assert served.asked() == (0, 0)
        served.come("waits", num_prompt=3 * BLOCK_SIZE)
        assert served.waited_s(155) == 5
        assert served.asked() == (1, 3)
        served.scheduler.finished_recving_kv_req_ids.add("elsewhere")  # its KV is there
        assert served.waited_s(160) == 60
        assert served.asked() == (1, 5)


def test_a_request_counts_once_its_grammar_is_there(tiny: Path, clock: _Clock) -> None:
    """Until then memory can't help it, and whoever comes after it is told of; then from when it came."""
    from vllm.v1.request import RequestStatus

    with _serving(tiny, clock, 20, skip_tokenizer_init=False) as served:
        num_running = served.fill(room=1)
        num_blocks = -(-FULL_TOKENS // BLOCK_SIZE)
        with served.compiling_nothing():
            request = served.come_asking("grammar")
            assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            assert served.waited_s(110) == 0
            assert served.asked() == (0, 0)
            served.come("after", num_prompt=FULL_TOKENS - BLOCK_SIZE)
            assert served.waited_s(113) == 3
            assert served.asked() == (1, num_blocks - 1)
        _wait_for_grammar(request)
        served.core.step_fn()
        assert len(served.scheduler.running) == num_running  # there is no memory for another
        assert request.status == RequestStatus.WAITING
        assert served.waited_s(120) == 20
        assert served.asked() == (1, num_blocks)


def test_whose_grammar_is_there_counts_before_its_turn(tiny: Path, clock: _Clock) -> None:
    """Nobody behind the one that memory keeps is asked by vLLM: where all answers follow grammars, all of them wait."""
    from vllm.v1.request import RequestStatus

    with _serving(tiny, clock, 20, skip_tokenizer_init=False) as served:
        served.fill(room=3)
        asking = [served.come_asking(name) for name in ("one", "two", "three")]
        for request in asking:
            _wait_for_grammar(request)
        served.core.step_fn()
        assert asking[-1].status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        assert served.asked() == (3, 3 * -(-FULL_TOKENS // BLOCK_SIZE))


@pytest.mark.parametrize(("policy", "blocks", "waited_s"), [("fcfs", 5, 10), ("priority", 3, 5)])
def test_who_starts_next_is_told_of_as_the_policy_has_it(
    tiny: Path, clock: _Clock, policy: str, blocks: int, waited_s: float
) -> None:
    """With room for one: first come, first served, whom vLLM passed over before; by priority, the more urgent one."""
    with _serving(tiny, clock, max_num_seqs=2, scheduling_policy=policy) as served:
        served.come("runs", num_out=100)
        served.core.step_fn()
        served.scheduler.add_request(served.make_elsewhere("passed over", 5 * BLOCK_SIZE, priority=2))
        served.scheduler.finished_recving_kv_req_ids.add("passed over")
        served.waited_s(105)
        served.come("urgent", num_prompt=3 * BLOCK_SIZE, priority=1)
        assert served.asked() == (1, blocks)
        assert served.waited_s(110) == waited_s


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_a_preemption_would_lose_is_the_next_ones_work(
    tiny: Path, clock: _Clock, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the one that vLLM then preempts, by either policy: by priority it isn't the last to have started."""
    told, lost = [0], list[tuple[int, int]]()
    rescue = Adjuster.rescue

    def note_told(adjuster: Adjuster, short_blocks: int, demand: Demand, lost_tokens: int) -> bool:
        told.append(lost_tokens)
        return rescue(adjuster, short_blocks, demand, lost_tokens)

    monkeypatch.setattr(Adjuster, "rescue", note_told)
    with _serving(tiny, clock, 20, scheduling_policy=policy) as served:
        preempt = served.scheduler._preempt_request

        def note_lost(request: Any, *args: Any) -> None:
            lost.append((told[-1], request.num_computed_tokens))
            preempt(request, *args)

        served.scheduler._preempt_request = note_lost
        for n, priority in enumerate((0, 9, 5)):
            served.come("x" * (n + 1), 50 + 20 * n, 150, priority=priority)
            served.core.step_fn()
        served.step_until(lambda: bool(lost), most=200)
        assert all(have == want > 0 for have, want in lost)


def test_answers_are_counted_once_they_have_ended(tiny: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's turn by turn; one that is aborted ended when its client did, which says nothing of how long it is."""
    from vllm.v1.request import RequestStatus

    counted = list[int]()
    monkeypatch.setattr(StepClock, "end_answer", lambda _, num_tokens: counted.append(num_tokens))
    with _serving(tiny, clock) as served:
        served.come("aborted", num_out=50)
        served.come("ends", num_out=3)
        served.step_until(lambda: bool(counted))
        served.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
        session = served.come("s", is_session=True)
        served.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
        served.come("s", is_session=True)
        served.step_until(lambda: len(counted) > 2)
        served.come("s")
        served.core.step_fn()
        assert counted == [3, 2, 2]


def _has_queued(session: Any, num: int) -> bool:
    return len(session.streaming_queue) == num


def _wait_for_grammar(request: Any) -> None:
    while request.structured_output_request.grammar is None:
        time.sleep(0.01)


def _asking_for_letters(name: str, num_prompt: int) -> Any:
    """Return what a frontend sends to the engine for an answer of letters alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine import EngineCoreRequest

    letters = StructuredOutputsParams(regex="[a-z]+")
    letters._backend = "xgrammar"
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[5] * num_prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=4, structured_outputs=letters),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
