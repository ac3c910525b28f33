"""What a plan may change and what a worker is told: frozen values, small enough to pickle with every step."""

from dataclasses import dataclass
from typing import NamedTuple

from elasticmoe.runtime.contract.names import Cause
from elasticmoe.runtime.units import ExpertKey, PageId

Pages = tuple[PageId, PageId, PageId]
"""The pages of W1, W3 and W2 of one expert."""


class Swap(NamedTuple):
    """A colder resident expert is evicted and a hotter one of the same layer loaded, in the same step."""

    leaving: ExpertKey
    coming: ExpertKey


@dataclass(frozen=True, slots=True)
class Reason:
    """Words with numbers to be put into them: only when somebody reads them, as nobody reads most steps'."""

    words: str
    """As `str.format` takes them."""
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        """Return the words with their numbers."""
        return self.words.format(*self.numbers)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the adjuster wants: experts to evict, then experts to load, then swaps, and why."""

    evict: tuple[ExpertKey, ...] = ()
    load: tuple[ExpertKey, ...] = ()
    swap: tuple[Swap, ...] = ()
    reason: str | Reason = ""
    """Why, in words and numbers."""
    cause: Cause = "refused"
    """Why, as a label."""

    def __bool__(self) -> bool:
        """Return whether the plan changes anything."""
        return bool(self.evict or self.load or self.swap)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the page table: where an expert's matrices are read from this step on."""

    key: ExpertKey
    pages: Pages
    is_resident: bool
    """False: the pages are its slot of a loading buffer and hold it only after a fetch in this step."""


@dataclass(frozen=True, slots=True)
class Load:
    """Copy an expert from the host pool into pages reserved for it; its entry follows in a later delta."""

    key: ExpertKey
    pages: Pages


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one expert page to another place in the arena, before anything else of the same delta."""

    src: PageId
    dst: PageId


@dataclass(frozen=True, slots=True)
class PageDelta:
    """All that a worker applies before one forward: moves in order, then entries, then loads."""

    moves: tuple[Move, ...] = ()
    entries: tuple[Entry, ...] = ()
    loads: tuple[Load, ...] = ()
    reports: bool = False
    """Whether the worker should send its counts back with this step."""

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.moves or self.entries or self.loads or self.reports)
