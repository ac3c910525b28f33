"""Which experts are copied and which bytes change, against the rules in plain words."""

import torch
from hypothesis import given

from elasticmoe.kernels.reference import fetch_needed
from tests.kernels.fetch_cases import Layer, layers, make_layer

E, GRANULE = 6, 8
"""Bytes of a matrix, and of what page indices count."""


def _masters(num_experts: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(num_experts)
    return torch.randint(0, 256, (num_experts, 3, E), dtype=torch.uint8, generator=gen)


@given(layers())
def test_what_is_routed_to_and_away_is_copied_to_its_row_and_no_other_byte_changes(layer: Layer) -> None:
    """Each once, in order of experts; residents, padding and what nobody routes to stay as they were."""
    n = len(layer.resident)
    masters, before = _masters(n), torch.arange(3 * n * GRANULE).to(torch.uint8)
    got = before.clone()
    copied = fetch_needed(layer.ids, layer.table, layer.resident, masters, got, GRANULE, layer.num_tokens)
    assert copied == layer.needed
    for expert, row in enumerate(layer.table.tolist()):
        for matrix, page in enumerate(row):
            start = page * GRANULE
            want = masters[expert, matrix] if expert in layer.needed else before[start : start + E]
            assert torch.equal(got[start : start + E], want)
            assert torch.equal(got[start + E : start + GRANULE], before[start + E : start + GRANULE])


def test_padding_needs_nothing() -> None:
    """Two real tokens of three: the third one's expert stays away."""
    layer = make_layer([[0], [1], [2]], [False] * 3, num_tokens=2)
    storage = torch.zeros(9 * GRANULE, dtype=torch.uint8)
    assert fetch_needed(layer.ids, layer.table, layer.resident, _masters(3), storage, GRANULE, 2) == [0, 1]
