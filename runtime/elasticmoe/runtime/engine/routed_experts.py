"""Our RoutedExperts layer: vLLM's own, with its weights in pages. Registered only in workers that were asked for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import extract_layer_index

from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.device.experts import Experts
from elasticmoe.runtime.engine.moe_method import PagedMoEMethod

_building: list[tuple[Experts, ModelShape]] = []
"""The experts that layers built right now belong to; empty outside `building`."""


@contextmanager
def building(experts: Experts, shape: ModelShape) -> Iterator[None]:
    """Give the MoE layers that are constructed inside to these experts."""
    if "RoutedExperts" not in op_registry_oot:
        PluggableLayer.register_oot(PagedRoutedExperts, name="RoutedExperts")
    _building.append((experts, shape))
    try:
        yield
    finally:
        _building.pop()


class PagedRoutedExperts(RoutedExperts):
    """RoutedExperts whose matrices are loaded into the host pool; stock wherever nobody is `building`."""

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> object:
        if not _building:
            return super()._get_quant_method(prefix, quant_config, moe_config)
        experts, shape = _building[-1]
        return PagedMoEMethod(moe_config, experts, shape.moe_layers.index(extract_layer_index(prefix)))

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Load one matrix of one expert into the host pool."""
        method = self.quant_method
        if not isinstance(method, PagedMoEMethod):
            return super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        method.record_loaded(expert_id, shard_id)
        target = method.master(weight_name)
        return super().weight_loader(target, loaded_weight, weight_name, shard_id, expert_id, return_success)

    vars(weight_loader)["supports_moe_loading"] = True  # how vLLM marks such loaders
