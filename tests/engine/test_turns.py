"""Whose turn it is, held against vLLM's own choice between its own queues."""

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from elasticmoe.runtime.engine.turns import in_turn, may_start

pytestmark = pytest.mark.vllm


def _make(name: str, arrival_s: float = 0.0, priority: int = 0, **more: Any) -> Any:
    return Request(name, [5], SamplingParams(**more), None, arrival_time=arrival_s, priority=priority)


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_the_one_in_which_vllm_takes_them(policy: SchedulingPolicy, seed: int) -> None:
    """Whichever queue each is in, also none at all; the queues are left as they were."""
    rng = random.Random(seed)
    queues = create_request_queue(policy), create_request_queue(policy)
    for n in range(seed):
        rng.choice(queues).add_request(_make(str(n), rng.randrange(3), rng.randrange(3)))
    stock: Any = SimpleNamespace(policy=policy, skipped_waiting=queues[0], waiting=queues[1])
    have = list(in_turn(policy, *queues))
    want = []
    while (queue := Scheduler._select_waiting_queue_for_scheduling(stock)) is not None:
        want.append(queue.pop_request())
    assert have == want


def _asking(grammar: object) -> Any:
    request = _make("asks", structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request.grammar = grammar
    return request


def test_a_grammar_keeps_a_request_until_it_is_compiled() -> None:
    """And for good where it can't be: vLLM ends that request. Nobody waits for the answer."""
    grammar, wrong = Future[object](), Future[object]()
    wrong.set_exception(ValueError("no grammar"))
    asking, failed = _asking(grammar), _asking(wrong)
    assert not may_start(asking, ())
    assert not may_start(failed, ())
    grammar.set_result(object())
    assert may_start(asking, ())
    for request in (asking, failed):
        assert request.structured_output_request.is_grammar_ready  # vLLM takes note of how it ended
    assert may_start(asking, ())
    assert not may_start(failed, ())
    assert not may_start(_asking(None), ())


@pytest.mark.parametrize(
    ("status", "is_ready"),
    [
        (RequestStatus.WAITING, True),
        (RequestStatus.PREEMPTED, True),
        (RequestStatus.WAITING_FOR_STREAMING_REQ, False),
        (RequestStatus.WAITING_FOR_REMOTE_KVS, False),
    ],
)
def test_whoever_waits_for_memory_alone_may_start(status: RequestStatus, is_ready: bool) -> None:  # noqa: FBT001
    """What has been preempted too; KV from elsewhere keeps a request until it has been received."""
    request = _make("waits")
    request.status = status
    assert may_start(request, ("other",)) == is_ready
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        assert may_start(request, ("waits",))
