"""The paged MoE and its fetches in plain torch: the specification of every kernel here, and the backend on a CPU.

Shapes: T tokens, N experts, K top-k, d hidden, f intermediate, P page indices of the arena view,
E bytes of one matrix.
"""

import torch
from torch.nn import functional


def paged_moe(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    up_pages: torch.Tensor,
    down_pages: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Return sum_k topk_weights[t, k] * W2 (silu(W1 x_t) * (W3 x_t)) of the K experts of each token, [T, d].

    `hidden` [T, d]; `topk_weights` [T, K] float32; `topk_ids` [T, K] int; `up_pages` [P, f, d] and `down_pages`
    [P, d, f] are two views of one arena; `table` [N, 3] int holds the index of W1's, W3's and W2's page of each expert.
    The products of a token are summed in order of K, in the dtype of `topk_weights`.
    Source of the address rule: Rimuru, addr_e(n, t) = B_P + p_e(n) f d + (n mod f) d + t.
    """
    order = topk_ids.reshape(-1).argsort()
    counts = torch.bincount(topk_ids.reshape(-1), minlength=table.shape[0]).tolist()
    rows = hidden[order // topk_ids.shape[1]]  # [T * K, d], by expert
    products = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        w1, w3, w2 = table[expert].tolist()
        span = slice(start, start + count)
        gate = functional.linear(rows[span], up_pages[w1])
        up = functional.linear(rows[span], up_pages[w3])
        products[span] = functional.linear(functional.silu(gate) * up, down_pages[w2])
        start += count
    return _weighted_sums(products, order, topk_weights)


def _weighted_sums(products: torch.Tensor, order: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Return [T, d] out of `products` [T * K, d], whose row i belongs to pair `order[i]` of token and rank."""
    by_token = torch.empty_like(products)
    by_token[order] = products
    by_token = by_token.view(*topk_weights.shape, products.shape[1])
    return (by_token.to(topk_weights.dtype) * topk_weights.unsqueeze(-1)).sum(dim=1).to(products.dtype)


def fetch_needed(
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    masters: torch.Tensor,
    storage: torch.Tensor,
    granule_bytes: int,
    num_tokens: int | None = None,
) -> list[int]:
    """Copy each expert that `topk_ids` [T, K] int names and that isn't resident to its row's pages; return them.

    `table` [N, 3] int32, `resident` [N] bool, `masters` uint8 [N, 3, E] in host memory; `storage` uint8 [bytes] is the
    arena, in which page p starts at p * `granule_bytes`. Tokens from `num_tokens` on pad the batch and need nothing,
    nor do ids that are no expert's, as -1.
    """
    ids = topk_ids[:num_tokens].flatten()
    is_routed = torch.zeros_like(resident)
    is_routed[ids[(ids >= 0) & (ids < len(resident))].long()] = True
    needed: list[int] = (is_routed & ~resident).nonzero().flatten().tolist()
    for expert in needed:
        for page, master in zip(table[expert].tolist(), masters[expert], strict=True):
            start = page * granule_bytes
            storage[start : start + master.numel()].copy_(master)
    return needed
