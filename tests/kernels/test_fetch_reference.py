"""What is listed, in which round it is computed, and which bytes are copied, against the rules in plain words."""

import pytest
import torch
from hypothesis import given

from elasticmoe.kernels.reference import fetch, list_needed, num_rounds, paged_moe, round_ids
from tests.kernels.fetch_cases import Layer, layers, make_layer

E, GRANULE = 6, 4
"""Bytes of a matrix, and of what page indices count."""


@given(layers())
def test_each_needed_expert_is_listed_once(layer: Layer) -> None:
    """The routed experts that aren't resident, in order of experts, whoever routes to them how often."""
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=layer.rounds)
    count = int(needed.count)
    assert needed.experts[:count].tolist() == sorted(layer.needed)
    assert (needed.experts[count:] == -1).all()
    places = {e: place for e, place in enumerate(needed.places.tolist()) if place >= 0}
    assert places == {e: place for place, e in enumerate(sorted(layer.needed))}


@given(layers())
def test_the_table_points_at_slots_for_what_is_listed(layer: Layer) -> None:
    """A listed expert's row is a slot's, of its own in its round; any other row is the layer's."""
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=layer.rounds)
    for expert, row in enumerate(needed.table.tolist()):
        place = int(needed.places[expert])
        if place >= 0:
            assert row == layer.slots[place % layer.alive].tolist() == needed.pages[place].tolist()
        else:
            assert row == layer.table[expert].tolist()
    for first, last in needed.spans.tolist():
        assert len({tuple(row) for row in needed.pages[first:last].tolist()}) == last - first <= layer.alive


@given(layers())
def test_the_rounds_part_the_pairs_and_the_list(layer: Layer) -> None:
    """Each expert is copied in one round, and its pairs are computed in the same; the residents' in the first."""
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=layer.rounds)
    home = {expert: 0 for expert, is_resident in enumerate(layer.resident.tolist()) if is_resident}
    for index, (first, last) in enumerate(needed.spans.tolist()):
        for expert in needed.experts[first:last].tolist():
            assert expert not in home
            home[expert] = index
    assert set(home) == layer.needed | set(layer.resident.nonzero().flatten().tolist())
    for index in range(layer.rounds):
        want = [[e if home.get(e) == index else -1 for e in row] for row in layer.ids.tolist()]
        assert round_ids(layer.ids, needed, index).tolist() == want


@given(layers(min_alive=0).filter(lambda layer: not layer.alive))
def test_without_a_slot_nothing_is_copied_or_computed(layer: Layer) -> None:
    """The table stays the layer's, and only residents have pairs; the count still says what was needed."""
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=2)
    assert needed.count.tolist() == [len(layer.needed)]
    assert not needed.spans.any()
    assert torch.equal(needed.table, layer.table)
    assert (needed.pages == -1).all()
    assert {e for e in round_ids(layer.ids, needed, 0).flatten().tolist() if e >= 0}.isdisjoint(layer.needed)
    assert (round_ids(layer.ids, needed, 1) == -1).all()


def test_what_no_round_has_room_for_is_counted_and_adds_nothing() -> None:
    """Two slots and one round for five experts: two are computed, and the count says five."""
    layer = make_layer([[0, 1], [2, 3], [4, 5]], [False] * 5 + [True], alive=2)
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=1)
    assert needed.count.tolist() == [5]
    assert needed.spans.tolist() == [[0, 2]]
    assert round_ids(layer.ids, needed, 0).tolist() == [[0, 1], [-1, -1], [-1, 5]]


@pytest.mark.parametrize(("offloaded", "slots", "rounds"), [(0, 3, 1), (1, 3, 1), (3, 3, 1), (4, 3, 2), (7, 3, 3)])
def test_as_many_rounds_as_the_offloaded_fill(offloaded: int, slots: int, rounds: int) -> None:
    """One at least: it has the residents."""
    assert num_rounds(offloaded, slots) == rounds


