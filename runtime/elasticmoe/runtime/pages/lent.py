"""The huge pages lent to experts: which of their expert pages are free, and how to empty one. Used by the page pool."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import cast

from elasticmoe.runtime.pages.changes import Move
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import HugeId, PageId


class LentPages:
    """Every expert page of a lent huge page is owned or free; huge pages are in line by how many of theirs are free.

    Between calls of the pool no lent huge page is wholly free.
    """

    def __init__(self, tiers: Tiers) -> None:
        """Start with nothing lent."""
        self._tiers = tiers
        self._free: dict[HugeId, set[PageId]] = {}
        """The free pages of lent huge pages that have any."""
        self._lines = [OrderedDict[HugeId, None]() for _ in range(tiers.pages_per_huge + 1)]
        """Those huge pages by their number of free pages."""
        self._is_full = bytearray()
        """By huge page: whether it is lent with every page owned, as most are; a byte each."""
        self._num_full = 0
        self.num_free = 0

    def __len__(self) -> int:
        """Return the number of lent huge pages."""
        return self._num_full + len(self._free)

    def __contains__(self, huge: HugeId) -> bool:
        """Return whether a huge page is lent."""
        return huge in self._free or self._is_full[huge : huge + 1] == b"\1"

    @property
    def num_owned(self) -> int:
        """Return the expert pages that somebody owns."""
        return len(self) * self._tiers.pages_per_huge - self.num_free

    def lend(self, huge: HugeId) -> None:
        """Add a huge page, all its expert pages free."""
        self._free[huge] = {PageId(p) for p in self._tiers.pages_of(huge)}
        self.num_free += self._tiers.pages_per_huge
        self._lines[-1][huge] = None

    def lend_owned(self, huge: HugeId) -> Sequence[PageId]:
        """Add a huge page and take all its expert pages at once; return them."""
        self._fill(huge)
        return cast("Sequence[PageId]", self._tiers.pages_of(huge))

    def take(self, num: int) -> list[PageId]:
        """Take up to `num` free pages of the huge page that has the fewest."""
        line = next(line for line in self._lines[1:] if line)
        pages = sorted(self._free[next(iter(line))])[:num]
        for page in pages:
            self.own(page)
        return pages

    def own(self, page: PageId) -> None:
        """Take one given free page."""
        huge = self._tiers.huge_of_page(page)
        free = self._free.get(huge, set())
        assert page in free, f"expert page {page} taken but not free"
        del self._lines[len(free)][huge]
        free.remove(page)
        self.num_free -= 1
        if free:
            self._lines[len(free)][huge] = None
        else:
            del self._free[huge]
            self._fill(huge)

    def give(self, page: PageId) -> HugeId | None:
        """Free one owned page; return its huge page where that is wholly free now, and so lent no more."""
        huge = self._tiers.huge_of_page(page)
        free = self._free.get(huge)
        if free is None:
            assert self._is_full[huge : huge + 1] == b"\1", f"expert page {page} freed but its huge page is not lent"
            self._is_full[huge] = False
            self._num_full -= 1
            if self._tiers.pages_per_huge == 1:
                return huge
            free = self._free[huge] = set()
        else:
            assert page not in free, f"expert page {page} freed but nobody owns it"
            del self._lines[len(free)][huge]
        free.add(page)
        self.num_free += 1
        if len(free) == self._tiers.pages_per_huge:
            del self._free[huge]
            self.num_free -= len(free)
            return huge
        self._lines[len(free)][huge] = None
        return None

    def plan_vacate(self, pinned: set[PageId]) -> list[Move]:
        """Return the fewest moves that empty one huge page into free pages of others, or none if that can't be.

        Possible exactly when a huge page's worth of pages is free and a huge page holds no pinned one.
        """
        if self.num_free < self._tiers.pages_per_huge:
            return []
        fixed = {self._tiers.huge_of_page(page) for page in pinned}
        emptiest_first = chain((h for line in reversed(self._lines) for h in line), self._full())
        huge = next((h for h in emptiest_first if h not in fixed), None)
        if huge is None:
            return []
        owned = [p for p in map(PageId, self._tiers.pages_of(huge)) if p not in self._free.get(huge, ())]
        fullest_first = (h for line in self._lines[1:] for h in line if h != huge)
        room = islice((page for h in fullest_first for page in sorted(self._free[h])), len(owned))
        return [Move(src, dst) for src, dst in zip(owned, room, strict=True)]

    def _full(self) -> Iterator[HugeId]:
        return (HugeId(huge) for huge, is_full in enumerate(self._is_full) if is_full)

    def _fill(self, huge: HugeId) -> None:
        if huge >= len(self._is_full):
            self._is_full.extend(bytes(huge + 1 - len(self._is_full)))
        self._is_full[huge] = True
        self._num_full += 1

    def check_integrity(self) -> None:
        """Raise AssertionError with the arithmetic unless lines and counts agree with what is free."""
        free = sum(map(len, self._free.values()))
        assert free == self.num_free, f"{free} expert pages free, counted {self.num_free}"
        lines = {huge: num for num, line in enumerate(self._lines) for huge in line}
        assert lines == {h: len(f) for h, f in self._free.items()}, f"lines {lines} of {self._free}"
        assert sum(map(len, self._lines)) == len(self._free), "a huge page stands in two lines"
        assert not self._lines[0], f"huge pages in line with nothing free: {list(self._lines[0])}"
        assert self._free.keys().isdisjoint(self._full()), "a huge page is full and has free pages"
        assert self._num_full == sum(self._is_full), f"{sum(self._is_full)} huge pages full, counted {self._num_full}"
        assert not self._lines[-1], f"unmerged huge pages {list(self._lines[-1])}"
