"""vLLM's scheduling, as far as it decides about memory and steps: continuous batching, chunked prompts, preemption.

First come, first served; prefix caching, priorities and speculative decoding are left out.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from elasticmoe.runtime.adjuster.adjuster import Demand
from elasticmoe.runtime.simulator.kv import Kv
from elasticmoe.runtime.simulator.requests import Request
from elasticmoe.runtime.units import ceil_div


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's flags that bound a step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16


@dataclass(slots=True)
class Scheduler:
    """Every request waits, runs, or is done; only running ones hold blocks."""

    kv: Kv
    limits: Limits
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    """The step in flight: requests and their new tokens."""
    num_preemptions: int = 0
    now_s: float = 0.0
    """When the step begins."""
    _asking: int = 0
    """Tokens that the request which asks for blocks would add to the step."""

    @property
    def has_requests(self) -> bool:
        """Return whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> None:
        """Fill `scheduled` with the next step, preempting and admitting on the way."""
        self.scheduled = []
        before = self.num_preemptions
        budget = self._schedule_running(self.limits.max_num_batched_tokens)
        if self.num_preemptions == before:
            self._admit(budget)

    def demand(self) -> Demand:
        """Return the load as the engine tells its adjuster."""
        room = max(0, self.limits.max_num_seqs - len(self.running))
        size = self.limits.block_size
        waiting = list(islice(self.waiting, room))
        blocks = sum(-(-request.num_tokens // size) for request in waiting)
        first = next((request for request in waiting if request.first_token_s < 0), None)
        tokens = (*(num_new for _, num_new in self.scheduled), self._asking)
        return Demand(
            waiting_blocks=blocks,
            num_running=len(self.running),
            num_waiting=len(waiting),
            num_tokens=sum(tokens),
            prompt_tokens=sum(num_new for num_new in tokens if num_new > 1),
            waited_s=0.0 if first is None else self.now_s - first.arrival.at_s,
            asked_tokens=self._asking,
        )

    def finish_step(self, now_s: float) -> list[Request]:
        """Count the step's tokens as computed, with one more where a request caught up; return those that are done."""
        done = []
        for request, num_new in self.scheduled:
            request.computed += num_new
            if request.computed < request.num_tokens:
                continue
            request.num_tokens += 1
            if request.first_token_s < 0:
                request.first_token_s = now_s
            if request.is_done:
                request.finished_s = now_s
                self.kv.free(request)
                done.append(request)
        if done:
            self.running = [request for request in self.running if not request.is_done]
        return done

    def abort(self, request: Request) -> None:
        """Forget a request that waits or runs, as when its client goes away between two steps."""
        self.kv.free(request)
        (self.running if request in self.running else self.waiting).remove(request)

    # Inside

    def _schedule_running(self, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = min(request.num_tokens - request.computed, budget)
            if request.computed + num_new > request.capacity and not self._grow_by_force(request, num_new):
                break
            self.scheduled.append((request, num_new))
            budget -= num_new
            index += 1
        return budget

    def _grow_by_force(self, request: Request, num_new: int) -> bool:
        """Give a running request its blocks, preempting from the end; False if it had to go itself."""
        while not self._grow(request, num_new, 0, self.running[-1].computed):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, num_new: int, at_least: int, lost_tokens: int) -> bool:
        """Give the request blocks for `num_new` more tokens; `at_least` blocks must be free for that."""
        size = self.limits.block_size
        num_blocks = ceil_div(request.computed + num_new, size) - len(request.blocks)
        self._asking = num_new
        is_given = self.kv.allocate(request, num_blocks, max(num_blocks, at_least), lost_tokens)
        self._asking = 0
        if not is_given:
            return False
        request.capacity = len(request.blocks) * size
        return True

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        request.computed = request.capacity = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> None:
        """Start waiting requests in order while the whole of each one's known tokens fits."""
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            num_new = min(request.num_tokens, budget)
            if not self._grow(request, num_new, ceil_div(request.num_tokens, self.limits.block_size), 0):
                break
            self.running.append(self.waiting.popleft())
            self.scheduled.append((request, num_new))
            budget -= num_new
