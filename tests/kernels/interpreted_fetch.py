"""The fetch kernels against the reference on the CPU; `test_interpreted` runs this file in Triton's interpreter."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elasticmoe.kernels import fetch as kernels
from elasticmoe.kernels import reference
from elasticmoe.kernels.fetch import Masters, Tuning
from elasticmoe.kernels.launch import paged_moe
from tests.kernels.fetch_cases import Layer, as_lists, layers, make_layer

pytestmark = [
    # Triton's interpreter turns arrays of one element into numbers in a way that NumPy is about to drop.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Rows that pad a block hold whatever the memory held; they are multiplied, and never stored.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


@example(make_layer([[0, 3], [3, 0], [0, -1]], [False] * 4, alive=4), False, torch.int32)
@example(make_layer([[0, 1]], [True] * 3, alive=1), True, torch.int32)
@example(make_layer([[-1, -1]], [False] * 3, alive=3), True, torch.int32)
@example(make_layer([[4, 2, 0], [1, 3, 5]], [False] * 5, alive=2, num_dead=1), False, torch.int32)
@example(make_layer([[4, 2]], [False] * 5, alive=2, predicted=[[0, 4]]), True, torch.int32)
@example(make_layer([[0, 1, 2]], [False] * 3, alive=2), True, torch.int32)
@given(layers(min_alive=0), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_the_list_and_its_rounds_are_the_references(layer: Layer, is_ahead: bool, dtype: torch.dtype) -> None:  # noqa: FBT001
    """Duplicates, padding, all or none resident, more than the slots hold, with or without a list made ahead."""
    ids, state = layer.ids.to(dtype), (layer.table, layer.resident, layer.slots)
    before = kernels.list_needed(layer.predicted, *state) if is_ahead else None
    got = kernels.list_needed(ids, *state, rounds=layer.rounds, before=before)
    want_before = reference.list_needed(layer.predicted, *state) if is_ahead else None
    want = reference.list_needed(ids, *state, rounds=layer.rounds, before=want_before)
    assert as_lists(got) == as_lists(want)
    for index in range(layer.rounds):
        masked = kernels.round_ids(ids, got, index)
        assert masked.dtype == torch.int32
        assert masked.tolist() == reference.round_ids(ids, want, index).tolist()


@pytest.mark.parametrize("tokens", [1, 341, 700])
def test_a_batch_of_more_than_one_tile_is_listed_whole(tokens: int) -> None:
    """Experts that only the first or the last pair names are in the list, though tiles are looked at in turns."""
    ids = torch.full((tokens, 3), 4, dtype=torch.int32)
    ids[0, 0], ids[-1, -1] = 2, 6
    layer = make_layer(ids.tolist(), [False] * 4 + [True] * 3, alive=2)
    layer.resident[6] = False
    state = (layer.table, layer.resident, layer.slots)
    assert kernels.list_needed(ids, *state).experts[:2].tolist() == [2, 6]


SIZES = {
    "vectors, chunks fit": (192, 208, 0),
    "vectors, a chunk is cut": (80, 96, 0),
    "eight bytes": (24, 40, 0),
    "four bytes": (20, 24, 0),
    "two bytes, primes": (2 * 17 * 19, 2 * 17 * 19, 0),
    "one byte": (19, 23, 0),
    "an odd address": (64, 64, 1),
}
"""Bytes of a matrix and of a granule, and what the address is off."""


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_bytes_are_copied_exactly(name: str, blocks: int) -> None:
    """Sizes, alignments and grids of all kinds: the rounds' pages have the masters' bytes, no other byte changes."""
    matrix, granule, off = SIZES[name]
    layer = make_layer([[0, 4, 2], [1, 4, 3]], [False, True, False, False, False], alive=3, num_dead=1)
    needed = reference.list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=2)
    gen = torch.Generator().manual_seed(matrix)
    host = torch.randint(0, 256, (off + 5 * 3 * matrix,), dtype=torch.uint8, generator=gen)
    masters = Masters(host.data_ptr() + off, matrix)
    for index in range(2):
        got = torch.randint(0, 256, (3 * 9 * granule,), dtype=torch.uint8, generator=gen)
        want = got.clone()
        kernels.fetch(needed, index, masters, got, granule, Tuning(blocks, 64, 1))
        reference.fetch(needed, index, host[off:].view(5, 3, matrix), want, granule)
        assert torch.equal(got, want)


def test_an_empty_list_copies_nothing() -> None:
    """With all that is routed resident the kernel reads no master: here there is none."""
    layer = make_layer([[0, 1], [1, -1]], [True, True, False], alive=1)
    needed = kernels.list_needed(layer.ids, layer.table, layer.resident, layer.slots)
    storage = torch.arange(12 * 16, dtype=torch.uint8)
    kernels.fetch(needed, 0, Masters(0, 16), storage, 16)
    assert torch.equal(storage, torch.arange(12 * 16, dtype=torch.uint8))


@pytest.mark.parametrize("alive", [2, 6])
def test_fetched_experts_compute_what_resident_ones_do(alive: int) -> None:
    """List, fetch and paged MoE, round by round, sum to the output of a layer with every expert resident."""
    f, d, n, tokens = 8, 16, 7, 5
    gen = torch.Generator().manual_seed(alive)
    weights, ids = torch.randn((tokens, n), generator=gen).softmax(-1).topk(3)
    layer = make_layer(ids.tolist(), [True] + [False] * (n - 1), alive=alive)
    masters = torch.randn((n, 3, f * d), generator=gen)
    hidden = torch.randn((tokens, d), generator=gen)
    arena = torch.full((3 * (n + alive), f * d), float("nan"))
    arena[layer.table[0].long()] = masters[0]
    views = arena.view(-1, f, d), arena.view(-1, d, f)
    needed = kernels.list_needed(layer.ids, layer.table, layer.resident, layer.slots, rounds=layer.rounds)
    total = torch.zeros_like(hidden)
    for index in range(layer.rounds):
        storage = arena.view(torch.uint8).view(-1)
        kernels.fetch(needed, index, Masters(masters.data_ptr(), f * d * 4), storage, f * d * 4)
        round_ids = kernels.round_ids(layer.ids, needed, index)
        total += paged_moe(hidden, weights.contiguous(), round_ids, *views, needed.table)
    everything = torch.arange(3 * n, dtype=torch.int32).view(n, 3)
    pages = masters.view(-1, f, d), masters.view(-1, d, f)
    want = reference.paged_moe(hidden, weights, layer.ids, *pages, everything)
    torch.testing.assert_close(total, want, atol=1e-5, rtol=1e-5)


def test_operands_that_would_be_misread_are_refused() -> None:
    """Before anything is launched: types and layouts that the kernels don't take, and more thread blocks than eight."""
    layer = make_layer([[0, 1], [1, 0]], [False, False], alive=2)
    state = (layer.table, layer.resident, layer.slots)
    needed = kernels.list_needed(layer.ids, *state)
    with pytest.raises(AssertionError, match="strides"):
        kernels.list_needed(layer.ids.t(), *state)
    with pytest.raises(AssertionError, match="int64"):
        kernels.list_needed(layer.ids, layer.table.long(), *state[1:])
    with pytest.raises(AssertionError, match="arena of"):
        kernels.fetch(needed, 0, Masters(0, 16), torch.zeros(4), 16)
    with pytest.raises(AssertionError, match="9 thread blocks"):
        kernels.fetch(needed, 0, Masters(0, 16), torch.zeros(4, dtype=torch.uint8), 16, Tuning(num_blocks=9))
