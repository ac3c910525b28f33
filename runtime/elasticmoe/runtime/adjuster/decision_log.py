"""What the adjuster decided as log lines: one for a step that changed something, at most one a second.

The scheduler logs what `line` returns. What fell between two lines is summed up in the later one.
"""

from collections.abc import Iterable

from elasticmoe.runtime.pages.changes import Plan
from elasticmoe.runtime.pages.table import PageTable

INTERVAL_S = 1.0


class DecisionLog:
    """Changes and refusals that no line has told yet."""

    def __init__(self) -> None:
        """Start with nothing to tell."""
        self._counts = {"evicted": 0, "loaded": 0, "swapped": 0, "refused": 0}
        self._reason = ""
        self._told_s = float("-inf")

    def line(self, decisions: Iterable[Plan], table: PageTable, now_s: float) -> str | None:
        """Take in a step's decisions; return the line that is due; None if nothing changed or one was just told."""
        for plan in decisions:
            self._add(plan)
        changed = self._counts["evicted"] + self._counts["loaded"] + self._counts["swapped"]
        if not changed or now_s - self._told_s < INTERVAL_S:
            return None
        counts = ", ".join(f"{num} {what}" for what, num in self._counts.items() if num)
        line = f"experts {counts}; {table.num_resident} of {table.state.size} resident; last: {self._reason}"
        self._counts = dict.fromkeys(self._counts, 0)
        self._told_s = now_s
        return line

    def _add(self, plan: Plan) -> None:
        self._counts["evicted"] += len(plan.evict)
        self._counts["loaded"] += len(plan.load)
        self._counts["swapped"] += len(plan.swap)
        self._counts["refused"] += not plan
        if plan:
            self._reason = plan.reason
