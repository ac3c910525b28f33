"""The fetch kernels on a GPU against the reference: lists, bytes out of pinned memory, and both in CUDA graphs."""

import os
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from elasticmoe.kernels import reference
from elasticmoe.kernels.reference import Needed
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import ExpertKey

pytestmark = pytest.mark.gpu

N, K, F, D = 32, 4, 192, 512
"""Experts, of how many each token goes to, and the sides of their matrices."""
E = F * D * 2
"""Bytes of a matrix."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer whose arena holds every expert, and slots besides; the masters are the same bytes in pinned memory."""

    arena: torch.Tensor
    """[pages, f * d] bf16."""
    table: torch.Tensor
    """[N, 3] int32."""
    slots: torch.Tensor
    """[S, 3] int32."""
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


def _layer(num_slots: int) -> Layer:
    gen = torch.Generator("cuda").manual_seed(num_slots)
    arena = torch.randn((3 * (N + num_slots), F * D), generator=gen, device="cuda", dtype=torch.bfloat16) / D**0.5
    pages = torch.randperm(3 * (N + num_slots), generator=gen, device="cuda").int().view(-1, 3)
    table, slots = pages[:N].contiguous(), pages[N:].contiguous()
    masters = torch.empty((N, 3, E), dtype=torch.uint8, pin_memory=True)
    masters.copy_(arena[table.long()].view(torch.uint8))
    return Layer(arena, table, slots, masters)


def _routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids [T, K]; every fifth token's are padding."""
    gen = torch.Generator("cuda").manual_seed(seed)
    weights, ids = torch.randn((tokens, N), generator=gen, device="cuda").softmax(-1).topk(K)
    ids[::5] = -1
    return weights.contiguous(), ids.int()


def _resident(num_offloaded: int, seed: int) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    resident = torch.ones(N, dtype=torch.bool, device="cuda")
    resident[torch.randperm(N, generator=gen, device="cuda")[:num_offloaded]] = False
    return resident


def _on_host(needed: Needed) -> Needed:
    return Needed(*(getattr(needed, field.name).cpu() for field in fields(needed)))


def _assert_equal(got: Needed, want: Needed) -> None:
    for field in fields(got):
        assert torch.equal(getattr(got, field.name).cpu(), getattr(want, field.name).cpu()), field.name


