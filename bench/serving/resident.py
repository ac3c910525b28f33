"""Experts that never leave the device, under an elastic scheduler that believes they do: the reference of a replay.

Imports torch and vLLM: the GPU bench imports it once vLLM's environment is set.
"""

from typing import Any

import torch

from elasticmoe.runtime.device.arena import Arena
from elasticmoe.runtime.device.experts import Experts
from elasticmoe.runtime.engine import worker
from elasticmoe.runtime.pages.changes import Entry, PageDelta
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import MATRICES, ExpertKey


class ResidentExperts(Experts):
    """All experts in one allocation outside the arena, the table fixed; the scheduler's changes are ignored."""

    @torch.inference_mode()
    def attach(self, storage: torch.Tensor, tiers: Tiers, entries: list[Entry]) -> None:
        """Copy every expert into memory of its own; `storage` serves KV alone."""
        del tiers, entries  # nothing ever moves
        layout = self.pool.layout
        own = torch.empty(layout.pool_bytes, dtype=torch.uint8, device=storage.device)
        self.arena = Arena(own, layout.matrix_bytes, layout, self.pool.dtype)
        for layer in range(layout.num_layers):
            for expert in range(layout.num_experts):
                first = (layer * layout.num_experts + expert) * MATRICES
                rows = [first + matrix for matrix in range(MATRICES)]
                self.table.point(ExpertKey(layer, expert), rows, is_resident=True)
                self._copy_in(ExpertKey(layer, expert))
        self.table.send()

    def apply(self, delta: PageDelta) -> None:
        """Ignore the changes: nothing ever moves."""


def keep_all_resident() -> None:
    """Have the workers of this process keep all experts in memory of their own, outside the arena."""
    patched: Any = worker
    patched.Experts = ResidentExperts
