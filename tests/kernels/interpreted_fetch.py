"""The fetch kernel against the reference on the CPU; `test_interpreted` runs this file in Triton's interpreter."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bench.fetch.variants import Box, Copy, Words
from elasticmoe.kernels import reference
from elasticmoe.kernels.fetch import (
    COPY_NS,
    EXPOSED_NS,
    HITS,
    MISSED,
    NUM_TOTALS,
    Counts,
    Masters,
    Tuning,
    fetch_needed,
)
from tests.kernels.fetch_cases import Layer, layers, make_layer

pytestmark = [
    # Triton's interpreter turns arrays of one element into numbers in a way that NumPy is about to drop.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
E, GRANULE = 16, 32


def _counts(num_experts: int) -> Counts:
    return Counts(*(torch.zeros(size, dtype=torch.int64) for size in (num_experts, NUM_TOTALS, 2)))


def _bytes(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _as_count(num_tokens: int) -> torch.Tensor:
    return torch.tensor([num_tokens], dtype=torch.int32)


@example(make_layer([[0, 3], [3, 0], [0, -1]], [False] * 4), torch.int32)
@example(make_layer([[-1, -1]], [False] * 3), torch.int64)
@example(make_layer([[0, 1], [1, 2]], [True, False, False], num_tokens=1), torch.int32)
@given(layers(), st.sampled_from([torch.int32, torch.int64]))
def test_what_is_copied_and_counted_is_what_the_reference_says(layer: Layer, dtype: torch.dtype) -> None:
    """Duplicates, padding, ids that are nobody's, all or none resident; counts add up over two calls."""
    n, ids = len(layer.resident), layer.ids.to(dtype)
    masters, want = _bytes(n, 3, E), _bytes(3 * n * GRANULE, seed=1)
    got, counts = want.clone(), _counts(n)
    state = (layer.table, layer.resident)
    copied = reference.fetch_needed(ids, *state, masters, want, GRANULE, layer.num_tokens)
    for _ in range(2):
        fetch_needed(
            ids, *state, Masters(masters.data_ptr(), E), got, GRANULE, num_tokens=_as_count(layer.num_tokens),
            counts=counts, tuning=Tuning(3, 64, 1),
        )  # fmt: skip
    assert torch.equal(got, want)
    real = [e for row in ids[: layer.num_tokens].tolist() for e in row if 0 <= e < n]
    assert counts.routed.tolist() == [2 * real.count(e) for e in range(n)]
    totals = counts.totals.tolist()
    assert totals[HITS] == 2 * sum(bool(layer.resident[e]) for e in real)
    assert totals[MISSED] == 2 * len(copied)
    assert totals[COPY_NS] == totals[EXPOSED_NS] == 0  # the interpreter has no clock


@pytest.mark.parametrize("tokens", [1, 341, 700])
def test_a_batch_of_more_than_one_tile_is_seen_whole(tokens: int) -> None:
    """Experts that only the first or the last pair names are copied, though tiles are looked at in turns."""
    ids = torch.full((tokens, 3), 4, dtype=torch.int32)
    ids[0, 0], ids[-1, -1] = 2, 6
    layer = make_layer(ids.tolist(), [False] * 4 + [True] * 2 + [False])
    counts, masters = _counts(7), _bytes(7, 3, E)
    storage = torch.zeros(21 * GRANULE, dtype=torch.uint8)
    fetch_needed(ids, layer.table, layer.resident, Masters(masters.data_ptr(), E), storage, GRANULE, counts=counts)
    for expert in (2, 6):
        start = int(layer.table[expert, 1]) * GRANULE
        assert torch.equal(storage[start : start + E], masters[expert, 1])
    assert counts.totals[MISSED] == 2
    assert counts.routed.sum() == 3 * tokens


