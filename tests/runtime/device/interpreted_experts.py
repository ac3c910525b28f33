"""Experts whose fetches the device drives, in Triton's interpreter: the same reads and counts as the host's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticmoe.kernels.launch import paged_moe
from elasticmoe.runtime.contract.config import FetchKind
from elasticmoe.runtime.device.experts import Experts
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.device.trust import LEAST_PREDICTED
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.pages.changes import Entry, Load, PageDelta
from elasticmoe.runtime.pages.tiers import fit_tiers
from elasticmoe.runtime.units import ExpertKey, PageId

pytestmark = [
    # Triton's interpreter turns arrays of one element into numbers in a way that NumPy is about to drop.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Rows that pad a block hold whatever the memory held; they are multiplied, and never stored.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
LAYOUT = HostLayout(num_layers=2, num_experts=4, rows=4, cols=8, itemsize=4)
TIERS = fit_tiers(LAYOUT.matrix_bytes, LAYOUT.matrix_bytes)
NUM_PAGES = 60
FIRST_SLOT = 30
TOP_K = 2


MANY = torch.tensor([[3, 0], [1, 2], [0, 3], [2, 1], [3, 1]], dtype=torch.int32)
"""More tokens than are too few to look ahead for."""


def _pages(first: int) -> tuple[PageId, PageId, PageId]:
    return PageId(first), PageId(first + 1), PageId(first + 2)


def _experts(fetch: FetchKind, away: set[int]) -> Experts:
    """Two layers with the same experts away, each of which has a slot; the slots hold what no sum survives."""
    pool, gen = HostPool(LAYOUT, torch.float32), torch.Generator().manual_seed(0)
    for layer in range(LAYOUT.num_layers):
        pool.gate_up(layer).copy_(torch.randn(4, 8, 8, generator=gen))
        pool.down(layer).copy_(torch.randn(4, 8, 4, generator=gen))
    made = Experts(pool, torch.device("cpu"), fetch)
    entries = []
    for layer in range(LAYOUT.num_layers):
        for expert in range(LAYOUT.num_experts):
            is_away = expert in away
            first = FIRST_SLOT + 3 * (4 * layer + expert) if is_away else 1 + 3 * (4 * layer + expert)
            entries.append(Entry(ExpertKey(layer, expert), _pages(first), is_resident=not is_away))
    storage = torch.full((NUM_PAGES * LAYOUT.matrix_bytes // 4,), float("nan")).view(torch.uint8)
    made.attach(storage, TIERS, entries)
    return made


def _forward(experts: Experts, ids: torch.Tensor, *, is_piece: bool = False) -> torch.Tensor:
    """Both layers' outputs for fixed tokens, [2, T, d]."""
    gen = torch.Generator().manual_seed(1)
    hidden, outputs = torch.randn((len(ids), LAYOUT.cols), generator=gen), []
    weights = torch.rand(ids.shape, generator=gen)
    for layer in range(LAYOUT.num_layers):
        late = experts.prepare(layer, ids, hidden, is_piece=is_piece)
        arena, table = experts.arena, experts.table.pages[layer]
        operands = hidden, weights, ids, arena.up_pages, arena.down_pages, table
        outputs.append(paged_moe(*operands, late=late, num_tokens=experts.num_tokens))
    return torch.stack(outputs)


ROUTINGS = st.lists(st.lists(st.integers(0, 3), min_size=TOP_K, max_size=TOP_K, unique=True), min_size=1, max_size=40)


@settings(max_examples=25)
@given(ROUTINGS, st.sets(st.integers(0, 3)))
def test_outputs_and_counts_are_those_of_fetches_by_the_host(routing: list[list[int]], away: set[int]) -> None:
    """Bit for bit, over two steps, whatever is away; from one token to more than a block's rows."""
    ids = torch.tensor(routing, dtype=torch.int32)
    outputs, reports = [], []
    kinds: tuple[FetchKind, ...] = ("host", "device")
    for fetch in kinds:
        experts = _experts(fetch, away)
        for _ in range(2):
            experts.begin_step(len(ids))
            outputs.append(_forward(experts, ids))
            experts.end_step()
        reports.append(experts.take_report()())
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    host, device = reports
    assert np.array_equal(host.routed, device.routed)
    assert (host.routed_resident, host.missed) == (device.routed_resident, device.missed)
    assert host.copied_bytes == device.copied_bytes


def test_padding_is_neither_fetched_nor_counted() -> None:
    """Of three tokens one is real: only its expert comes, only it counts, and the others read nothing."""
    experts = _experts("device", {1, 2})
    experts.begin_step(1)
    output = _forward(experts, torch.tensor([[0, 1], [2, 3], [2, 3]], dtype=torch.int32))
    report = experts.take_report()()
    assert report.missed == LAYOUT.num_layers
    assert report.routed.tolist() == [[1, 1, 0, 0]] * 2
    assert output[:, 0].isfinite().all()
    assert output[:, 0].any()
    assert not output[:, 1:].any()


def test_before_the_first_step_nothing_is_fetched_or_counted() -> None:
    """Warm-up and captures have no real token; and without an arena every row is the temporary expert's."""
    experts = _experts("device", {3})
    _forward(experts, torch.tensor([[3, 0]], dtype=torch.int32))
    assert experts.take_report()().missed == 0
    fresh = Experts(HostPool(LAYOUT, torch.float32), torch.device("cpu"), "device")
    _forward(fresh, torch.tensor([[0, 3]], dtype=torch.int32))
    assert fresh.take_report()().routed.sum() == 0