@given(layers())
def test_what_was_predicted_heads_the_list_and_is_not_copied_again(layer: Layer) -> None:
    """The first round of the list made ahead keeps its slots; the rest is new, and nothing is copied twice."""
    state = (layer.table, layer.resident, layer.slots)
    before = list_needed(layer.predicted, *state)
    needed = list_needed(layer.ids, *state, rounds=layer.rounds, before=before)
    held = min(int(before.count), layer.alive)
    entries = needed.experts[: int(needed.count)].tolist()
    assert entries[:held] == before.experts[:held].tolist()
    assert entries[held:] == sorted(layer.needed - set(entries[:held]))
    assert torch.equal(needed.pages[:held], before.pages[:held])
    assert torch.equal(needed.table[entries[:held]], before.table[entries[:held]])
    copied = [place for first, last in needed.spans.tolist() for place in range(first, last)]
    assert copied == list(range(held, len(entries)))
    served = {e for index in range(layer.rounds) for e in round_ids(layer.ids, needed, index).flatten().tolist()}
    assert layer.needed <= served


def _bytes(layer: Layer, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masters [N, 3, E] and an arena for every page there is, full of random bytes."""
    gen = torch.Generator().manual_seed(seed)
    num_pages = int(max(layer.table.max(), layer.slots.max())) + 1
    masters = torch.randint(0, 256, (len(layer.resident), 3, E), dtype=torch.uint8, generator=gen)
    return masters, torch.randint(0, 256, ((2 * num_pages) * GRANULE,), dtype=torch.uint8, generator=gen)


@given(layers())
def test_a_fetch_writes_its_rounds_pages_and_nothing_else(layer: Layer) -> None:
    """After each round its experts' bytes are where the table says, and no other byte has changed."""
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=layer.rounds)
    for index, (first, last) in enumerate(needed.spans.tolist()):
        masters, storage = _bytes(layer, seed=index)
        want = storage.clone()
        for expert in needed.experts[first:last].tolist():
            for page, master in zip(needed.table[expert].tolist(), masters[expert], strict=True):
                want[2 * page * GRANULE : 2 * page * GRANULE + E] = master
        fetch(needed, index, masters, storage, 2 * GRANULE)
        assert torch.equal(storage, want)


@pytest.mark.parametrize("alive", [1, 2, 5])
def test_the_rounds_add_up_to_the_layer(alive: int) -> None:
    """However few slots there are, the outputs of all rounds sum to that of a layer with every expert resident."""
    f, d, n = 3, 5, 6
    gen = torch.Generator().manual_seed(alive)
    ids = torch.stack([torch.randperm(n, generator=gen)[:3] for _ in range(7)])
    ids[3] = -1
    layer = make_layer(ids.tolist(), [True] + [False] * (n - 1), alive=alive)
    masters = torch.randn((n, 3, f * d), dtype=torch.float64, generator=gen)
    hidden = torch.randn((7, d), dtype=torch.float64, generator=gen)
    weights = torch.rand((7, 3), dtype=torch.float64, generator=gen)
    storage = torch.zeros((3 * (n + alive), f * d), dtype=torch.float64)
    storage[layer.table[0].long()] = masters[0]
    needed = list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=layer.rounds)
    total = torch.zeros_like(hidden)
    for index in range(layer.rounds):
        fetch(needed, index, masters.view(torch.uint8), storage.view(torch.uint8).view(-1), f * d * 8)
        total += _compute(hidden, weights, round_ids(layer.ids, needed, index), storage, needed.table)
    everything = torch.arange(3 * n, dtype=torch.int32).view(n, 3)
    want = _compute(hidden, weights, layer.ids, masters.view(3 * n, f * d), everything)
    torch.testing.assert_close(total, want)


def _compute(
    hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, pages: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Return the layer's output, in which pairs with id -1 add nothing."""
    d = hidden.shape[1]
    up, down = pages.view(len(pages), -1, d), pages.view(len(pages), d, -1)
    return paged_moe(hidden, weights * (ids >= 0), ids.clamp(min=0), up, down, table)
