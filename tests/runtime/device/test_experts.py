"""One rank's experts on a CPU: what is read through the table is the expert, wherever it lies and however it came."""

import numpy as np
import pytest
import torch

from elasticmoe.runtime.device.experts import Experts
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.pages.changes import Entry, Load, Move, PageDelta
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers
from elasticmoe.runtime.units import ExpertKey, PageId

LAYOUT = HostLayout(num_layers=2, num_experts=4, rows=4, cols=8, itemsize=4)
TIERS = fit_tiers(LAYOUT.matrix_bytes, LAYOUT.matrix_bytes)
NUM_PAGES = 40
SLOT = (PageId(30), PageId(31), PageId(32))


def _pages(first: int) -> tuple[PageId, PageId, PageId]:
    return PageId(first), PageId(first + 1), PageId(first + 2)


def _home(key: ExpertKey) -> Entry:
    return Entry(key, _pages(1 + 3 * (key.layer * 4 + key.expert)), is_resident=True)


@pytest.fixture
def experts() -> Experts:
    """Return experts of two layers, all resident but expert 3 of layer 1, which has a slot."""
    pool = HostPool(LAYOUT, torch.float32)
    for layer in range(2):
        pool.gate_up(layer).copy_(torch.randn(4, 8, 8))
        pool.down(layer).copy_(torch.randn(4, 8, 4))
    made = Experts(pool, torch.device("cpu"))
    keys = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]
    entries = [_home(key) for key in keys[:-1]] + [Entry(keys[-1], SLOT, is_resident=False)]
    made.attach(torch.zeros(NUM_PAGES * LAYOUT.matrix_bytes, dtype=torch.uint8), TIERS, entries)
    return made


def _is_readable(experts: Experts, key: ExpertKey) -> bool:
    """Return whether the table's row leads to the expert's three matrices."""
    w1, w3, w2 = experts.table.pages[key].tolist()
    gate_up, down = experts.pool.gate_up(key.layer)[key.expert], experts.pool.down(key.layer)[key.expert]
    arena = experts.arena
    read = torch.cat([arena.up_pages[w1], arena.up_pages[w3]])
    return torch.equal(read, gate_up) and torch.equal(arena.down_pages[w2], down)


def test_resident_experts_are_copied_in_at_start(experts: Experts) -> None:
    """After attach every resident expert is readable, an offloaded one isn't yet."""
    assert all(_is_readable(experts, ExpertKey(0, expert)) for expert in range(4))
    assert not _is_readable(experts, ExpertKey(1, 3))


def test_the_residents_copies_at_start_are_timed_once(experts: Experts) -> None:
    """The first report tells how many bytes came to the device and in how many seconds; the next one only fetches."""
    first = experts.take_report()()
    assert first.copied_bytes == 7 * LAYOUT.expert_bytes
    assert first.copy_s > 0
    second = experts.take_report()()
    assert (second.copied_bytes, second.copy_s) == (0, 0)
    experts.begin_step(2)
    experts.prepare(1, torch.tensor([[3]], dtype=torch.int32))
    third = experts.take_report()()
    assert third.copied_bytes == LAYOUT.expert_bytes
    assert third.copy_s == third.exposed_s > 0


def test_an_offloaded_expert_is_fetched_when_it_is_routed_to(experts: Experts) -> None:
    """Preparing a layer for ids that name it makes it readable, and counts one missed fetch."""
    experts.begin_step(2)
    experts.prepare(1, torch.tensor([[0, 3], [3, 1]], dtype=torch.int32))
    assert _is_readable(experts, ExpertKey(1, 3))
    report = experts.take_report()()
    assert (report.missed, report.planned, report.routed_resident) == (1, 0, 2)
    assert np.array_equal(report.routed, [[0, 0, 0, 0], [1, 1, 0, 2]])


def test_an_expert_that_nobody_routes_to_is_not_fetched(experts: Experts) -> None:
    """Ids that don't name the offloaded expert fetch nothing."""
    experts.begin_step(2)
    experts.prepare(1, torch.tensor([[0, 1]], dtype=torch.int32))
    assert not _is_readable(experts, ExpertKey(1, 3))
    assert experts.take_report()().missed == 0


def test_warm_up_is_not_counted(experts: Experts) -> None:
    """Forwards outside a step fetch what they need but count nothing."""
    experts.prepare(1, torch.tensor([[3]], dtype=torch.int32))
    report = experts.take_report()()
    assert _is_readable(experts, ExpertKey(1, 3))
    assert report.missed == 0
    assert report.routed.sum() == 0


def test_a_load_is_copied_before_its_row_points_there(experts: Experts) -> None:
    """A load fills the reserved pages; the row follows with a later delta and then reads the expert."""
    key, pages = ExpertKey(1, 3), _pages(35)
    experts.apply(PageDelta(loads=(Load(key, pages),)))
    assert experts.table.row(key) == [30, 31, 32]
    experts.apply(PageDelta(entries=(Entry(key, pages, is_resident=True),)))
    assert _is_readable(experts, key)
    assert experts.take_report()().planned == 1


def test_moved_pages_keep_their_content(experts: Experts) -> None:
    """A page moves before rows are rewritten, so the expert is readable at its new place at once."""
    key = ExpertKey(0, 2)
    w1, w3, w2 = _home(key).pages
    entry = Entry(key, (PageId(37), w3, w2), is_resident=True)
    experts.apply(PageDelta(moves=(Move(w1, PageId(37)),), entries=(entry,)))
    assert _is_readable(experts, key)


def test_before_the_arena_nothing_is_fetched() -> None:
    """Memory profiling runs on one temporary expert: every row is valid, and no copy is made."""
    made = Experts(HostPool(LAYOUT, torch.float32), torch.device("cpu"))
    made.prepare(0, torch.tensor([[0, 1, 2, 3]]))
    assert made.arena.up_pages.shape[0] == 3
    assert not made.table.pages.any()


def test_views_reach_every_page_at_its_granule() -> None:
    """Where H isn't k * E, page indices count granules, and each view reads exactly the page's bytes."""
    tiers = Tiers(expert_bytes=128, block_bytes=144, raw_block_bytes=128, pages_per_huge=1, blocks_per_huge=1)
    assert tiers.granule_bytes == 16
    made = Experts(HostPool(LAYOUT, torch.float32), torch.device("cpu"))
    storage = torch.arange(40 * tiers.huge_bytes).to(torch.uint8)
    key = ExpertKey(0, 0)
    for page in range(20):
        made.attach(storage, tiers, [Entry(key, _pages(page), is_resident=False)])
        offset = tiers.page_offset(PageId(page))
        want = storage[offset : offset + LAYOUT.matrix_bytes]
        got = made.arena.up_pages[made.table.row(key)[0]].contiguous()
        assert torch.equal(got.view(torch.uint8).flatten(), want)
