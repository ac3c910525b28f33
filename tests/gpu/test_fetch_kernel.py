"""The fetch kernel on a GPU: bytes and counts against the reference, in CUDA graphs, without a word to the host."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticmoe.kernels import reference
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import ExpertKey

if TYPE_CHECKING:
    from elasticmoe.kernels.fetch import Counts

pytestmark = pytest.mark.gpu

N, K, F, D = 32, 4, 192, 512
"""Experts, of how many each token goes to, and the sides of their matrices."""
E = F * D * 2
"""Bytes of a matrix."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer whose arena holds every expert, and slots for as many; the masters are the same bytes, pinned."""

    arena: torch.Tensor
    """[pages, f * d] bf16."""
    table: torch.Tensor
    """[N, 3] int32."""
    slots: torch.Tensor
    """[N, 3] int32: where each expert is fetched to."""
    masters: torch.Tensor
    """[N, 3, E] uint8 on the host."""

    @property
    def storage(self) -> torch.Tensor:
        """The arena's bytes."""
        return self.arena.view(torch.uint8).view(-1)

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The arena as the paged MoE takes it."""
        return self.arena.view(-1, F, D), self.arena.view(-1, D, F)

    def rows(self, resident: torch.Tensor) -> torch.Tensor:
        """The table where only these experts are in pages of their own."""
        return torch.where(resident[:, None], self.table, self.slots)


def _layer() -> Layer:
    gen = torch.Generator("cuda").manual_seed(0)
    arena = torch.randn((6 * N, F * D), generator=gen, device="cuda", dtype=torch.bfloat16) / D**0.5
    pages = torch.randperm(6 * N, generator=gen, device="cuda").int().view(-1, 3)
    table, slots = pages[:N].contiguous(), pages[N:].contiguous()
    masters = torch.empty((N, 3, E), dtype=torch.uint8, pin_memory=True)
    masters.copy_(arena[table.long()].view(torch.uint8))
    return Layer(arena, table, slots, masters)


def _routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids [T, K]; every fifth token's are nobody's."""
    gen = torch.Generator("cuda").manual_seed(seed)
    weights, ids = torch.randn((tokens, N), generator=gen, device="cuda").softmax(-1).topk(K)
    ids[::5] = -1
    return weights.contiguous(), ids.int()


def _resident(num_offloaded: int, seed: int) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    resident = torch.ones(N, dtype=torch.bool, device="cuda")
    resident[torch.randperm(N, generator=gen, device="cuda")[:num_offloaded]] = False
    return resident


def _counts() -> "Counts":
    from elasticmoe.kernels.fetch import NUM_TOTALS, Counts

    return Counts(*(torch.zeros(size, dtype=torch.int64, device="cuda") for size in (N, NUM_TOTALS, 2)))


