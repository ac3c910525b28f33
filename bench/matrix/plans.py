"""What the policy decided in a cell, noted by one run and followed by another.

`goodput` decides by what its engine measured, so a replay whose experts never leave would decide otherwise; following
the noted plans, it schedules the same batches.
"""

from elasticmoe.runtime.adjuster.adjuster import Adjuster
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.changes import Plan
from elasticmoe.runtime.units import ExpertKey

Noted = list[tuple[int, list[list[int]], list[list[int]]]]
"""(number of the question, evicted, loaded) of every plan that changed something, experts as [layer, expert]."""


class PlanLog:
    """Stands before the policy of this process's adjusters; the policy itself answers until `follow`."""

    def __init__(self) -> None:
        """Start to count the questions."""
        self.noted: Noted = []
        self._asked = 0
        self._followed: dict[int, Plan] | None = None
        stock = Adjuster._plan  # noqa: SLF001

        def plan(this: Adjuster, snap: Snapshot) -> Plan:
            self._asked += 1
            answer = stock(this, snap) if self._followed is None else self._followed.get(self._asked, Plan())
            if answer:
                evict, load = ([list(map(int, key)) for key in keys] for keys in (answer.evict, answer.load))
                self.noted.append((self._asked, evict, load))
            return answer

        Adjuster._plan = plan  # type: ignore[assignment, method-assign]  # noqa: SLF001

    def start(self, followed: Noted | None) -> None:
        """Count anew, for one cell; follow the plans that another run noted in it, if any are given."""
        self.noted, self._asked = [], 0
        self._followed = None if followed is None else {asked: _plan(evict, load) for asked, evict, load in followed}

    def stop(self) -> Noted:
        """Return the plans since the start; from now on the policy answers."""
        self._followed = None
        return self.noted


def _plan(evict: list[list[int]], load: list[list[int]]) -> Plan:
    leaving, coming = (tuple(ExpertKey(*key) for key in keys) for keys in (evict, load))
    return Plan(evict=leaving, load=coming, reason="as another run did", cause="low" if evict else "room")
