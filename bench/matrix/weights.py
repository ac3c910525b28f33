"""Random weights that are the same on every system, in place of vLLM's dummy ones, which are alike in all parameters.

Norms are one and the rest uniform in ± WEIGHT_RANGE, so that activations stay near one. Routed experts get what the
elastic pool's fill themselves with, so that stock and elastic runs can be compared.
"""

import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models.utils import extract_layer_index

from bench.serving_gpu import WEIGHT_RANGE, widen_dummy_weights
from elasticmoe.runtime.engine.moe_method import DUMMY_SEED


def install() -> None:
    """Have this process fill models of `load_format=dummy` so; the MoE layers must be all of the model's layers."""
    widen_dummy_weights()

    def load_weights(self: DummyModelLoader, model: torch.nn.Module, model_config: Any) -> None:
        del self, model_config
        for name, parameter in model.named_parameters():
            _fill(name, parameter)

    DummyModelLoader.load_weights = load_weights


def _fill(name: str, parameter: torch.nn.Parameter) -> None:
    if "norm" in name:
        parameter.data.fill_(1)
        return
    is_expert = name.endswith(("w13_weight", "w2_weight"))
    seed = DUMMY_SEED + extract_layer_index(name) if is_expert else zlib.crc32(name.encode())
    device = torch.device("cuda") if torch.cuda.is_available() else parameter.device  # offloaded ones are on the host
    is_there = device.type == parameter.device.type
    values = parameter.data if is_there else torch.empty_like(parameter, device=device)
    values.uniform_(-WEIGHT_RANGE, WEIGHT_RANGE, generator=torch.Generator(device).manual_seed(seed))
    if not is_there:
        parameter.data.copy_(values)
