"""A worker without tensors: applies PageDeltas to its own table and to a model of what every byte range holds."""

from collections.abc import Iterable

from elasticmoe.runtime.pages.changes import Entry, PageDelta
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import BlockId, ExpertKey, PageId

Content = tuple[object, ...]
"""What a page or block holds: ("expert", key, matrix), ("kv", block, step), or ("junk",)."""

JUNK: Content = ("junk",)


class MirrorWorker:
    """Knows only its first entries and the deltas since; writing a page spoils the blocks under it, and vice versa."""

    def __init__(self, tiers: Tiers, entries: Iterable[Entry]) -> None:
        """Copy the residents of these entries into their pages."""
        self._tiers = tiers
        self.entries: dict[ExpertKey, Entry] = {}
        self.loading: dict[ExpertKey, tuple[PageId, ...]] = {}
        """Loads whose entry has not come yet."""
        self._pages: dict[PageId, Content] = {}
        self._blocks: dict[BlockId, Content] = {}
        self._step = 0
        self._write_entries(entries)
        for entry in self.entries.values():
            if entry.is_resident:
                self._copy_in(entry.key, entry.pages)

    def apply(self, delta: PageDelta) -> None:
        """Apply moves, then entries, then loads."""
        for move in delta.moves:
            self._write_page(move.dst, self._pages.get(move.src, JUNK))
        self._write_entries(delta.entries)
        self.loading = {}  # what was sent with an earlier delta has its entry in this one, or was evicted since
        for load in delta.loads:
            self._copy_in(load.key, load.pages)
            self.loading[load.key] = load.pages

    def forward(self, used: Iterable[BlockId]) -> None:
        """Run a step: fetch something into every slot, write every used block."""
        self._step += 1
        for entry in self.entries.values():
            if not entry.is_resident:
                for page in entry.pages:
                    self._write_page(page, JUNK)
        for block in used:
            self._write_block(block)

    def check(self, kept: Iterable[BlockId]) -> None:
        """Raise AssertionError unless residents read their weights, and `kept` blocks hold what was written there."""
        for key, entry in self.entries.items():
            if entry.is_resident:
                held = [self._pages[page] for page in entry.pages]
                assert held == [("expert", key, n) for n in range(3)], f"{key} reads {held} from {entry.pages}"
        for block in kept:
            held_by_block = self._blocks[block]
            assert held_by_block[:2] == ("kv", block), f"block {block} holds {held_by_block}"

    def check_slots(self) -> None:
        """Raise AssertionError if two experts of one layer share a page, or two owners one."""
        owners: dict[PageId, object] = {}
        rows: dict[tuple[int, PageId], ExpertKey] = {}
        for key, entry in self.entries.items():
            owner = key if entry.is_resident else "loading"
            for page in entry.pages:
                assert owners.setdefault(page, owner) == owner, f"page {page} belongs to {owners[page]} and {owner}"
                assert rows.setdefault((key.layer, page), key) == key, f"{key} shares page {page} within its layer"
        for key, pages in self.loading.items():
            assert owners.keys().isdisjoint(pages), f"pages {pages} that {key} is copied into belong to somebody"

    def owned_pages(self) -> tuple[set[PageId], set[PageId]]:
        """Return the pages of experts (also those being copied into) and the pages of slots."""
        entries = self.entries.values()
        experts = {page for entry in entries if entry.is_resident for page in entry.pages}
        experts.update(page for pages in self.loading.values() for page in pages)
        return experts, {page for entry in entries if not entry.is_resident for page in entry.pages}

    def _write_entries(self, entries: Iterable[Entry]) -> None:
        self.entries.update((entry.key, entry) for entry in entries)

    def _copy_in(self, key: ExpertKey, pages: Iterable[PageId]) -> None:
        for matrix, page in enumerate(pages):
            self._write_page(page, ("expert", key, matrix))

    def _write_page(self, page: PageId, content: Content) -> None:
        start = self._tiers.page_offset(page)
        first, last = (
            start // self._tiers.block_bytes,
            (start + self._tiers.expert_bytes - 1) // self._tiers.block_bytes,
        )
        for block in range(first, last + 1):
            self._blocks[BlockId(block)] = JUNK
        self._pages[page] = content

    def _write_block(self, block: BlockId) -> None:
        """Write a block; spoils every expert page that overlaps it, wherever its huge page starts."""
        start, end = block * self._tiers.block_bytes, (block + 1) * self._tiers.block_bytes
        for page in map(PageId, self._tiers.pages_of(self._tiers.huge_of_block(block))):
            offset = self._tiers.page_offset(page)
            if offset < end and start < offset + self._tiers.expert_bytes:
                self._pages[page] = JUNK
        self._blocks[block] = ("kv", block, self._step)
