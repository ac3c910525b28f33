"""The reference against the formula written out, on primes, on nothing, on unused experts, on shuffled pages."""

import pytest
import torch

from elasticmoe.kernels.reference import paged_moe

N, K = 7, 3
"""Experts, and how many each token goes to."""


def _arena(f: int, d: int, slack: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the two views and a table of N experts over shuffled pages with `slack` elements between them."""
    gen = torch.Generator().manual_seed(f * 1009 + d)
    num, stride = 3 * N + 4, f * d + slack
    arena = torch.randn(num * stride, generator=gen, dtype=torch.float64)
    table = torch.randperm(num, generator=gen)[: 3 * N].view(N, 3).int()
    return arena.as_strided((num, f, d), (stride, d, 1)), arena.as_strided((num, d, f), (stride, f, 1)), table


def _written_out(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    up, down, table = pages
    out = torch.zeros_like(hidden)
    for token, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            w1, w3, w2 = table[expert].tolist()
            gate = up[w1] @ hidden[token]
            out[token] += weights[token, k] * (down[w2] @ (gate * gate.sigmoid() * (up[w3] @ hidden[token])))
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 13, 31])
@pytest.mark.parametrize(("f", "d", "slack"), [(5, 11, 0), (17, 3, 2), (8, 8, 0), (1, 1, 0)])
def test_it_is_the_formula(num_tokens: int, f: int, d: int, slack: int) -> None:
    """Each token gets the weighted sum of its own experts, whatever the sizes and wherever the pages lie."""
    pages = _arena(f, d, slack)
    gen = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn((num_tokens, d), generator=gen, dtype=torch.float64)
    weights, ids = torch.randn((num_tokens, N), generator=gen, dtype=torch.float64).softmax(-1).topk(K)
    got = paged_moe(hidden, weights, ids.int(), *pages)
    torch.testing.assert_close(got, _written_out(hidden, weights, ids, pages))


def test_no_tokens_give_no_rows() -> None:
    """Zero tokens are no special case for the caller."""
    got = paged_moe(
        torch.zeros((0, 11)), torch.zeros((0, K)), torch.zeros((0, K), dtype=torch.int32), *_arena(5, 11, 0)
    )
    assert got.shape == (0, 11)


def test_an_unused_experts_page_is_not_read() -> None:
    """What lies in the pages of experts that nobody routes to doesn't matter, not even NaN."""
    up, down, table = _arena(5, 11, 0)
    hidden = torch.ones((2, 11), dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=torch.int32)
    weights = torch.full((2, K), 1 / K, dtype=torch.float64)
    want = paged_moe(hidden, weights, ids, up, down, table)
    for page in table[3:].flatten().tolist():
        up[page].fill_(float("nan"))
    assert torch.equal(paged_moe(hidden, weights, ids, up, down, table), want)
