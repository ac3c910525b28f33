"""What the adjuster decided in a cell, noted by one run and followed by another.

`goodput` decides by what its engine measured, so a replay whose experts never leave would decide otherwise; following
the noted plans, it schedules the same batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elasticmoe.runtime.adjuster import adjuster as adjuster_module
from elasticmoe.runtime.adjuster.adjuster import Adjuster
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.pages.changes import Plan, Swap
from elasticmoe.runtime.pages.table import OFFLOADED, RESIDENT
from elasticmoe.runtime.units import MATRICES, ExpertKey

Keys = list[list[int]]
Noted = list[tuple[int, Keys, Keys, bool]]
"""(number of the question, leaving, coming, whether they swap) of what changed something; experts [layer, expert]."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One noted plan, or swaps."""

    leaving: tuple[ExpertKey, ...]
    coming: tuple[ExpertKey, ...]
    is_swap: bool

    def fits(self, snap: Snapshot) -> bool:
        """Return whether it can be applied: who leaves is resident, who comes is away, and there are pages for it."""
        leave, come = ([snap.state[key] for key in keys] for keys in (self.leaving, self.coming))
        pages = snap.free_pages + MATRICES * (len(leave) - len(come))
        return set(leave) <= {RESIDENT} and set(come) <= {OFFLOADED} and pages >= 0


class PlanLog:
    """Stands before the policy of this process's adjusters and their choice of swaps, which answer until `start`."""

    def __init__(self) -> None:
        """Start to count the questions."""
        self.noted: Noted = []
        self._asked = 0
        self._followed: dict[tuple[int, bool], Answer] | None = None
        self._shadow_policy()
        self._shadow_swaps()

    def start(self, followed: Noted | None) -> None:
        """Count anew, for one cell; follow what another run noted in it, if that is given, for as long as it fits."""
        self.noted, self._asked = [], 0
        self._followed = None if followed is None else {
            (asked, is_swap): Answer(_keys(leaving), _keys(coming), is_swap)
            for asked, leaving, coming, is_swap in followed
        }  # fmt: skip

    def stop(self) -> Noted:
        """Return what was noted since the start; from now on the policy answers."""
        self._followed = None
        return self.noted

    def _shadow_policy(self) -> None:
        stock = Adjuster._plan  # noqa: SLF001

        def plan(this: Adjuster, snap: Snapshot) -> Plan:
            self._asked += 1
            answer = self._answer(snap, is_swap=False)
            if answer is None:
                given = stock(this, snap)
            else:
                given = Plan(evict=answer.leaving, load=answer.coming, reason="as another run did", cause="short")
            self._note(given.evict, given.load, is_swap=False)
            return given

        Adjuster._plan = plan  # type: ignore[assignment, method-assign]  # noqa: SLF001

    def _shadow_swaps(self) -> None:
        patched: Any = adjuster_module
        stock = patched.choose_swaps

        def choose_swaps(snap: Snapshot, num: int, margin: float) -> tuple[Swap, ...]:
            answer = self._answer(snap, is_swap=True)
            if answer is None:
                swaps: tuple[Swap, ...] = stock(snap, num, margin)
            else:
                swaps = tuple(Swap(*pair) for pair in zip(answer.leaving, answer.coming, strict=True))
            self._note([swap.leaving for swap in swaps], [swap.coming for swap in swaps], is_swap=True)
            return swaps

        patched.choose_swaps = choose_swaps

    def _answer(self, snap: Snapshot, *, is_swap: bool) -> Answer | None:
        """Return the answer to the running question that is followed; None if the policy is to give its own."""
        if self._followed is None:
            return None
        answer = self._followed.get((self._asked, is_swap), Answer((), (), is_swap))
        if answer.fits(snap):
            return answer
        self._followed = None  # this run has gone another way
        return None

    def _note(self, leaving: Iterable[ExpertKey], coming: Iterable[ExpertKey], *, is_swap: bool) -> None:
        leave, come = ([[int(number) for number in key] for key in keys] for keys in (leaving, coming))
        if leave or come:
            self.noted.append((self._asked, leave, come, is_swap))


def _keys(keys: Keys) -> tuple[ExpertKey, ...]:
    return tuple(ExpertKey(*key) for key in keys)