def _as_count(num_tokens: int) -> torch.Tensor:
    return torch.tensor([num_tokens], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("tokens", [0, 1, 7, 256, 1021, 8192])
@pytest.mark.parametrize("num_offloaded", [0, 6, 32])
def test_what_is_copied_and_counted_is_what_the_reference_says(tokens: int, num_offloaded: int) -> None:
    """From no token to a long prompt, all resident or none, a part of the tokens padding."""
    from elasticmoe.kernels.fetch import COPY_NS, HITS, MISSED, Masters, fetch_needed

    layer, resident, counts = _layer(), _resident(num_offloaded, tokens), _counts()
    ids, rows, real = _routing(tokens, 1)[1], layer.rows(resident), tokens - tokens // 3
    want = layer.storage.cpu()
    copied = reference.fetch_needed(ids.cpu(), rows.cpu(), resident.cpu(), layer.masters, want, E, real)
    fetch_needed(
        ids, rows, resident, Masters(layer.masters.data_ptr(), E), layer.storage, E, num_tokens=_as_count(real),
        counts=counts,
    )  # fmt: skip
    assert torch.equal(layer.storage.cpu(), want)
    routed = ids[:real][ids[:real] >= 0].cpu().long().bincount(minlength=N)
    assert torch.equal(counts.routed.cpu(), routed)
    totals = counts.totals.tolist()
    assert totals[HITS] == int(routed[resident.cpu()].sum())
    assert totals[MISSED] == len(copied)
    assert (totals[COPY_NS] > 0) == bool(copied)


TUNINGS: list[dict[str, Any]] = [
    {"num_blocks": 1},
    {"num_blocks": 3, "chunk_bytes": 16384, "num_warps": 4},
    {"num_blocks": 8},
    {"num_blocks": 8, "num_stages": 3},
    {"num_blocks": 4, "chunk_bytes": 65536, "num_stages": 4, "num_warps": 16},
]
SIZES = [
    (3 * 2**20, 3 * 2**20, 0), (E, E + 64, 0), (E + 16, E + 32, 0), (40, 48, 0), (20, 24, 0), (646, 648, 0),
    (19, 23, 0), (E, E, 1),
]  # fmt: skip
"""Bytes of a matrix and of a granule, and what the masters' address is off."""


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_copied_exactly(tuning: dict[str, Any], size: tuple[int, int, int]) -> None:
    """Whatever the size, alignment and launch, the rows' pages have the masters' bytes and nothing else has changed."""
    from elasticmoe.kernels.fetch import Masters, Tuning, fetch_needed

    matrix, granule, off = size
    gen = torch.Generator().manual_seed(matrix)
    host = torch.empty(off + 6 * 3 * matrix, dtype=torch.uint8, pin_memory=True)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8, generator=gen))
    rows = torch.randperm(18, generator=gen).int().view(6, 3)
    ids, resident = torch.tensor([[5, 0, 3]], dtype=torch.int32), torch.zeros(6, dtype=torch.bool)
    want = torch.randint(0, 256, (18 * granule,), dtype=torch.uint8, generator=gen)
    got = want.cuda()
    reference.fetch_needed(ids, rows, resident, host[off:].view(6, 3, matrix), want, granule)
    on_gpu = ids.cuda(), rows.cuda(), resident.cuda()
    fetch_needed(*on_gpu, Masters(host.data_ptr() + off, matrix), got, granule, tuning=Tuning(**tuning))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_the_host_pool_can_be_read_as_it_is_pinned(is_mapped: bool) -> None:  # noqa: FBT001
    """A worker's own pool, and one that a coordinator would hand over read-only: the device reads both by address."""
    from elasticmoe.kernels.fetch import Masters, fetch_needed

    layout = HostLayout(num_layers=2, num_experts=4, rows=64, cols=128, itemsize=2)
    if is_mapped:
        fd = shared.create("elasticmoe-test", layout.pool_bytes)
        memory = shared.map_writable(fd)
        memory[:] = os.urandom(layout.pool_bytes)
        memory.close()
        shared.seal(fd)
        pool = HostPool(layout, torch.bfloat16, shared.map_sealed(fd))
        os.close(fd)
    else:
        pool = HostPool(layout, torch.bfloat16)
        for layer in range(layout.num_layers):
            pool.gate_up(layer).normal_()
            pool.down(layer).normal_()
    pool.pin()
    assert pool.is_pinned
    rows = torch.tensor([[2, 0, 1]] * 4, dtype=torch.int32, device="cuda")
    ids = torch.tensor([[3]], dtype=torch.int32, device="cuda")
    resident = torch.zeros(4, dtype=torch.bool, device="cuda")
    storage = torch.zeros(3 * layout.matrix_bytes, dtype=torch.uint8, device="cuda")
    masters = Masters(pool.matrices(ExpertKey(1, 0))[0].data_ptr(), layout.matrix_bytes)
    fetch_needed(ids, rows, resident, masters, storage, layout.matrix_bytes)
    pages = storage.cpu().view(3, -1)
    for page, master in zip((2, 0, 1), pool.matrices(ExpertKey(1, 3)), strict=True):
        assert torch.equal(pages[page], master)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    """A fetch, its stamp and the MoE that waits return to the host without having asked it anything."""
    from elasticmoe.kernels.fetch import Masters, fetch_needed, stamp
    from elasticmoe.kernels.launch import Late, paged_moe

    layer, resident, counts, side = _layer(), _resident(8, 0), _counts(), torch.cuda.Stream()
    weights, ids = _routing(9, 0)
    hidden, rows, real = torch.zeros((9, D), device="cuda", dtype=torch.bfloat16), layer.rows(resident), _as_count(9)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            masters = Masters(layer.masters.data_ptr(), E)
            fetch_needed(ids, rows, resident, masters, layer.storage, E, num_tokens=real, counts=counts)
        stamp(counts)
        wait = torch.cuda.current_stream().wait_stream
        paged_moe(hidden, weights, ids, *layer.views, rows, late=Late(resident, lambda: wait(side)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_graph_fetches_what_each_replay_needs(tokens: int, is_ahead: bool) -> None:  # noqa: FBT001
    """One graph, replayed while routing, residency and padding change: always the bits of a resident layer."""
    from elasticmoe.kernels.fetch import EXPOSED_NS, MISSED, Masters, fetch_needed, stamp
    from elasticmoe.kernels.launch import Late, paged_moe

    layer, counts, side, real = _layer(), _counts(), torch.cuda.Stream(), _as_count(tokens)
    hidden = torch.randn((tokens, D), device="cuda", dtype=torch.bfloat16)
    weights, ids = _routing(tokens, 0)
    resident, held = _resident(12, 0), torch.zeros(N, dtype=torch.bool, device="cuda")
    rows, where = layer.rows(resident), (Masters(layer.masters.data_ptr(), E), layer.storage, E)

    def wait() -> None:
        stamp(counts)
        torch.cuda.current_stream().wait_stream(side)

    def forward() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if is_ahead:
                fetch_needed(ids, rows, resident, *where, num_tokens=real, held=held, is_ahead=True)
            fetch_needed(ids, rows, resident, *where, num_tokens=real, held=held, counts=counts)
        return paged_moe(hidden, weights, ids, *layer.views, rows, late=Late(resident, wait))

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for seed, num_offloaded, num_real in ((1, 12, tokens), (2, 0, tokens), (3, 32, tokens), (4, 7, (tokens + 1) // 2)):
        fresh = _routing(tokens, seed)
        weights.copy_(fresh[0])
        ids.copy_(fresh[1])
        resident.copy_(_resident(num_offloaded, seed))
        rows.copy_(layer.rows(resident))
        real.fill_(num_real)
        layer.arena[layer.slots.flatten().long()] = float("nan")
        for each in (counts.totals, counts.clock):
            each.zero_()
        graph.replay()
        want = paged_moe(hidden, weights, ids, *layer.views, layer.table)
        assert torch.equal(got[:num_real], want[:num_real]), seed
        routed = {e for e in ids[:num_real].flatten().tolist() if e >= 0}
        missing = set((~resident).nonzero().flatten().tolist())
        assert counts.totals[MISSED].item() == (0 if is_ahead else len(routed & missing))
        assert counts.totals[EXPOSED_NS].item() == 0  # the next fetch counts what the last one was waited for


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("arrives_first", [True, False])
def test_a_layer_joins_what_another_stream_fetched_ahead_of_it(is_right: bool, arrives_first: bool) -> None:  # noqa: FBT001
    """Foreseen or not, waited for at first or last, the second layer has the bits of a resident one in each replay."""
    from elasticmoe.kernels.fetch import MISSED, Masters, fetch_needed
    from elasticmoe.kernels.launch import Late, paged_moe

    layer, counts, held = _layer(), _counts(), torch.zeros(N, dtype=torch.bool, device="cuda")
    hidden = torch.randn((64, D), device="cuda", dtype=torch.bfloat16)
    (weights, ids), resident, other = _routing(64, 0), _resident(12, 0), torch.full((64, K), -1, device="cuda").int()
    foreseen, rows = ids if is_right else other, layer.rows(resident)
    where = rows, resident, Masters(layer.masters.data_ptr(), E), layer.storage, E
    side, early = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)

    def forward() -> torch.Tensor:
        main = torch.cuda.current_stream()
        before = hidden + paged_moe(hidden, weights, ids, *layer.views, layer.table)
        early.wait_stream(main)
        with torch.cuda.stream(early):
            fetch_needed(foreseen, *where, held=held, is_ahead=True)
        between = before + paged_moe(before, weights, ids, *layer.views, layer.table)
        side.wait_stream(main)
        side.wait_stream(early)
        with torch.cuda.stream(side):
            fetch_needed(ids, *where, held=held, counts=counts)
        if arrives_first:
            main.wait_stream(early)
        there = resident | held if arrives_first else resident
        return paged_moe(between, weights, ids, *layer.views, rows, late=Late(there, lambda: main.wait_stream(side)))

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for each in (counts.totals, counts.clock):
        each.zero_()
    for replays in (1, 2):
        layer.arena[layer.slots.flatten().long()] = float("nan")
        graph.replay()
        want = hidden
        for _ in range(2):
            want = want + paged_moe(want, weights, ids, *layer.views, layer.table)
        assert torch.equal(got, paged_moe(want, weights, ids, *layer.views, layer.table))
        missing = {e for e in ids.flatten().tolist() if e >= 0 and not bool(resident[e])}
        assert missing
        assert counts.totals[MISSED].item() == (0 if is_right else replays * len(missing))
