"""Layers with offloaded experts and routings, for the tests of fetching: drawn by hypothesis, small and odd.

Shapes: T tokens, N experts, K top-k, S slots.
"""

from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st

from elasticmoe.kernels.reference import Needed, num_rounds


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's state on the device, and what is routed to it."""

    ids: torch.Tensor
    """[T, K] int32; -1 and numbers past the last expert are nobody's."""
    predicted: torch.Tensor
    """[T, K] int32: what was foreseen."""
    table: torch.Tensor
    resident: torch.Tensor
    slots: torch.Tensor
    alive: int
    """S: the slots that are there at present."""

    @property
    def rounds(self) -> int:
        """Enough for any routing."""
        return num_rounds(int((~self.resident).sum()), max(self.alive, 1))

    @property
    def needed(self) -> set[int]:
        """The experts to be listed, in plain words."""
        return {e for e in self.ids.flatten().tolist() if 0 <= e < len(self.resident) and not self.resident[e]}


def make_layer(
    ids: list[list[int]],
    resident: list[bool],
    *,
    alive: int,
    num_dead: int = 0,
    predicted: list[list[int]] | None = None,
) -> Layer:
    """A layer of `len(resident)` experts; pages are numbers that no two matrices share."""
    n, num_slots = len(resident), alive + num_dead
    pages = torch.randperm(3 * (n + num_slots), generator=torch.Generator().manual_seed(n)).int().view(-1, 3)
    slots = pages[n:].clone()
    slots[alive:] = -1
    routed, foreseen = (_as_ids(each) for each in (ids, ids if predicted is None else predicted))
    return Layer(routed, foreseen, pages[:n].clone(), torch.tensor(resident), slots, alive)


def _as_ids(ids: list[list[int]]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32).view(len(ids), len(ids[0]) if ids else 1)


@st.composite
def layers(draw: st.DrawFn, min_alive: int = 1) -> Layer:
    """Any layer: few experts, so that duplicates, all or none resident, padding and too few slots come up often."""
    n = draw(st.integers(1, 9))
    resident = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    top_k = draw(st.integers(1, 3))
    ids = st.lists(st.integers(-1, n), min_size=top_k, max_size=top_k)
    num_tokens = draw(st.integers(0, 6))
    routed, predicted = (draw(st.lists(ids, min_size=num_tokens, max_size=num_tokens)) for _ in range(2))
    alive, num_dead = draw(st.integers(min_alive, n)), draw(st.integers(0, 2))
    return make_layer(routed, resident, alive=alive, num_dead=num_dead, predicted=predicted)


def as_lists(needed: Needed) -> dict[str, object]:
    """Everything a list says."""
    return {field.name: getattr(needed, field.name).tolist() for field in fields(needed)}
