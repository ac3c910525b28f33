"""What the fetch bench runs on: a few layers' experts, resident in an arena and again in a pinned host pool.

Shapes: L distinct layers, N experts, K top-k, E bytes of a matrix. The forward has more layers than are distinct here:
layer l has the weights of l mod L, all together far more than any cache holds.
"""

from dataclasses import dataclass

import torch

from bench.kernel.shapes import SHAPES, Shape, route
from elasticmoe.kernels.fetch import Masters
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.units import ExpertKey

SHAPE = SHAPES["qwen3-30b"]
NUM_DISTINCT = 8
MAX_REQUESTS = 256
"""As `bench.kernel.shapes` routes: so many requests, a token each a step."""
STEPS = 17
"""Steps that are routed; all but the last make the ranking, the last is timed."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Every expert of the distinct layers, with slots for the offloaded ones of several loading buffers."""

    arena: torch.Tensor
    """[pages, f * d] bf16."""
    tables: torch.Tensor
    """[L, N, 3] int32: each expert in pages of its own."""
    buffers: torch.Tensor
    """[buffers, S, 3] int32."""
    pool: HostPool

    @property
    def storage(self) -> torch.Tensor:
        """The arena's bytes."""
        return self.arena.view(torch.uint8).view(-1)

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The arena as the paged MoE takes it."""
        return self.arena.view(-1, SHAPE.f, SHAPE.d), self.arena.view(-1, SHAPE.d, SHAPE.f)

    def masters(self, layer: int) -> Masters:
        """Where a layer's experts lie on the host."""
        first = self.pool.matrices(ExpertKey(layer % len(self.tables), 0))[0]
        return Masters(first.data_ptr(), self.pool.layout.matrix_bytes)


def make_experts(num_slots: int, num_buffers: int, num_distinct: int = NUM_DISTINCT) -> Experts:
    """Random weights in shuffled pages, and the same bytes on the host."""
    gen = torch.Generator("cuda").manual_seed(0)
    layout = HostLayout(num_distinct, SHAPE.num_experts, SHAPE.f, SHAPE.d, 2)
    num_own, num_loading = 3 * num_distinct * SHAPE.num_experts, 3 * num_buffers * num_slots
    arena = torch.empty((num_own + num_loading, SHAPE.f * SHAPE.d), dtype=torch.bfloat16, device="cuda")
    for page in arena:
        page.normal_(0, 0.02, generator=gen)
    pages = torch.randperm(num_own + num_loading, generator=gen, device="cuda").int()
    tables = pages[:num_own].view(num_distinct, SHAPE.num_experts, 3)
    pool = HostPool(layout, torch.bfloat16)
    pool.pin()
    if not pool.is_pinned:
        raise SystemExit("the host pool could not be pinned; raise `ulimit -l`")
    for layer, table in enumerate(tables.tolist()):
        for expert, row in enumerate(table):
            for page, master in zip(row, pool.matrices(ExpertKey(layer, expert)), strict=True):
                master.copy_(arena[page].view(torch.uint8), non_blocking=True)
    torch.cuda.synchronize()
    return Experts(arena, tables, pages[num_own:].view(num_buffers, num_slots, 3), pool)


@dataclass(frozen=True, slots=True)
class Routed:
    """What one layer is asked for in the step that is timed."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    """[T, K] int32."""
    resident: torch.Tensor
    """[N] bool: all but the experts that were routed to least before."""

    @property
    def num_needed(self) -> int:
        """Experts that are routed to and not resident."""
        return int((~self.resident)[self.topk_ids.unique().long()].sum())


def route_layer(batch: int, layer: int, num_offloaded: int, *, skewed: bool, shape: Shape = SHAPE) -> Routed:
    """The last step's routing of `batch` of the requests; residency by the ranking of all steps before, of all."""
    weights, ids = route(shape, MAX_REQUESTS * STEPS, skewed=skewed, seed=layer)
    by_step = ids.view(MAX_REQUESTS, STEPS, shape.top_k)
    counts = by_step[:, :-1].flatten().bincount(minlength=shape.num_experts)
    resident = torch.ones(shape.num_experts, dtype=torch.bool, device=ids.device)
    resident[counts.argsort(stable=True)[:num_offloaded]] = False
    last = weights.view(MAX_REQUESTS, STEPS, shape.top_k)[:batch, -1]
    return Routed(last.contiguous(), by_step[:batch, -1].contiguous(), resident)
