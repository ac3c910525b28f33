"""The shapes and the routing that the kernel bench runs on.

Routing as published statistics of Qwen3-30B-A3B were fitted: logit_e(t) = 0.8 g_e + 0.75 r_(e, request) + z_e(t), with
g fixed per layer, r per layer and request, z an AR(1) process over a request's tokens; `flat` has z alone.
"""

from dataclasses import dataclass

import torch

MAX_REQUESTS = 256
"""Up to here every token is a request's next one; larger batches are prompts of equal length."""
EXPERT_WEIGHT, REQUEST_WEIGHT, RHO = 0.8, 0.75, 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """One MoE layer: N experts of three f × d matrices, K of them a token."""

    name: str
    num_experts: int
    top_k: int
    d: int
    f: int

    def limit_us(self, num_active: int, tokens: int) -> float:
        """The time that weights of the routed experts, or the arithmetic, take at 4.8 TB/s and 790 TFLOP/s."""
        matrix = 3 * self.f * self.d
        return max(num_active * matrix * 2 / 4.8e12, tokens * self.top_k * matrix * 2 / 790e12) * 1e6


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 128, 8, 2048, 768),
        Shape("qwen1.5-moe", 60, 4, 2048, 1408),
        Shape("qwen3-next", 512, 10, 2048, 512),
        Shape("deepseek-v3", 256, 8, 7168, 2048),
        Shape("qwen3-30b-tp8", 128, 8, 2048, 96),
        Shape("qwen3-30b-tp4", 128, 8, 2048, 192),
    )
}


def route(shape: Shape, tokens: int, *, skewed: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, K] float32, renormalized, and ids [T, K] int32 of one layer's routing."""
    gen = torch.Generator("cuda").manual_seed(seed)
    requests = min(tokens, MAX_REQUESTS)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen, device="cuda")

    steps, z = [], draw(requests, shape.num_experts)
    for _ in range(-(-tokens // requests)):
        steps.append(z)
        z = RHO * z + (1 - RHO**2) ** 0.5 * draw(requests, shape.num_experts)
    logits = torch.stack(steps, dim=1)  # [requests, steps, N]
    if skewed:
        logits = logits + EXPERT_WEIGHT * draw(shape.num_experts)
        logits = logits + REQUEST_WEIGHT * draw(requests, 1, shape.num_experts)
    weights, ids = logits.flatten(0, 1)[:tokens].softmax(-1).topk(shape.top_k)
    return (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.int().contiguous()


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's weights, once as vLLM wants them and once in shuffled pages."""

    w13: torch.Tensor | None
    """[N, 2f, d], where vLLM's kernel runs too."""
    w2: torch.Tensor | None
    """[N, d, f]."""
    up_pages: torch.Tensor
    down_pages: torch.Tensor
    resident: torch.Tensor
    """[N, 3] int32: the page table with every expert in pages of its own."""
    offloaded: torch.Tensor
    """[N, 3] int32: the same with some experts in the loading buffer's pages."""


def make_weights(shape: Shape, *, num_offloaded: int, contiguous: bool, seed: int = 0) -> Weights:
    """Random bf16 weights; pages lie in random order with KV-like gaps, the loading buffer's at the arena's end."""
    gen = torch.Generator("cuda").manual_seed(seed)
    n, f, d = shape.num_experts, shape.f, shape.d
    used, gaps = 3 * n, n // 4
    total = used + gaps + 3 * num_offloaded
    arena = torch.empty((total, f * d), dtype=torch.bfloat16, device="cuda")
    for page in arena:
        page.normal_(0, 0.02, generator=gen)
    resident = torch.randperm(used + gaps, generator=gen, device="cuda")[:used].view(n, 3)
    offloaded = resident.clone()
    for slot, expert in enumerate(torch.randperm(n, generator=gen, device="cuda")[:num_offloaded].tolist()):
        pages = torch.arange(3, device="cuda") + used + gaps + 3 * slot
        arena[pages] = arena[resident[expert]]
        offloaded[expert] = pages
    w13 = w2 = None
    if contiguous:
        w13 = torch.empty((n, 2 * f, d), dtype=torch.bfloat16, device="cuda")
        w2 = torch.empty((n, d, f), dtype=torch.bfloat16, device="cuda")
        for expert in range(n):
            w13[expert] = arena[resident[expert, :2]].view(2 * f, d)
            w2[expert] = arena[resident[expert, 2]].view(d, f)
    return Weights(w13, w2, arena.view(total, f, d), arena.view(total, d, f), resident.int(), offloaded.int())
