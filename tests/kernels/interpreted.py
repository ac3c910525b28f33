"""The Triton kernels against the reference on the CPU; `test_interpreted` runs this file in Triton's interpreter.

Shapes: T tokens, N experts, K top-k, d hidden, f intermediate.
"""

from typing import Any

import pytest
import torch

from elasticmoe.kernels import align as align_module
from elasticmoe.kernels.align import align
from elasticmoe.kernels.config import Config, Gemm
from elasticmoe.kernels.launch import Batch, Late, down, gate_up, paged_moe
from elasticmoe.kernels.reference import paged_moe as reference

pytestmark = [
    # Triton's interpreter turns arrays of one element into numbers in a way that NumPy is about to drop.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Rows that pad a block hold whatever the memory held; they are multiplied, and never stored.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

TILE: dict[str, Any] = {"block_n": 16, "block_k": 16}
GEMMS = {
    "pointers": Gemm(**TILE),
    "grouped": Gemm(**TILE, group_m=2, swap=True),
    "tma": Gemm(**TILE, tma=True),
    "tma swapped": Gemm(**TILE, tma=True, swap=True),
    "halved": Gemm(**TILE, halvings=1),
    "halved twice": Gemm(**TILE, tma=True, swap=True, halvings=2),
    "persistent": Gemm(**TILE, tma=True, persistent=True, group_m=2),
}
PLAIN = GEMMS["pointers"]
HALVED = Config(32, GEMMS["halved"], GEMMS["halved twice"])
FEW = Config(1, Gemm(16, 32), Gemm(32, 32))
SORTED = {
    "pointers": Config(16, GEMMS["grouped"], GEMMS["grouped"]),
    "tma": Config(16, GEMMS["tma"], GEMMS["tma swapped"]),
    "persistent": Config(16, GEMMS["tma swapped"], GEMMS["persistent"]),
    "halved": HALVED,
}
LATE = [[], [0, 3], [0, 1, 2, 3, 4]]


def _case(tokens: int, top_k: int = 2, sizes: tuple[int, int, int, int] = (24, 40, 5, 8)) -> Operands:
    """Operands of `sizes` f, d, N over shuffled pages that lie so many elements apart; the last three are nobody's."""
    f, d, n, slack = sizes
    gen = torch.Generator().manual_seed(tokens * 1009 + f)
    num, stride = 3 * n + 6, f * d + slack
    arena = torch.randn(num * stride, generator=gen) / d**0.5
    table = torch.randperm(num - 3, generator=gen)[: 3 * n].view(n, 3).int()
    up = arena.as_strided((num, f, d), (stride, d, 1))
    down = arena.as_strided((num, d, f), (stride, f, 1))
    hidden = torch.randn((tokens, d), generator=gen)
    weights, ids = torch.randn((tokens, n), generator=gen).softmax(-1).topk(top_k)
    return hidden, weights.contiguous(), ids.int().contiguous(), up, down, table


def _assert_is_reference(case: Operands, config: Config | None) -> None:
    hidden, weights, ids, *pages = case
    want = reference(hidden, torch.where(ids < 0, 0, weights), ids.clamp(min=0), *pages)
    torch.testing.assert_close(paged_moe(*case, config), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", GEMMS)
def test_every_tiling_is_the_reference(name: str) -> None:
    """However the GEMMs are tiled, with sizes that no tile divides, the result is the formula's."""
    _assert_is_reference(_case(17), Config(32, GEMMS[name], GEMMS[name]))


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("config", [FEW, Config(16, PLAIN, PLAIN)], ids=["few", "grouped"])
def test_any_number_of_experts_a_token(top_k: int, config: Config) -> None:
    """Primes for sizes, unaligned pages, and from one expert a token to eight."""
    _assert_is_reference(_case(3, top_k, (17, 19, 9, 1)), config)


@pytest.mark.parametrize("config", [None, FEW, Config(16, GEMMS["tma"], GEMMS["persistent"])])
def test_no_tokens_give_no_rows(config: Config | None) -> None:
    """Zero tokens are no special case for the caller."""
    case = _case(0)
    assert paged_moe(*case, config).shape == (0, 40)
    copies = Copies(case, [1])
    assert paged_moe(*case, config, copies.late).shape == (0, 40)
    assert copies.num_waits == 1


@pytest.mark.parametrize("tokens", [1, 13, 31])
def test_the_chosen_config_is_the_reference(tokens: int) -> None:
    """A batch for which nothing was measured gets a config that computes the same."""
    _assert_is_reference(_case(tokens), None)


@pytest.mark.parametrize("config", [FEW, Config(16, GEMMS["tma"], GEMMS["persistent"])], ids=["few", "grouped"])
def test_masked_pairs_add_nothing(config: Config) -> None:
    """Expert id -1, as padded tokens and other ranks' experts have it, counts as weight 0; all of a token's may be."""
    case = _case(6)
    case[2][::3, 0] = -1
    case[2][4] = -1
    _assert_is_reference(case, config)
    case[2].fill_(-1)
    assert not paged_moe(*case, config).any()


PADDED = {"few": FEW, "grouped": Config(16, GEMMS["tma"], GEMMS["persistent"]), "halved": HALVED}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("tokens", [17, 300])
def test_what_pads_a_batch_changes_no_bit_and_reads_no_page(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real tokens' rows are those of a batch whose other ids are masked, whatever the padding holds."""
    monkeypatch.setattr(align_module, "PAIRS_AT_ONCE", 128)  # so that the larger batch is sorted in tiles
    case = _case(tokens)
    hidden, weights, ids, up, down_pages, table = case
    real = tokens - tokens // 3
    ids[:real] = ids[:real].clamp(max=2)
    ids[real:] = 4
    masked = ids.clone()
    masked[real:] = -1
    want = paged_moe(hidden, weights, masked, up, down_pages, table, PADDED[name])
    up[table[4].long()] = float("nan")
    hidden[real:] = float("nan")
    num_tokens = torch.tensor([real], dtype=torch.int32)
    got = paged_moe(*case, PADDED[name], num_tokens=num_tokens)
    assert torch.equal(got, want)
    assert not got[real:].any()
    late = Late(torch.tensor([True, False, True, False, True]), lambda: None)
    assert torch.equal(paged_moe(*case, PADDED[name], late, num_tokens), want)
    assert not paged_moe(*case, PADDED[name], num_tokens=torch.zeros_like(num_tokens)).any()


@pytest.mark.parametrize("config", [FEW, Config(16, PLAIN, PLAIN), HALVED], ids=["few", "grouped", "halved"])
def test_one_expert_may_get_everything(config: Config) -> None:
    """Equal weights, and every token on the same two experts: one row more than a block, or than its half, holds."""
    case = _case(17)
    case[1].fill_(0.5)
    case[2].copy_(torch.tensor([3, 1], dtype=torch.int32).expand(17, 2))
    _assert_is_reference(case, config)


@pytest.mark.parametrize("config", [FEW, Config(16, GEMMS["tma"], PLAIN)], ids=["few", "grouped"])
def test_an_expert_in_a_loading_buffer_gives_the_same_bits(config: Config) -> None:
    """The table may point at any page that holds the matrix: no bit changes."""
    hidden, weights, ids, up, down, table = _case(5)
    want = paged_moe(hidden, weights, ids, up, down, table, config)
    slots = torch.arange(up.shape[0] - 3, up.shape[0], dtype=torch.int32)
    for page, slot in zip(table[2].tolist(), slots.tolist(), strict=True):
        up[slot] = up[page]
        up[page].fill_(float("nan"))
    table[2] = slots
    assert torch.equal(paged_moe(hidden, weights, ids, up, down, table, config), want)


@pytest.mark.parametrize("config", [FEW, Config(16, GEMMS["tma swapped"], PLAIN)], ids=["few", "grouped"])
def test_an_unused_experts_page_is_not_read(config: Config) -> None:
    """What lies in the pages of experts that nobody routes to doesn't matter, not even NaN."""
    hidden, weights, ids, up, down, table = _case(3)
    ids.copy_(torch.tensor([0, 1], dtype=torch.int32).expand(3, 2))
    want = paged_moe(hidden, weights, ids, up, down, table, config)
    for page in table[2:].flatten().tolist():
        up[page].fill_(float("nan"))
    assert torch.equal(paged_moe(hidden, weights, ids, up, down, table, config), want)


def test_half_precision_rounds_as_the_reference_does() -> None:
    """In half precision products are rounded before they are weighted, and sums are made in float32."""
    hidden, weights, ids, up, down, table = _case(3)
    half = hidden.half(), weights, ids, up.half(), down.half(), table
    for config in (FEW, Config(16, PLAIN, PLAIN)):
        got = paged_moe(*half, config)
        assert got.dtype == torch.float16
        torch.testing.assert_close(got, reference(*half), atol=2e-3, rtol=2e-3)


class Copies:
    """Copies that are done when they are waited for: till then NaN is what an expert's late pages hold."""

    def __init__(self, case: Operands, late: list[int], *, poisons: bool = False) -> None:
        _, _, _, self.pages, _, table = case
        self.resident = torch.ones(len(table), dtype=torch.bool)
        self.resident[late] = False
        self.ids = table[~self.resident].flatten().long()
        self.others = table[self.resident].flatten().long()
        self.bytes = self.pages[self.ids]
        self.pages[self.ids] = float("nan")
        self.poisons = poisons
        self.num_waits = 0

    def wait(self) -> None:
        """From here on, every resident expert's pages hold NaN instead, if they are poisoned."""
        self.pages[self.ids] = self.bytes
        if self.poisons:
            self.pages[self.others] = float("nan")
        self.num_waits += 1

    @property
    def late(self) -> Late:
        """What the computation is told."""
        return Late(self.resident, self.wait)


def _uneven_case(sizes: tuple[int, int, int, int] = (24, 40, 5, 8)) -> Operands:
    """One expert with more rows than a block of 16 has, some pairs masked, and all of one token's."""
    case = _case(18, 2, sizes)
    case[2][:, 1] = 3
    case[2][::5, 0] = -1
    case[2][4] = -1
    return case


@pytest.mark.parametrize("late", LATE, ids=str)
@pytest.mark.parametrize("name", [*SORTED, "few"])
def test_no_bit_depends_on_which_experts_are_late(name: str, late: list[int]) -> None:
    """Pages are read once they are there, those that were there before any is waited for; and it is waited once."""
    config = SORTED.get(name, FEW)
    case = _uneven_case((24, 40, 5, 8) if config.down.tma else (17, 19, 9, 1))
    want = paged_moe(*case, config)
    assert want.isfinite().all()
    copies = Copies(case, late, poisons=name != "few")
    assert torch.equal(paged_moe(*case, config, copies.late), want)
    assert copies.num_waits == 1


@pytest.mark.parametrize("late", LATE, ids=str)
@pytest.mark.parametrize("name", SORTED)
def test_each_part_computes_its_own_rows_alone(name: str, late: list[int]) -> None:
    """Nothing is written for a late expert before its pages are there, nor anything for the others after."""
    config, case = SORTED[name], _uneven_case()
    batch, copies = Batch(*case), Copies(case, late, poisons=True)
    order = align(batch.topk_ids, batch.table, config.block_m, resident=copies.resident)
    first = int(order.num_blocks[1]) * config.block_m
    rows = torch.zeros(len(order.sorted_token_ids), dtype=torch.bool)
    rows[order.slots[order.slots >= 0]] = True
    act, products = torch.zeros(len(rows), 24), torch.zeros(len(rows), 40)
    gate_up(batch, config, order, act, "resident")
    down(batch, config, order, act, products, "resident")
    for made in (act, products):
        assert torch.equal(made.any(1).nonzero(), rows[:first].nonzero())
    before = act[:first].clone(), products[:first].clone()
    copies.wait()
    gate_up(batch, config, order, act, "late")
    down(batch, config, order, act, products, "late")
    for made, was in zip((act, products), before, strict=True):
        assert made.isfinite().all()
        assert torch.equal(made.any(1), rows)
        assert torch.equal(made[:first], was)


@pytest.mark.parametrize("late", [None, *LATE], ids=str)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_the_alignment_sorts_stably_and_pads_with_nobody(
    is_tiled: bool,  # noqa: FBT001
    late: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each expert's pairs are in order, from a block's start on, late ones behind; both ways agree with a loop."""
    if is_tiled:
        monkeypatch.setattr(align_module, "PAIRS_AT_ONCE", 0)
        monkeypatch.setattr(align_module, "TILE", 32)
    block_m, n = 16, 5
    ids, table = _case(61)[2], _case(61)[5]
    ids[::7, 1] = -1
    ids[ids == 3] = 4
    behind = late or []
    resident = None if late is None else torch.tensor([expert not in behind for expert in range(n)])
    order = align(ids, table, block_m, resident=resident)
    pairs = ids.flatten().tolist()
    sorted_ids: list[int] = []
    pages: list[list[int]] = []
    starts = [0] * n
    for expert in sorted(range(n), key=lambda expert: expert in behind):
        starts[expert] = len(pages)
        own = [pair for pair, routed in enumerate(pairs) if routed == expert]
        own += [len(pairs)] * (-len(own) % block_m)
        sorted_ids += own
        pages += [table[expert].tolist()] * (len(own) // block_m)
    assert order.sorted_token_ids[: len(sorted_ids)].tolist() == sorted_ids
    num_resident = min((starts[expert] for expert in behind), default=len(pages))
    assert order.num_blocks.tolist() == [len(pages), num_resident][: 1 if late is None else 2]
    assert order.block_pages.tolist() == pages + [[-1] * 3] * (len(order.block_pages) - len(pages))
    assert order.slots.tolist() == [-1 if pairs[pair] < 0 else sorted_ids.index(pair) for pair in range(len(pairs))]


def test_operands_that_the_kernels_would_misread_are_told() -> None:
    """Types, layouts and views that don't fit are seen before anything is launched; the caller then goes elsewhere."""
    hidden, weights, ids, up, down, table = _case(4)
    assert Batch(hidden, weights, ids, up, down, table).is_supported
    wrong = (
        Batch(hidden.double(), weights, ids, up.double(), down.double(), table),
        Batch(hidden.half(), weights, ids, up, down, table),
        Batch(hidden, weights.double(), ids, up, down, table),
        Batch(hidden, weights, ids.long(), up, down, table),
        Batch(hidden, weights, ids, up, down, table.long()),
        Batch(hidden[:, :-1].contiguous(), weights, ids, up, down, table),
        Batch(hidden, weights, ids, up.contiguous(), down, table),
        Batch(hidden, weights, ids, up, up, table),
        Batch(hidden, weights, ids.flip(1).t().contiguous().t(), up, down, table),
        Batch(hidden, weights, ids, up, down, table.t().contiguous().t()),
    )
    assert not any(batch.is_supported for batch in wrong)


def test_residency_that_the_alignment_would_misread_is_refused() -> None:
    """A flag is one byte, there is one an expert, and they lie side by side."""
    case = _case(4)
    resident = torch.ones(5, dtype=torch.bool)
    wrong = (resident.int(), resident[:4], torch.ones(10, dtype=torch.bool)[::2], resident.to("meta"))
    for flags in wrong:
        with pytest.raises(AssertionError, match="resident"):
            paged_moe(*case, FEW, Late(flags, lambda: None))
