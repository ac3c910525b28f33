"""Whose turn it is, as vLLM's scheduler decides by either of its policies: who starts next, and who is preempted next.

Called by our scheduler, which tells the adjuster of them; changes nothing.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus


def in_turn(policy: SchedulingPolicy, skipped: Iterable[Request], waiting: Iterable[Request]) -> Iterator[Request]:
    """Yield who doesn't run as vLLM asks them to start: of its two queues, each in its order.

    First come, first served: first those that it passed over before. By priority: the more urgent one of both heads.
    """
    if policy == SchedulingPolicy.PRIORITY:
        return heapq.merge(skipped, waiting)
    return chain(skipped, waiting)


def next_preempted(policy: SchedulingPolicy, running: Sequence[Request]) -> Request:
    """Return who of those that run, one at least, is preempted next."""
    if policy == SchedulingPolicy.PRIORITY:
        return max(running, key=lambda request: (request.priority, request.arrival_time))
    return running[-1]


def may_start(request: Request, received_ids: Collection[str]) -> bool:
    """Return whether nothing but memory keeps a request that doesn't run: no grammar, KV from elsewhere or next input.

    vLLM takes note of a grammar that is there, and of KV that is (`received_ids`), when the request's turn comes.
    """
    status = request.status
    if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return _has_grammar(request)
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in received_ids
    return bool(status != RequestStatus.WAITING_FOR_STREAMING_REQ)


def _has_grammar(request: Request) -> bool:
    """Return whether the request's grammar was compiled; vLLM's own question waits for one that wasn't."""
    asked = request.structured_output_request
    grammar = asked and asked._grammar
    if isinstance(grammar, Future):
        return grammar.done() and grammar.exception() is None
    return grammar is not None and not isinstance(grammar, Exception)
