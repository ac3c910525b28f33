"""Our own paged kernel against the reference, on a GPU: every way to tile it, any place of the pages."""

from typing import Any

import pytest
import torch

from elasticmoe.kernels.reference import paged_moe as reference

pytestmark = pytest.mark.gpu

PLAIN: dict[str, Any] = {"block_n": 64, "block_k": 64}
GEMMS: dict[str, dict[str, Any]] = {
    "pointers": PLAIN,
    "masked": {"block_n": 128, "block_k": 128, "num_stages": 2},
    "tma": PLAIN | {"tma": True},
    "swap": PLAIN | {"swap": True},
    "tma swap": PLAIN | {"tma": True, "swap": True, "num_stages": 4},
    "persistent": PLAIN | {"tma": True, "persistent": True, "group_m": 8},
    "halved": PLAIN | {"tma": True, "halvings": 1, "group_m": 8},
    "halved swap": {"block_n": 128, "block_k": 64, "tma": True, "swap": True, "num_warps": 8, "halvings": 2},
}
SHAPES = [(768, 2048, 128, 8, 0), (96, 256, 16, 4, 64), (192, 512, 32, 8, 0), (1408, 512, 60, 4, 0), (40, 72, 9, 1, 8)]


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _case(num_tokens: int, *, top_k: int, num_experts: int, f: int, d: int, slack: int, overlap: int = 1) -> Operands:
    """Return the operands over shuffled pages; views lie `(f * d + slack) / overlap` elements apart, as granules do."""
    gen = torch.Generator("cuda").manual_seed(num_tokens * 7919 + f)
    num, size = 3 * num_experts + 5, f * d + slack
    arena = torch.randn(num * size, generator=gen, device="cuda", dtype=torch.bfloat16) / d**0.5
    pages = torch.randperm(num, generator=gen, device="cuda")[: 3 * num_experts] * overlap
    stride, count = size // overlap, (num - 1) * overlap + 1
    up = arena.as_strided((count, f, d), (stride, d, 1))
    down = arena.as_strided((count, d, f), (stride, f, 1))
    hidden = torch.randn((num_tokens, d), generator=gen, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.randn((num_tokens, num_experts), generator=gen, device="cuda").softmax(-1).topk(top_k)
    return hidden, weights.contiguous(), ids.int(), up, down, pages.view(num_experts, 3).int()


def _want(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *pages: torch.Tensor) -> torch.Tensor:
    up, down, table = pages
    masked = torch.where(ids < 0, 0, weights)
    return reference(hidden.float(), masked, ids.clamp(min=0), up.float(), down.float(), table)


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.float() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("gemm", GEMMS)
def test_every_tiling_agrees_with_the_reference(gemm: str, block_m: int) -> None:
    """However the GEMMs are tiled, with masked pairs, the result is the reference's up to bf16 rounding."""
    from elasticmoe.kernels.config import Config, Gemm
    from elasticmoe.kernels.launch import paged_moe

    for f, d, num_experts, top_k, slack in SHAPES[1:4]:
        case = _case(77, top_k=top_k, num_experts=num_experts, f=f, d=d, slack=slack)
        case[2][::5, 0] = -1
        for pdl in (False, True):
            config = Config(block_m, Gemm(**GEMMS[gemm]), Gemm(**GEMMS[gemm]), pdl=pdl)
            _assert_close(paged_moe(*case, config), _want(*case))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 16, 17, 61, 256, 1021])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_config_agrees_with_the_reference(num_tokens: int, shape: tuple[int, ...]) -> None:
    """Whatever config a batch gets, measured or not, its result is the reference's up to bf16 rounding."""
    from elasticmoe.kernels.launch import paged_moe

    f, d, num_experts, top_k, slack = shape
    case = _case(num_tokens, top_k=top_k, num_experts=num_experts, f=f, d=d, slack=slack)
    got = paged_moe(*case)
    assert got.shape == (num_tokens, d)
    if num_tokens:
        _assert_close(got, _want(*case))


def test_pages_may_start_at_any_granule() -> None:
    """Descriptors reach pages whose views overlap, as they do where a granule is half a page."""
    from elasticmoe.kernels.config import Config, Gemm
    from elasticmoe.kernels.launch import paged_moe

    case = _case(77, top_k=8, num_experts=32, f=192, d=512, slack=0, overlap=2)
    gemm = Gemm(128, 64, tma=True)
    _assert_close(paged_moe(*case, Config(16, gemm, gemm)), _want(*case))


@pytest.mark.parametrize("num_tokens", [1, 37, 700])
def test_moving_the_pages_changes_no_bit(num_tokens: int) -> None:
    """Results are bit-equal wherever an expert's pages lie."""
    from elasticmoe.kernels.launch import paged_moe

    hidden, weights, ids, up, down, table = _case(num_tokens, top_k=8, num_experts=64, f=256, d=512, slack=0)
    order = torch.randperm(up.shape[0], device="cuda")
    moved = up[order.argsort()].contiguous()  # page p of the old arena lies at order[p] of the new one
    want = paged_moe(hidden, weights, ids, up, down, table)
    got = paged_moe(hidden, weights, ids, moved, moved.view(-1, 512, 256), order[table.long()].int())
    assert torch.equal(got, want)


def test_a_graph_follows_the_table() -> None:
    """A captured call reads the table at replay: experts may move between replays."""
    from elasticmoe.kernels.launch import paged_moe

    hidden, weights, ids, up, down, table = _case(37, top_k=8, num_experts=64, f=256, d=512, slack=0)
    other = table.flip(0).contiguous()
    want = paged_moe(hidden, weights, ids, up, down, other)
    live = table.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_moe(hidden, weights, ids, up, down, live)
    live.copy_(other)
    graph.replay()
    assert torch.equal(got, want)
