"""What the adjuster decided as log lines: at most one a second where something changed, else one in ten seconds.

The scheduler logs what `line` returns. What fell between two lines is summed up in the later one.
"""

from collections.abc import Sequence

from elasticmoe.runtime.pages.changes import Plan, Reason
from elasticmoe.runtime.pages.table import PageTable

INTERVAL_S = 1.0
REFUSALS_S = 10.0
"""Between two lines where all that there is to tell is what was refused."""


class DecisionLog:
    """Changes and refusals that no line has told yet."""

    def __init__(self) -> None:
        """Start with nothing to tell."""
        self._counts = {"evicted": 0, "loaded": 0, "swapped": 0, "refused": 0}
        self._changed: str | Reason = ""
        """The last reason for a change."""
        self._refused: str | Reason = ""
        """The last reason for a refusal."""
        self._told_s = float("-inf")

    def line(self, decisions: Sequence[Plan], table: PageTable, now_s: float) -> str | None:
        """Take in a step's decisions; return the line that is due; None if there is none, or one was just told."""
        for plan in decisions:
            self._add(plan)
        if not self._changed and (not decisions or decisions[-1]):
            return None  # nothing to tell, or nothing that is refused now
        if now_s - self._told_s < (INTERVAL_S if self._changed else REFUSALS_S):
            return None
        counts = ", ".join(f"{num} {what}" for what, num in self._counts.items() if num)
        told = f"experts {counts}" if self._changed else f"evictions {counts}"
        line = f"{told}; {table.num_resident} of {table.state.size} resident; last: {self._changed or self._refused}"
        self._counts = dict.fromkeys(self._counts, 0)
        self._changed = self._refused = ""
        self._told_s = now_s
        return line

    def _add(self, plan: Plan) -> None:
        self._counts["evicted"] += len(plan.evict)
        self._counts["loaded"] += len(plan.load)
        self._counts["swapped"] += len(plan.swap)
        self._counts["refused"] += not plan
        if plan:
            self._changed = plan.reason
        else:
            self._refused = plan.reason
