"""What a simulated run comes to: the course of every step, and the figures that people ask for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticmoe.runtime.simulator.requests import Request
from elasticmoe.runtime.simulator.step_cost import StepCost
from elasticmoe.runtime.units import MATRICES

SPARE_PAGES = 9
"""Pages that policies leave free for the next step's requests (Rimuru's threshold to grow)."""


@dataclass(frozen=True, slots=True)
class Load:
    """An engine at the end of a step."""

    running: int
    waiting: int
    away: int = 0
    free_pages: int = 0


@dataclass(slots=True)
class Trail:
    """One entry a step, in order of time; steps without tokens included."""

    at_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    away: list[int] = field(default_factory=list)
    """Experts, over all layers, that are not resident."""
    free_pages: list[int] = field(default_factory=list)
    """Expert pages that nothing holds."""
    exposed_s: float = 0.0
    copied_s: float = 0.0

    def add(self, now_s: float, load: "Load", cost: StepCost) -> None:
        """Add a step that ended now."""
        self.at_s.append(now_s)
        self.running.append(load.running)
        self.waiting.append(load.waiting)
        self.away.append(load.away)
        self.free_pages.append(load.free_pages)
        self.exposed_s += cost.exposed_s
        self.copied_s += cost.copy_s


@dataclass(frozen=True, slots=True)
class Slo:
    """Latencies that users are promised."""

    ttft_s: float = math.inf
    """Infinite: none."""
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """The requests of a run, all done, and its course."""

    requests: tuple[Request, ...]
    num_preemptions: int
    trail: Trail
    moved: tuple[int, int, int]
    """Experts evicted, loaded, swapped."""
    num_away_at_start: int = 0

    @property
    def num_steps(self) -> int:
        """Return the steps that computed tokens."""
        return sum(1 for running in self.trail.running if running)

    @property
    def peak(self) -> int:
        """Return the most requests that ran at once."""
        return max(self.trail.running, default=0)

    @property
    def wall_s(self) -> float:
        """Return the seconds from the first arrival to the last token."""
        if not self.requests:
            return 0.0
        return max(one.finished_s for one in self.requests) - self.requests[0].arrival.at_s

    @property
    def tok_s(self) -> float:
        """Return generated tokens a second, over `wall_s`."""
        return sum(one.arrival.output_tokens for one in self.requests) / self.wall_s if self.requests else 0.0

    def ttft_s(self, quantile: float) -> float:
        """Return a quantile of the times to the first token."""
        return find_quantile([one.first_token_s - one.arrival.at_s for one in self.requests], quantile)

    def tpot_s(self, quantile: float) -> float:
        """Return a quantile over requests of the mean time per token after the first."""
        return find_quantile(
            [
                (one.finished_s - one.first_token_s) / (one.arrival.output_tokens - 1)
                for one in self.requests
                if one.arrival.output_tokens > 1
            ],
            quantile,
        )

    def recovery(self, expert_s: float) -> "Recovery | None":
        """Return how long experts took to come home once there was room for them all; `expert_s` is one's copy.

        Counted, after the most were away, from the first step that left pages free for all of them and SPARE_PAGES.
        None if no more were ever away than at the start, or if there never was such room.
        """
        away = [max(0, num - self.num_away_at_start) for num in self.trail.away]
        if not any(away):
            return None
        most = len(away) - 1 - away[::-1].index(max(away))
        free = self.trail.free_pages
        start = next((n for n in range(most, len(away)) if free[n] >= MATRICES * away[n] + SPARE_PAGES), None)
        if start is None:
            return None
        home = next((n for n in range(start, len(away)) if not away[n]), None)
        took_s = math.inf if home is None else self.trail.at_s[home] - self.trail.at_s[start]
        return Recovery(away[start], took_s, away[start] * expert_s)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The way back to as many experts resident as at the start."""

    num_away: int
    took_s: float
    """Infinite: not all came back."""
    copy_s: float
    """What the copies alone take."""


def find_quantile(values: Sequence[float], quantile: float) -> float:
    """Return the value that a share `quantile` of them reaches at most (the nearest rank); 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]
