"""Predicts a layer's routing by its own gate, over the hidden states of the layer before, as Fate does; no training.

Residual streams change little from one layer to the next, so the gate sees nearly what it will see.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


class NextGate:
    """The gates and routers of a model's MoE layers, in order."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Find every block that has a gate and routed experts."""
        self._blocks: list[Any] = [
            block for block in model.modules() if isinstance(getattr(block, "experts", None), MoERunner)
        ]

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the experts [T, K] that MoE layer `layer` would choose for `hidden` [T, d]."""
        logits, _ = self._blocks[layer].gate(hidden)
        return self.chosen(layer, hidden, logits)

    def chosen(self, layer: int, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the experts [T, K] that the layer's router chooses by `logits` [T, N], without counting them."""
        ids: torch.Tensor = self._blocks[layer].experts.router._compute_routing(hidden, logits, None)[1]
        return ids