@pytest.mark.parametrize("tokens", [0, 1, 7, 256, 1021, 8192])
@pytest.mark.parametrize(("num_offloaded", "num_slots", "rounds"), [(0, 1, 1), (6, 6, 1), (20, 6, 4), (32, 32, 1)])
def test_the_list_is_the_references(tokens: int, num_offloaded: int, num_slots: int, rounds: int) -> None:
    """From no token to a long prompt, all resident or none, with a list made ahead and without."""
    from elasticmoe.kernels.fetch import list_needed, round_ids

    layer, resident = _layer(num_slots), _resident(num_offloaded, tokens)
    ids, foreseen = _routing(tokens, 1)[1], _routing(tokens, 2)[1]
    state = (layer.table, resident, layer.slots)
    on_host = tuple(each.cpu() for each in state)
    for is_ahead in (False, True):
        before = list_needed(foreseen, *state) if is_ahead else None
        got = list_needed(ids, *state, rounds=rounds, before=before)
        ahead = None if before is None else _on_host(before)
        want = reference.list_needed(ids.cpu(), *on_host, rounds=rounds, before=ahead)
        _assert_equal(got, want)
        for index in range(rounds):
            assert torch.equal(round_ids(ids, got, index).cpu(), reference.round_ids(ids.cpu(), want, index))


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
    """Whatever the size, alignment and launch, the slots have the masters' bytes and nothing else has changed."""
    from elasticmoe.kernels.fetch import Masters, Tuning, fetch

    matrix, granule, off = size
    gen = torch.Generator().manual_seed(matrix)
    host = torch.empty(off + 6 * 3 * matrix, dtype=torch.uint8, pin_memory=True)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8, generator=gen))
    slots = torch.randperm(12, generator=gen).int().view(4, 3)
    ids, table = torch.tensor([[5, 0, 3]], dtype=torch.int32), torch.zeros((6, 3), dtype=torch.int32)
    needed = reference.list_needed(ids, table, torch.zeros(6, dtype=torch.bool), slots)
    want = torch.randint(0, 256, (12 * granule,), dtype=torch.uint8, generator=gen)
    got = want.cuda()
    reference.fetch(needed, 0, host[off:].view(6, 3, matrix), want, granule)
    on_gpu = Needed(*(getattr(needed, field.name).cuda() for field in fields(needed)))
    fetch(on_gpu, 0, Masters(host.data_ptr() + off, matrix), got, granule, Tuning(**tuning))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_the_host_pool_can_be_read_as_it_is_pinned(is_mapped: bool) -> None:  # noqa: FBT001
    """A worker's own pool, and one that a coordinator would hand over read-only: the device reads both by address."""
    from elasticmoe.kernels.fetch import Masters, fetch, list_needed

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
    slots = torch.tensor([[2, 0, 1]], dtype=torch.int32, device="cuda")
    ids = torch.tensor([[3]], dtype=torch.int32, device="cuda")
    resident = torch.zeros(4, dtype=torch.bool, device="cuda")
    needed = list_needed(ids, torch.zeros((4, 3), dtype=torch.int32, device="cuda"), resident, slots)
    storage = torch.zeros(3 * layout.matrix_bytes, dtype=torch.uint8, device="cuda")
    masters = Masters(pool.matrices(ExpertKey(1, 0))[0].data_ptr(), layout.matrix_bytes)
    fetch(needed, 0, masters, storage, layout.matrix_bytes)
    pages = storage.cpu().view(3, -1)
    for page, master in zip((2, 0, 1), pool.matrices(ExpertKey(1, 3)), strict=True):
        assert torch.equal(pages[page], master)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    """Lists, rounds and fetches return to the host without having asked it anything."""
    from elasticmoe.kernels.fetch import Masters, fetch, list_needed, round_ids

    layer, resident = _layer(4), _resident(8, 0)
    ids = _routing(9, 0)[1]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        needed = list_needed(ids, layer.table, resident, layer.slots, rounds=2)
        for index in range(2):
            fetch(needed, index, Masters(layer.masters.data_ptr(), E), layer.storage, E)
            round_ids(ids, needed, index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_graph_fetches_what_each_replay_needs(is_forked: bool) -> None:  # noqa: FBT001
    """One graph, replayed while routing, residency and living slots change: always the bits of a resident layer."""
    from elasticmoe.kernels.fetch import Masters, fetch, list_needed
    from elasticmoe.kernels.launch import paged_moe

    layer, tokens = _layer(12), 5
    hidden = torch.randn((tokens, D), device="cuda", dtype=torch.bfloat16)
    weights, ids = _routing(tokens, 0)
    resident, table, slots = _resident(12, 0), layer.table.clone(), layer.slots.clone()
    side, masters = torch.cuda.Stream(), Masters(layer.masters.data_ptr(), E)

    def forward() -> tuple[torch.Tensor, Needed]:
        main = torch.cuda.current_stream()
        stream = side if is_forked else main
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            ahead = list_needed(ids, table, resident, slots)
            fetch(ahead, 0, masters, layer.storage, E)
        main.wait_stream(stream)
        needed = list_needed(ids, table, resident, slots, before=ahead)
        fetch(needed, 0, masters, layer.storage, E)
        return paged_moe(hidden, weights, ids, *layer.views, needed.table), needed

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, needed = forward()
    for seed, num_offloaded, alive in ((1, 12, 12), (2, 0, 0), (3, 3, 3), (4, 7, 9), (5, 12, 12)):
        fresh = _routing(tokens, seed)
        weights.copy_(fresh[0])
        ids.copy_(fresh[1])
        resident.copy_(_resident(num_offloaded, seed))
        slots.copy_(layer.slots)
        slots[alive:] = -1
        table.copy_(torch.where(resident[:, None], layer.table, layer.slots[0]))
        layer.arena[layer.slots.flatten().long()] = float("nan")
        graph.replay()
        assert torch.equal(got, paged_moe(hidden, weights, ids, *layer.views, layer.table)), seed
        routed = {e for e in ids.flatten().tolist() if e >= 0}
        missing = set((~resident).nonzero().flatten().tolist())
        assert needed.count.item() == len(routed & missing)
        assert needed.spans.tolist() == [[needed.count.item()] * 2]


def test_rounds_in_a_graph_sum_to_the_layer() -> None:
    """Three slots for twelve offloaded experts: four rounds, whose outputs sum to the layer's up to bf16 rounding."""
    from elasticmoe.kernels.fetch import Masters, fetch, list_needed, num_rounds, round_ids
    from elasticmoe.kernels.launch import paged_moe

    layer, tokens, rounds = _layer(3), 16, num_rounds(12, 3)
    hidden = torch.randn((tokens, D), device="cuda", dtype=torch.bfloat16)
    weights, ids = _routing(tokens, 0)
    resident, masters = _resident(12, 0), Masters(layer.masters.data_ptr(), E)

    def forward() -> torch.Tensor:
        needed = list_needed(ids, layer.table, resident, layer.slots, rounds=rounds)
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for index in range(rounds):
            fetch(needed, index, masters, layer.storage, E)
            total += paged_moe(hidden, weights, round_ids(ids, needed, index), *layer.views, needed.table)
        return total

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for seed in (1, 2):
        fresh = _routing(tokens, seed)
        weights.copy_(fresh[0])
        ids.copy_(fresh[1])
        graph.replay()
        want = paged_moe(hidden, weights, ids, *layer.views, layer.table).float()
        assert (got - want).abs().max() <= 0.02 * want.abs().max()
