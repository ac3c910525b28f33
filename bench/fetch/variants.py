"""Other ways to read experts over the bus than the fetch kernel's: each copies the same pages, and only that.

`copies.variant_rows` runs this file in a process of its own. What wins would take the place of the fetch kernel's
`_copy`. A program copies every `num_programs`-th chunk of all matrices, or as a strip as many that follow each other.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.fetch.copies import gb_s_of
from bench.fetch.setup import Experts, make_experts
from bench.fetch.variant_kernels import AHEAD, BULK, BULK_STAGE_BYTES, READ, by_box, by_bulk, by_words
from elasticmoe.kernels.fetch import MAX_BLOCKS
from elasticmoe.runtime.units import ExpertKey

NUM_SLOTS = 64
"""Experts that are copied."""


@dataclass(frozen=True, slots=True)
class Words:
    """Loads and stores by threads; texts as Triton takes them, or PTX."""

    chunk_bytes: int = 32768
    num_warps: int = 8
    load: str = ""
    load_keep: str = ""
    store: str = ""
    store_keep: str = ""
    asm: str = ""
    ahead: str = ""
    is_strip: bool = False

    def launch(self, copy: "Copy") -> None:
        """Copy all of it."""
        by_words[(MAX_BLOCKS,)](
            copy.table, copy.storage, copy.address, copy.matrix_bytes, copy.table.numel(), copy.matrix_bytes,
            self.chunk_bytes, self.load, self.load_keep, self.store, self.store_keep, self.asm, self.ahead,
            self.is_strip, num_warps=self.num_warps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Box:
    """Tensor descriptors over host and arena."""

    rows: int
    cols: int
    stages: int = 3

    def launch(self, copy: "Copy") -> None:
        """Copy all of it."""
        src, dst = (
            TensorDescriptor.from_tensor(flat.view(torch.int64).view(-1, self.cols), [self.rows, self.cols])
            for flat in (copy.host, copy.storage)
        )
        by_box[(MAX_BLOCKS,)](
            copy.table, src, dst, copy.matrix_bytes // (self.cols * 8), copy.table.numel(), copy.matrix_bytes,
            self.rows, self.cols, self.stages, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bulk:
    """One thread a block, and no registers."""

    span_bytes: int

    def launch(self, copy: "Copy") -> None:
        """Copy all of it."""
        by_bulk[(MAX_BLOCKS,)](
            copy.table, copy.storage, copy.address, copy.matrix_bytes, copy.table.numel(), copy.matrix_bytes,
            self.span_bytes, BULK_STAGE_BYTES, BULK, num_warps=1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copy:
    """What is copied: the matrices at `address`, one after the other, each to its page."""

    table: torch.Tensor
    """[matrices] int32 pages; page p starts at p * E."""
    host: torch.Tensor
    """uint8, pinned."""
    storage: torch.Tensor
    """uint8, the arena's bytes."""
    matrix_bytes: int

    @property
    def address(self) -> int:
        """Of the first matrix."""
        return int(self.host.data_ptr())


VARIANTS: dict[str, Words | Box | Bulk] = {
    "plain": Words(),
    "light": Words(32768, 4),
    "wide 16": Words(131072, 16),
    "wide 32": Words(131072, 32),
    "load .cg": Words(load=".cg"),
    "load evict_first": Words(load_keep="evict_first"),
    "store .cs": Words(store=".cs"),
    "store .wt": Words(store=".wt"),
    "store evict_first": Words(store_keep="evict_first"),
    "both evict_first": Words(load_keep="evict_first", store_keep="evict_first"),
    "strip": Words(is_strip=True),
    "strip light": Words(32768, 4, is_strip=True),
    "l2 256": Words(asm=READ),
    "l2 256 strip": Words(asm=READ, is_strip=True),
    "l2 ahead": Words(ahead=AHEAD),
    "box 16 x 256": Box(16, 256),
    "box 256 x 16": Box(256, 16),
    "bulk 384 KiB": Bulk(3 * 2**17),
    "bulk 96 KiB": Bulk(3 * 2**15),
}
"""By name; what might take the device down comes last."""


def rows(experts: Experts) -> Iterator[dict[str, Any]]:
    """Rows of {variant, gb_s}, or {variant, error}: of a loading buffer full of experts; checks the bytes."""
    num, size = experts.buffers[0].numel(), experts.pool.layout.matrix_bytes
    first = experts.pool.matrices(ExpertKey(0, 0))[0]
    host = first.as_strided((num * size,), (1,), first.storage_offset())
    copy = Copy(experts.buffers[0].flatten().contiguous(), host, experts.storage, size)
    own = experts.tables[0].flatten()[:num].long()
    for name, variant in VARIANTS.items():
        experts.arena[copy.table.long()] = 0
        try:
            gb_s = gb_s_of(num * size, partial(variant.launch, copy))
        except Exception as error:  # noqa: BLE001  # whatever a compiler or driver doesn't like; the next one may do
            yield {"variant": name, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        if torch.equal(experts.arena[copy.table.long()], experts.arena[own]):
            yield {"variant": name, "gb_s": gb_s}
        else:
            yield {"variant": name, "error": "wrong bytes"}


def main() -> None:
    """Print each row as JSON."""
    for row in rows(make_experts(NUM_SLOTS, 1, 1)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
