"""Which blocks of a model are asked what a layer will route to, and how."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


class Experts(torch.nn.Module):
    """A stand-in for vLLM's runner, whose routers need a GPU."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.router = SimpleNamespace(_compute_routing=self._route)

    def _route(self, hidden: torch.Tensor, logits: torch.Tensor, dtype: None) -> tuple[None, torch.Tensor]:
        del hidden, dtype
        return None, logits.topk(1).indices + self.shift


class Block(torch.nn.Module):
    """A MoE block, as vLLM's models have it."""

    def __init__(self, scale: float, shift: int) -> None:
        super().__init__()
        self.gate = lambda hidden: (hidden * scale, None)
        self.experts = Experts(shift)


def test_a_layer_is_predicted_by_its_own_gate_and_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """MoE layers are counted in the model's order; blocks without experts are none."""
    from elasticmoe.runtime.engine import next_gate

    patched: Any = next_gate
    monkeypatch.setattr(patched, "MoERunner", Experts)
    model = torch.nn.Sequential(Block(1.0, 0), torch.nn.Linear(3, 3), Block(-1.0, 10))
    hidden = torch.tensor([[1.0, 2.0, 3.0], [5.0, 4.0, 6.0]])
    predict = next_gate.NextGate(model)
    assert predict(0, hidden).tolist() == [[2], [2]]
    assert predict(1, hidden).tolist() == [[10], [11]]