def test_what_was_fetched_ahead_is_not_copied_again() -> None:
    """A prediction's call notes its experts; the real one copies the rest, and a new prediction forgets the old."""
    layer = make_layer([[0, 2], [3, 2]], [False, False, False, True])
    held = torch.tensor([False, True, False, False])
    masters, storage = _bytes(4, 3, E), torch.zeros(12 * GRANULE, dtype=torch.uint8)
    where = (Masters(masters.data_ptr(), E), storage, GRANULE)
    predicted = torch.tensor([[2, 3]], dtype=torch.int32)
    fetch_needed(predicted, layer.table, layer.resident, *where, held=held, is_ahead=True)
    assert held.tolist() == [False, False, True, False]
    counts = _counts(4)
    fetch_needed(layer.ids, layer.table, layer.resident, *where, held=held, counts=counts)
    assert counts.totals[MISSED] == 1
    for expert, is_there in enumerate((True, False, True, False)):
        start = int(layer.table[expert, 0]) * GRANULE
        assert torch.equal(storage[start : start + E], masters[expert, 0]) == is_there


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
    """Sizes, alignments and grids of all kinds: the rows' pages have the masters' bytes, no other byte changes."""
    matrix, granule, off = SIZES[name]
    layer = make_layer([[0, 4, 2], [1, 4, 3]], [False, True, False, False, False])
    host, want = _bytes(off + 5 * 3 * matrix), _bytes(3 * 5 * granule, seed=1)
    got, state = want.clone(), (layer.ids, layer.table, layer.resident)
    reference.fetch_needed(*state, host[off:].view(5, 3, matrix), want, granule)
    fetch_needed(*state, Masters(host.data_ptr() + off, matrix), got, granule, tuning=Tuning(blocks, 64, 1))
    assert torch.equal(got, want)


OTHERS: dict[str, Words | Box] = {
    "chunks": Words(512, 1),
    "strips": Words(512, 1, is_strip=True),
    "boxes of long rows": Box(2, 64),
    "boxes of short rows": Box(8, 16),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("num", [1, 5])
def test_other_ways_to_copy_copy_the_same(name: str, num: int) -> None:
    """Those that the bench compares and that need no device: each matrix is in its page, no other byte has changed."""
    size = 3072
    host, want = _bytes(num * size), _bytes(7 * size, seed=1)
    got, pages = want.clone(), torch.tensor([4, 0, 6, 1, 3], dtype=torch.int32)[:num]
    for place, page in enumerate(pages.tolist()):
        want[page * size : (page + 1) * size] = host[place * size : (place + 1) * size]
    OTHERS[name].launch(Copy(pages, host, got, size))
    assert torch.equal(got, want)


def test_with_all_that_is_routed_resident_no_master_is_read() -> None:
    """Here there is none to read."""
    layer = make_layer([[0, 1], [1, -1]], [True, True, False])
    storage = torch.arange(9 * 16, dtype=torch.uint8)
    fetch_needed(layer.ids, layer.table, layer.resident, Masters(0, 16), storage, 16)
    assert torch.equal(storage, torch.arange(9 * 16, dtype=torch.uint8))


def test_operands_that_would_be_misread_are_refused() -> None:
    """Before anything is launched: types and layouts that no kernel takes, and more than eight thread blocks."""
    layer = make_layer([[0, 1], [1, 0]], [False, False])
    storage = torch.zeros(96, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="strides"):
        fetch_needed(layer.ids.t(), layer.table, layer.resident, Masters(0, 16), storage, 16)
    with pytest.raises(AssertionError, match="int64"):
        fetch_needed(layer.ids, layer.table.long(), layer.resident, Masters(0, 16), storage, 16)
    state = (layer.ids, layer.table, layer.resident, Masters(0, 16))
    with pytest.raises(AssertionError, match="float32"):
        fetch_needed(*state, torch.zeros(4), 16)
    with pytest.raises(AssertionError, match="9 thread blocks"):
        fetch_needed(*state, storage, 16, tuning=Tuning(num_blocks=9))
    with pytest.raises(AssertionError, match="nowhere to note"):
        fetch_needed(*state, storage, 16, is_ahead=True)