def test_only_a_step_whose_layer_is_whole_computes_it_in_one_go() -> None:
    """What warms kernels up launches those for late experts too; a step only where an expert of its layer is away."""
    experts = _experts("device", set())

    def waits() -> list[bool]:
        made = [experts.prepare(layer, MANY) for layer in range(LAYOUT.num_layers)]
        return [late is not None and late.wait is not None for late in made]

    assert waits() == [True, True]
    experts.begin_step(len(MANY))
    assert waits() == [False, False]
    experts.apply(PageDelta(entries=(Entry(ExpertKey(1, 2), _pages(FIRST_SLOT), is_resident=False),)))
    assert waits() == [False, True]
    assert experts.take_report()().routed.sum() == 2 * MANY.numel() * LAYOUT.num_layers


def test_a_report_has_what_was_counted_when_it_was_taken() -> None:
    """What a later step counts is the next report's, though the first is read only then."""
    experts = _experts("device", {3})
    ids = torch.tensor([[3, 0]], dtype=torch.int32)
    experts.begin_step(1)
    _forward(experts, ids)
    first = experts.take_report()
    _forward(experts, ids)
    _forward(experts, ids)
    assert first().missed == LAYOUT.num_layers
    assert experts.take_report()().missed == 2 * LAYOUT.num_layers


def test_a_load_lands_as_with_fetches_by_the_host() -> None:
    """An expert that was away is read from its own pages once its row says so, and isn't fetched any more."""
    experts = _experts("device", {3})
    keys = [ExpertKey(layer, 3) for layer in range(LAYOUT.num_layers)]
    pages = [_pages(50 + 3 * layer) for layer in range(LAYOUT.num_layers)]
    ids = torch.tensor([[3, 0]], dtype=torch.int32)
    experts.begin_step(1)
    want = _forward(experts, ids)
    experts.apply(PageDelta(loads=tuple(map(Load, keys, pages))))
    entries = [Entry(key, own, is_resident=True) for key, own in zip(keys, pages, strict=True)]
    experts.apply(PageDelta(entries=tuple(entries)))
    assert torch.equal(_forward(experts, ids), want)
    report = experts.take_report()()
    assert (report.missed, report.planned) == (LAYOUT.num_layers, LAYOUT.num_layers)


@pytest.mark.parametrize(
    ("predicted", "missed", "foreseen"),
    [(MANY, 2, 2), (torch.ones_like(MANY), 3, 1), (torch.zeros_like(MANY), 4, 0), (torch.full_like(MANY, -1), 4, 0)],
    ids=["all", "some", "wrong", "none"],
)
def test_a_prediction_changes_when_experts_come_and_no_bit(predicted: torch.Tensor, missed: int, foreseen: int) -> None:
    """Right, wrong or empty: what wasn't foreseen comes once the routing says so; the first layer has no prediction."""
    plain, ahead = (_experts("device", {1, 2}) for _ in range(2))
    ahead.predict_by(lambda _, hidden: predicted[: len(hidden)])
    for experts in (plain, ahead):
        experts.begin_step(len(MANY))
    for _ in range(2):
        assert torch.equal(_forward(ahead, MANY), _forward(plain, MANY))
    report, want = ahead.take_report()(), plain.take_report()()
    assert want.missed == 2 * 4
    assert report.missed == 2 * missed
    assert report.foreseen == 2 * foreseen
    assert report.predicted >= report.foreseen
    more = report.missed + report.predicted - want.missed
    assert report.copied_bytes == want.copied_bytes + more * LAYOUT.expert_bytes
    assert (report.routed == want.routed).all()


def test_nothing_is_fetched_ahead_in_a_piece_of_a_graph_or_without_trust() -> None:
    """A piece ends before the next layer; and a predictor that is mostly wrong is not listened to."""
    experts = _experts("device", {1, 2})
    experts.predict_by(lambda _, hidden: torch.full((len(hidden), 1), 2, dtype=torch.int32))
    experts.begin_step(len(MANY))
    _forward(experts, MANY, is_piece=True)
    assert experts.take_report()().predicted == 0
    only_1, report = torch.tensor([[0, 1]] * 5, dtype=torch.int32), None
    for _ in range(LEAST_PREDICTED + 1):
        experts.begin_step(len(only_1))
        _forward(experts, only_1)
        report = experts.take_report()()
    assert report is not None
    assert report.predicted == 0
    assert report.missed == LAYOUT.num_layers


def test_the_host_can_take_over_before_the_first_step() -> None:
    """From a pool that could not be pinned: outputs and counts are those of a host that drove from the start."""
    device, host = _experts("device", {1, 3}), _experts("host", {1, 3})
    device.drive("host")
    reports = []
    for experts in (device, host):
        experts.begin_step(len(MANY))
        output = _forward(experts, MANY)
        reports.append((output, experts.num_tokens, experts.take_report()()))
    (output, num_tokens, report), (want_output, _, want) = reports
    assert num_tokens is None
    assert torch.equal(output, want_output)
    assert report.missed == want.missed > 0
    assert np.array_equal(report.routed, want.routed)
