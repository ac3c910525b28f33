"""What the simulated engine measures of its own steps, summed between two reports, as the real one does.

Nothing else of the simulator reaches the adjuster.
"""

import numpy as np

from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.simulator.requests import Request
from elasticmoe.runtime.simulator.step_cost import StepCost

REPORT_STEPS = 16
"""Steps between two reports, as in engine.scheduler; the first is reported at once, the next after 1, 2, 4, 8 more."""


class Meter:
    """Sums over the steps since the last report; knows only what clocks and counters of an engine show."""

    def __init__(self, num_groups: int, expert_bytes: int, expert_s: float) -> None:
        """Start with nothing measured; copies of one expert take `expert_s` by their own clock."""
        self._expert_bytes = expert_bytes
        self._expert_s = expert_s
        self._wanted_steps = 1
        self._num_groups = num_groups
        self._clear()

    def _clear(self) -> None:
        self.tokens_by_group = np.zeros(self._num_groups)
        self._num_steps = self._num_requests = self._num_prompt_steps = 0
        self._num_prompt_tokens = self._num_new_tokens = self._num_preempted = 0
        self._num_missed = self._num_copied = 0
        self._num_started = 0
        self._answers: list[int] = []
        self._duration_s = self._exposed_s = 0.0

    def add_batch(self, scheduled: list[tuple[Request, int]], num_preempted: int) -> np.ndarray:
        """Add a scheduled step's tokens, before they are computed; return its tokens by group [groups]."""
        groups = np.zeros(self._num_groups)
        num_prompt_tokens = num_new_tokens = 0
        for request, num_new in scheduled:
            groups[request.group] += num_new
            self._num_started += request.computed == 0
            left = request.num_tokens - request.computed
            num_new_tokens += num_new == left
            num_prompt_tokens += num_new if left > 1 else 0
        self._num_preempted += num_preempted
        self._num_steps += bool(scheduled)
        self._num_requests += len(scheduled)
        self._num_prompt_steps += num_prompt_tokens > 0
        self._num_prompt_tokens += num_prompt_tokens
        self._num_new_tokens += num_new_tokens
        self.tokens_by_group += groups
        return groups

    def add_cost(self, cost: StepCost, num_missed: int) -> None:
        """Add the times of a step with tokens, and the experts that it fetched because they were routed to."""
        self._duration_s += cost.total_s
        self._exposed_s += cost.exposed_s
        self._num_missed += num_missed
        self._num_copied += num_missed

    def add_answers(self, done: list[Request]) -> None:
        """Add requests that a step has finished."""
        self._answers += [request.arrival.output_tokens for request in done]

    def add_copies(self, num_experts: int) -> None:
        """Add copies of whole experts that nothing waited for."""
        self._num_copied += num_experts

    def is_due(self, *, has_tokens: bool) -> bool:
        """Return whether to report now; a step without tokens reports what is left at once."""
        return self._num_steps >= self._wanted_steps if has_tokens else self._num_steps + self._num_copied > 0

    def drain(self) -> StepSample:
        """Return what was measured since the last report, and start anew."""
        sample = StepSample(
            num_steps=self._num_steps,
            duration_s=self._duration_s,
            num_tokens=int(self.tokens_by_group.sum()),
            num_requests=self._num_requests,
            num_prompt_steps=self._num_prompt_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_new_tokens=self._num_new_tokens,
            num_missed=self._num_missed,
            exposed_s=self._exposed_s,
            copied_bytes=self._num_copied * self._expert_bytes,
            copy_s=self._num_copied * self._expert_s,
            num_preempted=self._num_preempted,
            num_started=self._num_started,
            answers=tuple(self._answers),
        )
        self._wanted_steps = min(REPORT_STEPS, 2 * self._wanted_steps)
        self._clear()
        return sample
