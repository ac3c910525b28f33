"""The page table: residents, slots of loading buffers, and the deltas that workers apply."""

import numpy as np
import pytest

from elasticmoe.runtime.pages.changes import Entry, Load, PageDelta
from elasticmoe.runtime.pages.pool import PagePool
from elasticmoe.runtime.pages.table import LOADING, OFFLOADED, RESIDENT, PageTable
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.block_port import FakeBlockPort

ONE_PAGE = fit_tiers(64, 32)  # k = 1, m = 2
FOUR_PAGES = Tiers(expert_bytes=32, block_bytes=64, raw_block_bytes=64, pages_per_huge=4, blocks_per_huge=2)


def make_table(offloaded: int, *, num_layers: int = 4, num_experts: int = 4, tiers: Tiers = ONE_PAGE) -> PageTable:
    """Return a table over two loading buffers in a pool with room for 40 pages more than all experts."""
    num_huge = 1 + (3 * num_layers * num_experts + 40) // tiers.pages_per_huge
    num_blocks = num_huge * tiers.blocks_per_huge
    table = PageTable(PagePool(tiers, num_blocks, FakeBlockPort(num_blocks)), num_layers, num_experts, loading_depth=2)
    table.place(np.tile(np.arange(num_experts), (num_layers, 1)), offloaded)
    return table


def land(table: PageTable) -> PageDelta:
    """Return the delta of a step that does nothing but let loads land."""
    table.drain()
    table.land()
    return table.drain()


def test_placement_keeps_the_top_of_each_ranking() -> None:
    """With one expert of each layer out, the last of the ranking has slot 0 of its layer's buffer."""
    table = make_table(1, num_layers=2)
    assert table.num_resident == 6
    assert [e.is_resident for e in table.entries()] == [True, True, True, False] * 2
    assert table.num_slotted().tolist() == [1, 1]
    assert table.buffer_depth().tolist() == [1, 1]
    assert table.num_loading_pages == 6
    table.check_integrity()


def test_all_resident_needs_no_loading_buffer() -> None:
    """Nothing offloaded, no slot: the pool gives pages to residents only."""
    table = make_table(0)
    assert (table.num_loading_pages, table.pool.num_owned_pages) == (0, 48)
    assert not table.is_loading


def test_placement_is_nothing_that_a_worker_is_told() -> None:
    """Workers place for themselves; the first delta is empty."""
    assert not make_table(2).drain()


def test_no_more_buffers_than_layers() -> None:
    """A single layer has a single buffer, whatever the depth asked for."""
    table = make_table(2, num_layers=1)
    assert table.buffer_depth().tolist() == [2]


def test_an_evicted_expert_reads_from_a_slot() -> None:
    """Its pages are freed, it gets the next slot of its layer's buffer, and the worker is told its new row."""
    table = make_table(1)
    before = table.pool.num_free_pages
    key = ExpertKey(0, 2)
    table.evict(key)
    (entry,) = table.drain().entries
    assert entry == table.entry(key)
    assert not entry.is_resident
    assert table.num_slotted().tolist() == [2, 1, 1, 1]
    assert table.pool.num_free_pages == before, "the first expert to need the buffer's second slot nets nothing"
    table.check_integrity()


def test_an_eviction_that_deepens_no_buffer_frees_three_pages() -> None:
    """Layers 0 and 2 share a buffer: once one has deepened it, the other's eviction is pure gain."""
    table = make_table(1)
    table.evict(ExpertKey(0, 2))
    before = table.pool.num_free_pages
    table.evict(ExpertKey(2, 0))
    assert table.pool.num_free_pages == before + 3


def test_only_a_resident_expert_can_be_evicted() -> None:
    """Evicting an offloaded or a loading expert is a bug."""
    table = make_table(1)
    key = ExpertKey(0, 3)
    with pytest.raises(AssertionError, match="evicted but not resident"):
        table.evict(key)
    table.load(key)
    with pytest.raises(AssertionError, match="evicted but not resident"):
        table.evict(key)


def test_a_load_keeps_its_slot_until_it_lands() -> None:
    """The delta that carries a load leaves the row at the slot; the next one turns it to the reserved pages."""
    table = make_table(1)
    key = ExpertKey(1, 3)
    slot = table.entry(key)
    table.load(key)
    assert (table.state[key], table.is_loading, table.entry(key)) == (LOADING, True, slot)
    (load,) = table.drain().loads
    assert load.key == key
    table.check_integrity()
    assert land(table).entries == (Entry(key, load.pages, is_resident=True),)
    assert (table.state[key], table.is_loading) == (RESIDENT, False)
    table.check_integrity()


