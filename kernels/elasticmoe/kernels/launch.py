"""Runs the paged MoE: checks, workspace and grids. Entered by `paged_moe`, or `compute` if the checks were made.

Everything is laid out from shapes alone: no sync, no size that depends on data, so calls can be captured in CUDA
graphs and the table rewritten between replays.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from elasticmoe.kernels.align import Alignment, align, align_width
from elasticmoe.kernels.config import Config, Gemm, Shape, config_for
from elasticmoe.kernels.few_pairs import down_few_kernel, gate_up_few_kernel
from elasticmoe.kernels.launcher import Launcher, ceil_div
from elasticmoe.kernels.paged_moe import down_kernel, gate_up_kernel, sum_kernel

SUM_BLOCK = 1024
TMA_ALIGNMENT = 16
"""Bytes that the hardware wants a descriptor's address and strides to be multiples of."""
HOPPER = (9, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FEW_TOKENS = 4
"""A batch up to this is best fetched for in line: the kernels that measured configs take there would wait anyway."""
STEPS_PER_DOUBLING = 16
"""How finely batch sizes are looked at for other kernels."""

_launch_gate_up_few, _launch_down_few = Launcher(gate_up_few_kernel), Launcher(down_few_kernel)
_launch_gate_up, _launch_down, _launch_sum = Launcher(gate_up_kernel), Launcher(down_kernel), Launcher(sum_kernel)

Part = Literal["all", "resident", "late"]
"""Which blocks a launch computes, as `paged_moe`'s kernels name them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The operands of one call, as `reference.paged_moe` names them."""

    hidden: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    up_pages: torch.Tensor
    down_pages: torch.Tensor
    table: torch.Tensor
    num_tokens: torch.Tensor | None = None
    """[1] int32: the tokens that are real; those from there on pad the batch. None: all are."""

    @property
    def is_supported(self) -> bool:
        """Whether the kernels take these operands: types and layouts, and two views of one arena that agree."""
        f, d = self.up_pages.shape[1:]
        return (
            self.hidden.dtype in DTYPES
            and self.hidden.dtype == self.up_pages.dtype == self.down_pages.dtype
            and self.topk_ids.dtype == self.table.dtype == torch.int32
            and self.topk_weights.dtype == torch.float32
            and self.hidden.shape[1] == d
            and self.up_pages.stride()[1:] == (d, 1)
            and self.down_pages.shape[1:] == (d, f)
            and self.down_pages.stride() == (self.up_pages.stride(0), f, 1)
            and self.hidden.is_contiguous()
            and self.topk_weights.is_contiguous()
            and self.topk_ids.is_contiguous()
            and self.table.is_contiguous()
            and (self.num_tokens is None or self.num_tokens.dtype == torch.int32)
        )


@dataclass(frozen=True, slots=True)
class Late:
    """Experts whose pages are still being filled when the computation starts; `table` names those pages already."""

    resident: torch.Tensor
    """[N] bool, contiguous, on the device: the pages of an expert that isn't are read only after `wait`."""
    wait: Callable[[], None] | None
    """Orders whatever is launched next on this stream after the copies; called once.

    None: every expert is known to be resident, and nothing is launched for others.
    """

    def join(self) -> None:
        """Have whatever is launched next on this stream read all pages."""
        if self.wait is not None:
            self.wait()

    def is_supported(self, table: torch.Tensor) -> bool:
        """Whether `align` can sort the experts of this table by it."""
        return (
            self.resident.dtype == torch.bool
            and self.resident.shape == table.shape[:1]
            and self.resident.is_contiguous()
            and self.resident.device == table.device
        )


def paged_moe(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    up_pages: torch.Tensor,
    down_pages: torch.Tensor,
    table: torch.Tensor,
    config: Config | None = None,
    late: Late | None = None,
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts' output [T, d]; as the reference, and a pair with expert id -1 adds nothing.

    Nor do the pairs of tokens from `num_tokens` [1] int32 on, whose outputs are zeros where their weights are finite:
    what pads a batch reads no page, nor does it change how others' rows are grouped, so it changes no bit of theirs.

    With `late`, the other experts are computed while its copies run, and no bit of the result depends on which it
    names; a batch too small to be sorted waits first.
    """
    batch = Batch(hidden, topk_weights, topk_ids, up_pages, down_pages, table, num_tokens)
    assert batch.is_supported, f"hidden {hidden.dtype} {hidden.shape}, pages {up_pages.shape}, ids {topk_ids.dtype}"
    return compute(batch, late, config)


def compute(batch: Batch, late: Late | None = None, config: Config | None = None) -> torch.Tensor:
    """`paged_moe` of a batch that is known to be supported."""
    assert late is None or late.is_supported(batch.table), f"resident {late.resident.dtype} {late.resident.shape}"
    if not batch.topk_ids.numel():
        if late is not None:
            late.join()
        return torch.zeros_like(batch.hidden)
    chosen = config or choose(batch)
    return _few(batch, chosen, late) if chosen.block_m == 1 else _grouped(batch, chosen, late)


def choose(batch: Batch) -> Config:
    """The config for these shapes on this device: measured, or else safe."""
    (tokens, top_k), num_experts = batch.topk_ids.shape, batch.table.shape[0]
    _, f, d = batch.up_pages.shape
    device = batch.hidden.device
    shape = Shape(num_experts, top_k, f, d, batch.hidden.dtype)
    return config_for(_device_name(device), shape, tokens, is_hopper=_capability(device) == HOPPER)


def warm_sizes(shape: Shape, device: torch.device, most: int) -> list[int]:
    """Numbers of tokens that together launch every kernel which a batch of 1 to `most` tokens can launch.

    Batches of up to FEW_TOKENS are taken to be computed whole, larger ones in parts, with `late`.
    """

    def kernels(tokens: int) -> tuple[Config, int, bool]:
        config = config_for(_device_name(device), shape, tokens, is_hopper=_capability(device) == HOPPER)
        return config, align_width(tokens * shape.top_k), tokens <= FEW_TOKENS

    grid = sorted({min(round(2 ** (step / STEPS_PER_DOUBLING)), most) for step in range(STEPS_PER_DOUBLING * 24)})
    return list({kernels(tokens): tokens for tokens in reversed(grid)}.values())[::-1]


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).replace(" ", "_") if device.type == "cuda" else device.type


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _can_tma(batch: Batch) -> bool:
    """Whether the hardware, or Triton's interpreter, can address the arena by descriptor: strides must suit it."""
    pages = batch.up_pages
    sizes = *pages.shape[1:], pages.stride(0), pages.storage_offset()
    return _suits_tma(batch.hidden.device, pages.dtype.itemsize, sizes)


@functools.cache
def _suits_tma(device: torch.device, itemsize: int, sizes: tuple[int, ...]) -> bool:
    return (device.type == "cpu" or _capability(device) >= HOPPER) and all(
        size * itemsize % TMA_ALIGNMENT == 0 for size in sizes
    )


def _few(batch: Batch, config: Config, late: Late | None) -> torch.Tensor:
    """Two launches, a pair at a time; the first of them starts when everything before it has ended."""
    if late is not None:
        late.join()
    (tokens, top_k), (_, f, d) = batch.topk_ids.shape, batch.up_pages.shape
    act = torch.empty((tokens * top_k, f), dtype=batch.hidden.dtype, device=batch.hidden.device)
    out = torch.empty_like(batch.hidden)
    page, first, second = batch.up_pages.stride(0), config.gate_up, config.down
    _launch_gate_up_few(
        (tokens * top_k, ceil_div(f, first.block_n)),
        batch.hidden, batch.up_pages, act, batch.table, batch.topk_ids, batch.num_tokens, page, top_k, f, d,
        first.block_n, first.block_k, config.pdl, num_warps=first.num_warps,
    )  # fmt: skip
    _launch_down_few(
        (tokens, ceil_div(d, second.block_n)),
        act, batch.down_pages, batch.topk_weights, out, batch.table, batch.topk_ids, batch.num_tokens,
        page, top_k, d, f,
        second.block_n, second.block_k, config.pdl, num_warps=second.num_warps, **_after(config),
    )  # fmt: skip
    return out


def _grouped(batch: Batch, config: Config, late: Late | None) -> torch.Tensor:
    """Align, two GEMMs, two more for what is late, and the weighted sum."""
    (tokens, top_k), (_, f, d) = batch.topk_ids.shape, batch.up_pages.shape
    dtype, device = batch.hidden.dtype, batch.hidden.device
    resident = None if late is None else late.resident
    order = align(
        batch.topk_ids, batch.table, config.block_m, pdl=config.pdl, resident=resident, num_tokens=batch.num_tokens
    )
    slots = order.sorted_token_ids.shape[0]
    act = torch.empty((slots, f), dtype=dtype, device=device)
    products = torch.empty((slots, d), dtype=dtype, device=device)
    out = torch.empty_like(batch.hidden)
    first: Part = "all" if late is None else "resident"
    gate_up(batch, config, order, act, first)
    down(batch, config, order, act, products, first)
    if late is not None and late.wait is not None:
        late.wait()
        gate_up(batch, config, order, act, "late")
        down(batch, config, order, act, products, "late")
    _launch_sum(
        (tokens, ceil_div(d, SUM_BLOCK)),
        products, batch.topk_weights, order.slots, out, top_k, d, SUM_BLOCK, config.pdl, num_warps=4, **_after(config),
    )  # fmt: skip
    return out


def gate_up(batch: Batch, config: Config, order: Alignment, act: torch.Tensor, part: Part = "all") -> None:
    """Fill the rows of `act` [slots, f] of a part; rows that pad a block are left as they were.

    The late part follows another stream too, so it doesn't start while the kernel before it ends.
    """
    gemm, (_, f, d), (tokens, top_k) = config.gate_up, batch.up_pages.shape, batch.topk_ids.shape
    blocks, tma = order.block_pages.shape[0], gemm.tma and _can_tma(batch)
    tiles = blocks * ceil_div(f, gemm.block_n)
    _launch_gate_up(
        (min(tiles, _num_sms(act.device)) if part == "late" else tiles,),
        batch.hidden, batch.up_pages, _pages_desc(batch.up_pages, gemm) if tma else None, act,
        order.sorted_token_ids, order.block_pages, None if part == "all" else order.num_blocks, tokens * top_k, blocks,
        batch.up_pages.stride(0), top_k, f, d, config.block_m, gemm.block_n, gemm.block_k, gemm.group_m, gemm.halvings,
        tma, gemm.swap, config.pdl, part,
        num_warps=gemm.num_warps, num_stages=gemm.num_stages, **({} if part == "late" else _after(config)),
    )  # fmt: skip


def down(
    batch: Batch, config: Config, order: Alignment, act: torch.Tensor, products: torch.Tensor, part: Part = "all"
) -> None:
    """Fill the rows of `products` [slots, d] of a part from `act` [slots, f]; as `gate_up` otherwise."""
    gemm, (_, f, d), pairs = config.down, batch.up_pages.shape, order.slots.numel()
    blocks, tma = order.block_pages.shape[0], gemm.tma and _can_tma(batch)
    tiles, persistent = blocks * ceil_div(d, gemm.block_n), tma and gemm.persistent
    _launch_down(
        (min(tiles, _num_sms(act.device)) if persistent or part == "late" else tiles,),
        act, TensorDescriptor.from_tensor(act, [config.block_m, gemm.block_k]) if persistent else None,
        batch.down_pages, _pages_desc(batch.down_pages, gemm) if tma else None, products,
        order.sorted_token_ids, order.block_pages, order.num_blocks, pairs, blocks, batch.up_pages.stride(0), d, f,
        config.block_m, gemm.block_n, gemm.block_k, gemm.group_m, gemm.halvings, tma, persistent, gemm.swap, config.pdl,
        part, num_warps=gemm.num_warps, num_stages=gemm.num_stages, **_after(config),
    )  # fmt: skip


def _pages_desc(pages: torch.Tensor, gemm: Gemm) -> TensorDescriptor:
    """The whole arena: a box of BLOCK_N rows and BLOCK_K columns of one page."""
    return TensorDescriptor.from_tensor(pages, [1, gemm.block_n, gemm.block_k])


def _after(config: Config) -> dict[str, bool]:
    """The launch option that lets a kernel start while the one before it ends."""
    return {"launch_pdl": True} if config.pdl else {}
