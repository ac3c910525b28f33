"""Layers with offloaded experts and routings, for the tests of fetching: drawn by hypothesis, small and odd.

Shapes: T tokens, N experts, K top-k.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's state on the device, and what is routed to it."""

    ids: torch.Tensor
    """[T, K] int32; -1 and numbers past the last expert are nobody's."""
    num_tokens: int
    """Tokens that are real; the others pad the batch."""
    table: torch.Tensor
    resident: torch.Tensor

    @property
    def needed(self) -> list[int]:
        """The experts to be copied, in plain words."""
        routed = {e for row in self.ids.tolist()[: self.num_tokens] for e in row}
        return [e for e in sorted(routed) if 0 <= e < len(self.resident) and not self.resident[e]]


def make_layer(ids: list[list[int]], resident: list[bool], num_tokens: int | None = None) -> Layer:
    """A layer of `len(resident)` experts; pages are numbers that no two matrices share."""
    n = len(resident)
    pages = torch.randperm(3 * n, generator=torch.Generator().manual_seed(n)).int().view(n, 3)
    routed = torch.tensor(ids, dtype=torch.int32).view(len(ids), len(ids[0]) if ids else 1)
    return Layer(routed, len(ids) if num_tokens is None else num_tokens, pages, torch.tensor(resident))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Any layer: few experts, so that duplicates, all or none resident, and padding come up often."""
    n = draw(st.integers(1, 9))
    resident = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    top_k = draw(st.integers(1, 3))
    ids = draw(st.lists(st.lists(st.integers(-1, n), min_size=top_k, max_size=top_k), max_size=6))
    return make_layer(ids, resident, draw(st.integers(0, len(ids))))
