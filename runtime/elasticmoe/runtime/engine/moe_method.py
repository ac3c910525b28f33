"""How a MoE layer of vLLM computes from pages: on a CPU by the torch reference, on a GPU by Triton kernels."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.model_executor.utils import set_weight_attrs

from elasticmoe.kernels.reference import paged_moe
from elasticmoe.runtime.device.experts import Experts
from elasticmoe.runtime.engine.paged_kernel import paged_moe_triton
from elasticmoe.runtime.errors import CheckpointError, UnsupportedError

DUMMY_SEED = 1234
PLACEHOLDERS = ("w13_weight", "w2_weight")


class PagedMoEMethod(FusedMoEMethodBase):
    """Unquantized experts whose weights live in pages; the masters are plain host tensors, not Parameters.

    vLLM moves CPU Parameters through the GPU after loading, which would unpin them, so each layer carries empty
    placeholders that only give the loader something to address.
    """

    def __init__(self, moe: FusedMoEConfig, experts: Experts, layer_index: int) -> None:
        """Serve MoE layer `layer_index` (counted among MoE layers) out of `experts`."""
        super().__init__(moe)
        self.moe_quant_config = FusedMoEQuantConfig.make()
        self.experts = experts
        self.layer_index = layer_index
        self._loaded: set[tuple[int, str]] = set()

    @property
    def is_monolithic(self) -> bool:
        """Return whether the layer routes by itself, as vLLM's CPU method does."""
        return self.experts.device.type == "cpu"

    @property
    def supports_internal_mk(self) -> bool:
        """Return True, which keeps vLLM from building a modular kernel around us."""
        return True

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """Return the unquantized configuration."""
        return self.moe_quant_config

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer placeholders; its sizes must be those that the pool was laid out for."""
        layout = self.experts.pool.layout
        want = (layout.num_experts, layout.rows, layout.cols, self.experts.pool.dtype)
        have = (num_experts, intermediate_size_per_partition, hidden_size, params_dtype)
        if want != have:
            message = f"MoE layer {self.layer_index}: config.json gives (experts, f, d, dtype) {want}, the model {have}"
            raise UnsupportedError(message)
        for name in PLACEHOLDERS:
            placeholder = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, placeholder)
            set_weight_attrs(placeholder, extra_weight_attrs)

    def master(self, weight_name: str) -> SimpleNamespace:
        """Return what vLLM's loader takes for a parameter: the layer's masters under `.data`."""
        pool = self.experts.pool
        assert not pool.is_mapped, f"{weight_name} would be written into the coordinator's pool"
        data = pool.down(self.layer_index) if "w2_" in weight_name else pool.gate_up(self.layer_index)
        return SimpleNamespace(data=data)

    def record_loaded(self, expert: int, shard_id: str) -> None:
        """Note that one matrix of one expert came from the checkpoint."""
        self._loaded.add((expert, shard_id))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check that every matrix came, unless a coordinator did; under `load_format=dummy` make random ones."""
        if self.experts.pool.is_mapped:
            return
        if get_current_vllm_config().load_config.load_format == "dummy":
            self._fill_randomly()
            return
        names = {"w1": layer.ckpt_gate_proj_name, "w3": layer.ckpt_up_proj_name, "w2": layer.ckpt_down_proj_name}
        wanted = {(e, shard) for e in range(self.experts.pool.layout.num_experts) for shard in names}
        for expert, shard in sorted(wanted - self._loaded):
            message = (
                f"the checkpoint lacks {layer.layer_name}.{expert}.{names[shard]}.weight "
                f"({len(wanted - self._loaded)} of {len(wanted)} matrices of that layer are missing); fetch it anew"
            )
            raise CheckpointError(message)

    def _fill_randomly(self) -> None:
        """Fill the layer's masters as vLLM fills dummy weights, on the device, which is faster there by far."""
        for name in PLACEHOLDERS:
            master = self.master(name).data
            values = torch.empty(master.shape, dtype=master.dtype, device=self.experts.device)
            initialize_single_dummy_weight(values, seed=DUMMY_SEED + self.layer_index)
            for expert_master, expert in zip(master, values, strict=True):  # each is contiguous; all of them are not
                expert_master.copy_(expert)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the routed experts' output [T, d]."""
        mode = get_forward_context().cudagraph_runtime_mode if is_forward_context_available() else CUDAGraphMode.NONE
        is_piece = mode == CUDAGraphMode.PIECEWISE
        late = self.experts.prepare(self.layer_index, topk_ids, x, is_piece=is_piece)
        arena, table = self.experts.arena, self.experts.table.pages_by_layer[self.layer_index]
        operands = x, topk_weights, topk_ids, arena.up_pages, arena.down_pages, table
        return paged_moe_triton(*operands, late, self.experts.num_tokens) if x.is_cuda else paged_moe(*operands)

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route as vLLM's CPU method does, then return the routed experts' output [T, d]."""
        topk_weights, topk_ids = cpu_fused_moe.select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return self.apply(layer, x, topk_weights, topk_ids)
