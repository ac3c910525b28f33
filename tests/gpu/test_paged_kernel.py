"""What the engine calls on a GPU, our kernel or vLLM's Triton kernel over pages, against the reference."""

import pytest
import torch

from elasticmoe.kernels.reference import paged_moe

pytestmark = pytest.mark.gpu


def _case(num_tokens: int, *, top_k: int, num_experts: int, f: int, d: int, slack: int) -> tuple[torch.Tensor, ...]:
    """Return hidden, weights, ids, the two views and a table over shuffled pages of `f * d + slack` elements."""
    gen = torch.Generator("cuda").manual_seed(num_tokens * 7919 + f)
    stride = f * d + slack
    arena = torch.randn((3 * num_experts + 5) * stride, generator=gen, device="cuda", dtype=torch.bfloat16) / d**0.5
    pages = torch.randperm(3 * num_experts + 5, generator=gen, device="cuda")[: 3 * num_experts]
    up = arena.as_strided((3 * num_experts + 5, f, d), (stride, d, 1))
    down = arena.as_strided((3 * num_experts + 5, d, f), (stride, f, 1))
    hidden = torch.randn((num_tokens, d), generator=gen, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.randn((num_tokens, num_experts), generator=gen, device="cuda").softmax(-1).topk(top_k)
    return hidden, weights.contiguous(), ids.int(), up, down, pages.view(num_experts, 3).int()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17, 61, 256, 1021])
@pytest.mark.parametrize("sizes", [(768, 2048, 128, 0), (96, 256, 16, 64), (1408, 512, 60, 0)])
@pytest.mark.parametrize("name", ["paged_moe_triton", "paged_moe_vllm"])
def test_the_kernel_agrees_with_the_reference(name: str, num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    """Shuffled pages, with and without gaps between them, give the reference's result up to bf16 rounding."""
    from elasticmoe.runtime.engine import paged_kernel

    f, d, num_experts, slack = sizes
    case = _case(num_tokens, top_k=4, num_experts=num_experts, f=f, d=d, slack=slack)
    hidden, weights, ids, up, down, table = case
    got = getattr(paged_kernel, name)(*case).float()
    want = paged_moe(hidden.float(), weights, ids, up.float(), down.float(), table)
    assert (got - want).abs().max() <= 0.03 * want.abs().max()


def test_moving_the_pages_changes_nothing() -> None:
    """Results are bit-equal wherever an expert's pages lie."""
    from elasticmoe.runtime.engine.paged_kernel import paged_moe_triton

    hidden, weights, ids, up, down, table = _case(37, top_k=8, num_experts=64, f=256, d=512, slack=0)
    order = torch.randperm(up.shape[0], device="cuda")
    moved = up[order.argsort()].contiguous()  # page p of the old arena lies at order[p] of the new one
    want = paged_moe_triton(hidden, weights, ids, up, down, table)
    got = paged_moe_triton(hidden, weights, ids, moved, moved.view(-1, 512, 256), order[table.long()].int())
    assert torch.equal(got, want)
