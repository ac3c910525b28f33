"""The paged MoE on a GPU: by our own kernel, or by vLLM's Triton kernel where ours doesn't take the operands.

vLLM's takes weights as [experts, rows, cols] with a stride per expert; here that stride is the granule of the arena and
an "expert id" is a page index: three launches, each reading experts through the page table. The contract of both is
`elasticmoe.kernels.reference.paged_moe`.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.fused_moe import (
    _prepare_expert_assignment,
    invoke_fused_moe_triton_kernel,
    try_get_optimal_moe_config,
)
from vllm.triton_utils import tl

if TYPE_CHECKING:
    from elasticmoe.kernels.launch import Late

W1, W3, W2 = 0, 1, 2
_CONFIG_NAMES = {torch.float32: "float32"}


def paged_moe_triton(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    up_pages: torch.Tensor,
    down_pages: torch.Tensor,
    table: torch.Tensor,
    late: "Late | None" = None,
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the routed experts' output [T, d]; shapes as in the reference.

    `late`: what may not be read at once; `num_tokens` [1] int32: the tokens that are real, the others pad the batch.
    """
    from elasticmoe.kernels.launch import Batch, compute

    weights, ids = topk_weights.float().contiguous(), topk_ids.int().contiguous()
    batch = Batch(hidden, weights, ids, up_pages, down_pages, table, num_tokens)
    if batch.is_supported:
        return compute(batch, late)
    if late is not None:
        late.join()
    if num_tokens is not None:  # it has no mask: what pads the batch computes with the first token's experts
        is_real = torch.arange(len(topk_ids), device=topk_ids.device)[:, None] < num_tokens
        topk_ids = torch.where(is_real, topk_ids, topk_ids[:1])
    return paged_moe_vllm(hidden, topk_weights, topk_ids, up_pages, down_pages, table)


def paged_moe_vllm(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    up_pages: torch.Tensor,
    down_pages: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Return the same by vLLM's kernel."""
    num_tokens, top_k = topk_ids.shape
    f, d, num_experts = up_pages.shape[1], up_pages.shape[2], table.shape[0]
    sizes = (num_experts, 2 * f, d), (num_experts, d, f)
    config = try_get_optimal_moe_config(*sizes, top_k, _CONFIG_NAMES.get(hidden.dtype), num_tokens)
    ids, experts, padded = _prepare_expert_assignment(topk_ids, config, num_tokens, top_k, num_experts, None)
    # Blocks past the last expert carry -1 in vLLM's array; the kernel skips those by num_tokens_post_padded.
    rows = table[experts.clamp(min=0).long()].t().contiguous()  # [3, blocks]

    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, matrix: int, width: int) -> None:
        _launch(a, b, c, rows[matrix], topk_weights if matrix == W2 else None, (ids, padded, width, config))

    gate_up = torch.empty((num_tokens, top_k, 2 * f), dtype=hidden.dtype, device=hidden.device)
    launch(hidden, up_pages, gate_up[..., :f], W1, top_k)
    launch(hidden, up_pages, gate_up[..., f:], W3, top_k)
    act = torch.empty((num_tokens * top_k, f), dtype=hidden.dtype, device=hidden.device)
    torch.ops._C.silu_and_mul(act, gate_up.view(-1, 2 * f))
    products = torch.empty((num_tokens, top_k, d), dtype=hidden.dtype, device=hidden.device)
    launch(act, down_pages, products, W2, 1)
    out = torch.empty_like(hidden)
    ops.moe_sum(products, out)
    return out


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    page_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    assignment: tuple[torch.Tensor | None, torch.Tensor, int, dict[str, Any]],
) -> None:
    ids, padded, top_k, config = assignment
    invoke_fused_moe_triton_kernel(
        a,
        b,
        c,
        None,
        None,
        topk_weights,
        ids,
        page_ids,
        padded,
        topk_weights is not None,
        top_k,
        config,
        compute_type=getattr(tl, str(a.dtype).removeprefix("torch.")),
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
