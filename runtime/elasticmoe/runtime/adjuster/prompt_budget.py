"""How long the next step may take before who runs is late: prompts are what makes a step long.

An answer of n tokens is late if the n - 1 steps after its first token last longer than as many TPOTs. Who will have how
many isn't known, so no window of steps as long as the shortest hundredth of the answers may take more than its share,
but for a prompt where no step before it was long.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isnan

SHARE = 0.7
"""Of the TPOT promised, what is planned with: who runs will hold more KV, and who comes next isn't known."""
GUESS, LONGEST = 16, 32
"""Steps of the window before answers have ended, and at most."""
REMEMBERED = 1000
"""Answers whose lengths say how long the window is."""


@dataclass(slots=True)
class _Step:
    lasts_s: float
    """As expected, then as measured."""
    is_foreseen: bool


@dataclass(slots=True)
class PromptBudget:
    """What the steps of the requests that run may last: by a window that is always that of the answers remembered."""

    tpot_s: float
    """As promised; seconds."""
    window: int = GUESS
    """Steps of an answer as short as the shortest hundredth of those that ended."""
    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=LONGEST))
    """The last ones, since anyone has waited for a next token."""
    _open: deque[_Step] = field(default_factory=deque)
    """Those that haven't been measured yet, the oldest first."""
    _answers: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Steps after the first token, `LONGEST` at most."""

    def step_s(self, *, is_owed: bool, has_prompt: bool = False) -> float:
        """Return the seconds that the next step may take, with one more prompt than it `has_prompt` already.

        Any where nobody waits for a next token. Where no step of the window has lasted a TPOT the first prompt may be
        of any length too: a long one must start some time.
        """
        before = [step.lasts_s for step in self._steps][-self.window :]
        if not is_owed or (not has_prompt and max(before, default=0.0) <= self.tpot_s):
            return inf
        return SHARE * self.window * self.tpot_s - sum(before[1 - self.window :])

    def spend(self, expected_s: float, *, is_owed: bool) -> None:
        """Count a step that was scheduled and is expected to take so many seconds, NaN where nobody knows yet.

        Where everyone's first token is still to come, nobody can be late: what was before is forgotten.
        """
        is_foreseen = is_owed and not isnan(expected_s)
        step = _Step(expected_s if is_foreseen else 0.0, is_foreseen)
        self._open.append(step)
        if is_owed:
            self._steps.append(step)
        else:
            self._steps.clear()

    def settle(self, num_steps: int, duration_s: float) -> None:
        """Put right what was expected of the oldest steps, if something was of all, by what they took together."""
        steps = [self._open.popleft() for _ in range(min(num_steps, len(self._open)))]
        if not steps or len(steps) < num_steps or not all(step.is_foreseen for step in steps):
            return
        more_s = (duration_s - sum(step.lasts_s for step in steps)) / num_steps
        for step in steps:
            step.lasts_s = max(0.0, step.lasts_s + more_s)

    def learn(self, answers: Iterable[int]) -> None:
        """Take in the tokens of answers that have ended; one of a single token waits for no next one."""
        lasted = [min(tokens - 1, LONGEST) for tokens in answers if tokens > 1]
        if not lasted:
            return
        self._answers.extend(lasted)
        self.window = self._shortest()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the window is the answers', and no step takes less than nothing."""
        assert self.window == self._shortest(), f"a window of {self.window} steps, answers say {self._shortest()}"
        assert all(step.lasts_s >= 0 for step in self._steps), f"steps of {[step.lasts_s for step in self._steps]} s"

    def _shortest(self) -> int:
        num = len(self._answers)
        return max(2, sorted((GUESS, *self._answers))[min(1 + num // 100, num)])
