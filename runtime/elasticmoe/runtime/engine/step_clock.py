"""The engine core's own clock: what the steps between two of the workers' reports were and how long they took.

The scheduler calls it around each step and hands the samples to the adjuster. Steps without tokens don't count.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.device.report import StepReport


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens."""

    num_tokens: int
    num_requests: int
    num_prompt_tokens: int
    num_preempted: int
    num_started: int = 0

    @classmethod
    def of(cls, output: SchedulerOutput) -> "Batch":
        """Return what vLLM scheduled; a request with several tokens, drafts aside, computes its prompt."""
        drafts: dict[str, Any] = output.scheduled_spec_decode_tokens
        counts = {name: num - len(drafts.get(name, ())) for name, num in output.num_scheduled_tokens.items()}
        return cls(
            num_tokens=output.total_num_scheduled_tokens,
            num_requests=len(counts),
            num_prompt_tokens=sum(num for num in counts.values() if num > 1),
            num_preempted=len(output.preempted_req_ids or ()),
            num_started=len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids),
        )


NOTHING = StepSample(
    num_steps=0,
    duration_s=0.0,
    num_tokens=0,
    num_requests=0,
    num_prompt_steps=0,
    num_prompt_tokens=0,
    num_new_tokens=0,
    num_missed=0,
    exposed_s=0.0,
    copied_bytes=0,
    copy_s=0.0,
    num_preempted=0,
)


class StepClock:
    """Sums over the steps that have ended since the last sample; steps end in the order in which they began."""

    def __init__(self) -> None:
        """Start with nothing under way."""
        self._began_s: deque[float] = deque()
        self._ended_s = 0.0
        self._sum = NOTHING

    def begin(self, now_s: float) -> None:
        """Note that a step is being scheduled."""
        self._began_s.append(now_s)

    def end(self, batch: Batch, num_new_tokens: int, now_s: float) -> None:
        """Count the oldest step under way: from the end of the one before it, or its own begin if that is later."""
        duration_s = now_s - max(self._began_s.popleft(), self._ended_s)
        self._ended_s = now_s
        if not batch.num_tokens:
            return
        sums = self._sum
        self._sum = replace(
            sums,
            num_steps=sums.num_steps + 1,
            duration_s=sums.duration_s + duration_s,
            num_tokens=sums.num_tokens + batch.num_tokens,
            num_requests=sums.num_requests + batch.num_requests,
            num_prompt_steps=sums.num_prompt_steps + (batch.num_prompt_tokens > 0),
            num_prompt_tokens=sums.num_prompt_tokens + batch.num_prompt_tokens,
            num_new_tokens=sums.num_new_tokens + num_new_tokens,
            num_preempted=sums.num_preempted + batch.num_preempted,
            num_started=sums.num_started + batch.num_started,
        )

    def end_answer(self, num_tokens: int) -> None:
        """Count an answer that has ended."""
        self._sum = replace(self._sum, answers=(*self._sum.answers, num_tokens))

    def take(self, report: StepReport) -> StepSample:
        """Return the sample of the steps that a report covers, and start anew."""
        sums, self._sum = self._sum, NOTHING
        return replace(
            sums,
            num_missed=report.missed + report.foreseen,
            exposed_s=min(report.exposed_s, sums.duration_s),
            copied_bytes=report.copied_bytes,
            copy_s=report.copy_s,
        )