def test_only_an_offloaded_expert_can_be_loaded() -> None:
    """Loading a resident or a loading expert is a bug."""
    table = make_table(1)
    table.load(ExpertKey(0, 3))
    for key in (ExpertKey(0, 3), ExpertKey(0, 0)):
        with pytest.raises(AssertionError, match="loaded but not offloaded"):
            table.load(key)


def test_landing_closes_the_gap_among_slots() -> None:
    """When the expert in slot 0 comes back, the layer's last one moves into slot 0 and its row is sent."""
    table = make_table(3)
    first, last = ExpertKey(0, 1), ExpertKey(0, 3)
    slot = table.entry(first).pages
    table.load(first)
    delta = land(table)
    assert Entry(last, slot, is_resident=False) in delta.entries
    assert {entry.key for entry in delta.entries} == {first, last}
    table.check_integrity()


def test_a_buffer_shrinks_with_its_most_offloaded_layer() -> None:
    """Its last slot goes back to the pool only when no layer of the buffer needs it any more."""
    table = make_table(1)
    table.load(ExpertKey(0, 3))
    land(table)
    assert table.buffer_depth().tolist() == [1, 1]
    table.load(ExpertKey(2, 3))
    land(table)
    assert table.buffer_depth().tolist() == [0, 1]
    table.check_integrity()


def test_experts_that_land_together_each_get_their_own_row() -> None:
    """Two loads of one layer land in one step; neither row points at a slot afterwards."""
    table = make_table(3)
    for expert in (3, 1):
        table.load(ExpertKey(0, expert))
    delta = land(table)
    assert [entry.key.expert for entry in delta.entries if not entry.is_resident] == [2]
    assert {entry.key.expert for entry in delta.entries if entry.is_resident} == {1, 3}
    table.check_integrity()


def test_a_delta_is_sent_once() -> None:
    """What was drained is forgotten."""
    table = make_table(1)
    table.evict(ExpertKey(0, 0))
    table.load(ExpertKey(1, 3))
    assert table.drain()
    assert not table.drain()


def test_an_expert_evicted_and_loaded_in_one_step_gets_new_pages() -> None:
    """The row stays at the slot while its load is under way."""
    table = make_table(1)
    key = ExpertKey(0, 0)
    table.evict(key)
    table.load(key)
    delta = table.drain()
    assert [entry.is_resident for entry in delta.entries] == [False]
    assert isinstance(delta.loads[0], Load)
    assert table.state[ExpertKey(0, 3)] == OFFLOADED


# Vacating huge pages of four expert pages


def test_vacating_moves_contents_and_rows() -> None:
    """Four evictions leave 6 scattered pages free; vacating copies residents together and gives a huge page back."""
    table = make_table(2, tiers=FOUR_PAGES)
    for layer, expert in ((0, 0), (2, 1), (1, 0), (3, 1)):
        table.evict(ExpertKey(layer, expert))
    lent = table.pool.num_lent_huge
    assert table.vacate()
    assert table.pool.num_lent_huge == lent - 1
    delta = table.drain()
    assert delta.moves
    moved = {move.dst for move in delta.moves}
    assert moved <= {page for entry in delta.entries for page in entry.pages}
    table.check_integrity()


def test_vacating_a_slot_copies_nothing_but_moves_the_rows_of_all_its_users() -> None:
    """A slot holds nothing between steps: no copy is made for it, and every expert that reads from it is told."""
    table = make_table(2, num_experts=2, tiers=FOUR_PAGES)  # nobody is resident: slots only
    for layer in (1, 3):
        table.load(ExpertKey(layer, 0))
    land(table)  # buffer 1 needs one slot now, for expert 1 of layers 1 and 3
    before = {entry.key: entry.pages for entry in table.entries()}
    assert table.vacate()
    delta = table.drain()
    moved = {entry.key for entry in table.entries() if before[entry.key] != entry.pages}
    assert moved == {entry.key for entry in delta.entries} == {ExpertKey(1, 1), ExpertKey(3, 1)}
    assert not delta.moves
    table.check_integrity()


def test_pages_that_are_being_copied_into_are_not_moved() -> None:
    """A loading expert's pages are pinned: their huge pages are no ones to empty."""
    table = make_table(2, tiers=FOUR_PAGES)
    movable = table.num_movable_huge
    table.load(ExpertKey(0, 3))
    (load,) = table.drain().loads
    fixed = {table.pool.tiers.huge_of_page(page) for page in load.pages}
    assert table.num_movable_huge == table.pool.num_lent_huge - len(fixed) <= movable
    while table.vacate():
        pass
    assert all(move.src not in load.pages for move in table.drain().moves)
    table.check_integrity()


def test_nothing_to_vacate() -> None:
    """With one expert page a huge page nothing is ever scattered."""
    table = make_table(1)
    table.evict(ExpertKey(0, 0))
    assert not table.vacate()
