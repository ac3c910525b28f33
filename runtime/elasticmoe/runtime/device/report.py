"""What a worker counted since its last report; it travels to the scheduler with a step's output."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class StepReport:
    """Counts of one rank."""

    routed: np.ndarray
    """[layers, experts] int64: tokens routed to each expert."""
    routed_resident: int
    """Of those, the ones that found their expert resident."""
    missed: int
    """Fetches of experts that were routed to and absent."""
    predicted: int
    """Fetches on a prediction, before the routing was known."""
    foreseen: int
    """Of those, the ones of experts that were routed to then."""
    planned: int
    """Fetches of experts that the adjuster made resident."""
    exposed_s: float
    """Seconds that compute waited for fetches."""
    copied_bytes: int
    """Bytes copied to the device whose time was taken: fetches but the planned ones, and the residents' at start."""
    copy_s: float
    """Seconds that those copies took."""


@dataclass(frozen=True, slots=True)
class FetchCounts:
    """The part of a report that fetches make."""

    routed: np.ndarray
    routed_resident: int
    missed: int
    predicted: int
    foreseen: int
    exposed_s: float
    copy_s: float


Pending = Callable[[], FetchCounts]
"""Gives the counts once the device has brought them; waits for no more than that."""
PendingReport = Callable[[], StepReport]
