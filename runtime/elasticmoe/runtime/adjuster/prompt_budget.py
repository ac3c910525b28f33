"""How long the next step may take before who runs is late: prompts are what makes a step long.

A leaky bucket of seconds. While answers come out, each step pays in its share of the TPOT promised and takes out what
it lasts, so that prompts that start because experts left for them leave every answer its TPOT.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf, isnan, nan

SHARE = 0.6
"""Of the TPOT promised, what steps may last on average: the promise is a P99, and who comes next isn't known."""
DEPTH = 3
"""TPOTs that a full budget holds: so much prompts may take at once, what an answer of a few tokens bears."""
MOST_OWED = 10
"""TPOTs that it can lack: what was owed before is owed to answers that have ended."""


@dataclass(slots=True)
class PromptBudget:
    """What the steps of the requests that run may last; full at first, and whenever nobody waits for a next token."""

    tpot_s: float
    """As promised; seconds."""
    held_s: float = field(init=False)
    """Below 0 once steps have lasted longer than who runs can bear."""
    _expected_s: deque[float] = field(default_factory=deque)
    """What steps that haven't been measured yet were said to take, the oldest first."""

    def __post_init__(self) -> None:
        """Start full."""
        self.held_s = self._full_s

    def step_s(self, *, is_owed: bool) -> float:
        """Return the seconds that the next step may take; from a full budget any: a long prompt starts some time."""
        held_s = self._held(is_owed=is_owed)
        return inf if held_s >= self._full_s else held_s + self.tpot_s

    def spend(self, expected_s: float, *, is_owed: bool) -> None:
        """Count a step that was scheduled and is expected to take so many seconds, NaN where nobody knows yet."""
        self._expected_s.append(expected_s if is_owed else nan)
        self.held_s = self._held(is_owed=is_owed)
        if not isnan(self._expected_s[-1]):
            self._take(expected_s - SHARE * self.tpot_s)

    def settle(self, num_steps: int, duration_s: float) -> None:
        """Put right what was expected of the oldest steps, if something was of all, by what they took together."""
        expected_s = sum(self._expected_s.popleft() if self._expected_s else nan for _ in range(num_steps))
        if not isnan(expected_s):
            self._take(duration_s - expected_s)

    def _held(self, *, is_owed: bool) -> float:
        """Return what there is for a step that is owed to who waits for a next token, or to nobody.

        Where everyone's first token is still to come, nobody can be late: what was owed is forgotten.
        """
        return self.held_s if is_owed else self._full_s

    def _take(self, seconds: float) -> None:
        self.held_s = min(self._full_s, max(-MOST_OWED * self.tpot_s, self.held_s - seconds))

    @property
    def _full_s(self) -> float:
        return DEPTH * self.tpot_s
