"""Our own paged kernel against the reference, on a GPU: any tiling, any place and arrival of the pages."""

from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticmoe.kernels.reference import paged_moe as reference

if TYPE_CHECKING:
    from elasticmoe.kernels.launch import Late

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


COPY_CYCLES = 2_000_000
"""How long copies take to begin: about a millisecond, in which a layer is computed that doesn't wait."""


class Copies:
    """Another stream's copies into the pages of late experts, which hold NaN until then."""

    def __init__(self, pages: torch.Tensor, table: torch.Tensor) -> None:
        self.pages, self.table = pages, table
        used = torch.zeros(len(pages), dtype=torch.bool, device="cuda")
        used[table.flatten().long()] = True
        self.spare = (~used).nonzero()[0]
        """A page that is nobody's, which takes the place of every page that isn't late."""
        self.masters = pages.clone()
        self.resident = torch.ones(len(table), dtype=torch.bool, device="cuda")
        self.ids = self.spare.repeat(table.numel())
        self.side, self.done = torch.cuda.Stream(), torch.cuda.Event()
        self.num_waits = 0

    def set_late(self, experts: list[int]) -> None:
        """From here on these are late, and all others resident; the same tensors say so."""
        self.resident.fill_(True)
        self.resident[experts] = False
        self.ids.copy_(torch.where(self.resident[:, None], self.spare, self.table).flatten())
        self.pages.index_fill_(0, self.ids, float("nan"))

    def start(self) -> None:
        """Fork from the current stream."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(COPY_CYCLES)
            self.pages.index_copy_(0, self.ids, self.masters.index_select(0, self.ids))
            self.done.record()

    def wait(self) -> None:
        """Join the current stream."""
        torch.cuda.current_stream().wait_event(self.done)
        self.num_waits += 1

    @property
    def late(self) -> "Late":
        """What the computation is told."""
        from elasticmoe.kernels.launch import Late

        return Late(self.resident, self.wait)


def _uneven_case(num_tokens: int, shape: tuple[int, ...]) -> Operands:
    """Expert 3 gets every token, some pairs are masked, and all of a token's."""
    f, d, num_experts, top_k, slack = shape
    case = _case(num_tokens, top_k=top_k, num_experts=num_experts, f=f, d=d, slack=slack)
    ids = case[2]
    ids[:, 1] = 3
    ids[::5, 0] = -1
    ids[3:4] = -1
    return case


def _assert_any_may_be_late(case: Operands, config: Any) -> None:  # a Config, or None
    from elasticmoe.kernels.launch import paged_moe

    num_experts, want = len(case[5]), paged_moe(*case, config)
    assert want.isfinite().all()
    copies = Copies(case[3], case[5])
    for round_, late in enumerate(([], [3], list(range(0, num_experts, 2)), list(range(num_experts)))):
        copies.set_late(late)
        copies.start()
        assert torch.equal(paged_moe(*case, config, copies.late), want), late
        assert copies.num_waits == round_ + 1


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("gemm", GEMMS)
def test_no_bit_depends_on_which_experts_are_late(gemm: str, pdl: bool) -> None:  # noqa: FBT001
    """However the GEMMs are tiled, an expert's pages may be filled while others are computed, for the same bits."""
    from elasticmoe.kernels.config import Config, Gemm

    config = Config(64, Gemm(**GEMMS[gemm]), Gemm(**GEMMS[gemm]), pdl=pdl)
    _assert_any_may_be_late(_uneven_case(77, SHAPES[1]), config)


@pytest.mark.parametrize("num_tokens", [1, 16, 300, 1021, 5000])
def test_no_bit_of_the_chosen_config_depends_on_which_experts_are_late(num_tokens: int) -> None:
    """Of batches from one token, which waits before all else, to more than one program sorts."""
    _assert_any_may_be_late(_uneven_case(num_tokens, SHAPES[0]), None)


@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 1), (37, 16), (300, 64), (1021, 128)])
def test_a_graph_follows_residency(num_tokens: int, block_m: int) -> None:
    """One graph with the copies' fork in it, replayed while routing and residency change: always the same bits."""
    from elasticmoe.kernels.config import Config, Gemm
    from elasticmoe.kernels.launch import paged_moe

    gate_up = Gemm(4, 256) if block_m == 1 else Gemm(**GEMMS["halved"])
    down = Gemm(4, 256) if block_m == 1 else Gemm(**GEMMS["persistent"])
    config = Config(block_m, gate_up, down, pdl=True)
    case = _uneven_case(num_tokens, (256, 512, 64, 8, 0))
    copies, ids = Copies(case[3], case[5]), case[2]

    def forward() -> torch.Tensor:
        copies.start()
        return paged_moe(*case, config, copies.late)

    for part in ([], [3]):  # what a launch compiles, it can't while it is captured
        copies.set_late(part)
        forward()
        paged_moe(*case, config)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for step, late in enumerate((list(range(32)), [], list(range(64)), [3], list(range(1, 64, 3)))):
        ids.copy_(torch.where(ids < 0, ids, (ids + step) % 64))
        want = paged_moe(*case, config)
        copies.set_late(late)
        graph.replay()
        assert torch.equal(got, want), late


@pytest.mark.parametrize("num_tokens", [3, 40, 300, 5000])
def test_what_pads_a_batch_changes_no_bit(num_tokens: int) -> None:
    """The real tokens' rows are those of a batch whose other ids are masked, whatever the padding holds."""
    from elasticmoe.kernels.launch import paged_moe

    case = _case(num_tokens, top_k=8, num_experts=64, f=256, d=512, slack=0)
    real = num_tokens - num_tokens // 3
    masked = case[2].clone()
    masked[real:] = -1
    want = paged_moe(case[0], case[1], masked, *case[3:])
    case[0][real:] = float("nan")
    got = paged_moe(*case, num_tokens=torch.tensor([real], dtype=torch.int32, device="cuda"))
    assert torch.equal(got[:real], want[:real])
    assert not got[real:].any()
