"""Fills a pool from a checkpoint: each tensor is read once, into its place, in the pool's dtype and slice.

Beside the pool it holds as many matrices as it has threads, which is less than a layer.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.coordinator.checkpoint import TensorPlace
from elasticmoe.runtime.coordinator.dtypes import SAFETENSORS_NAMES, STORED, convert
from elasticmoe.runtime.errors import CheckpointError
from elasticmoe.runtime.hostpool.at_once import at_once
from elasticmoe.runtime.hostpool.manifest import Manifest
from elasticmoe.runtime.units import MATRICES, ExpertKey

NUM_THREADS: Final = 4
PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
"""W1, W3 and W2 as checkpoints name them."""
_DOWN: Final = 2


@dataclass(frozen=True, slots=True)
class Read:
    """One matrix to read: from where, which part of it, and its offset in the pool."""

    place: TensorPlace
    start: int
    """First byte of the file."""
    rows: int
    """Rows to read."""
    cols: int
    """Columns of each."""
    kept: slice
    """Columns to keep."""
    offset: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are read."""
        return self.rows * self.cols * STORED[self.place.dtype].itemsize


def plan_reads(manifest: Manifest, shape: ModelShape, places: Mapping[str, TensorPlace]) -> list[Read]:
    """Return one read a matrix, in the pool's order; raises CheckpointError that names a tensor which is not there."""
    keys = [ExpertKey(layer, e) for layer in range(shape.num_layers) for e in range(shape.num_experts)]
    named = [(key, m, _tensor_name(shape, key, m)) for key in keys for m in range(MATRICES)]
    missing = [name for *_, name in named if name not in places]
    if missing:
        message = f"the checkpoint lacks {missing[0]} ({len(missing)} of {len(named)} matrices are missing)"
        raise CheckpointError(f"{message}; fetch it anew")
    return [_plan_read(manifest, shape, (key, m), (name, places[name])) for key, m, name in named]


def _tensor_name(shape: ModelShape, key: ExpertKey, matrix: int) -> str:
    layer = shape.moe_layers[key.layer]
    return f"model.layers.{layer}.mlp.experts.{key.expert}.{PROJECTIONS[matrix]}.weight"


def _plan_read(
    manifest: Manifest, shape: ModelShape, where: tuple[ExpertKey, int], what: tuple[str, TensorPlace]
) -> Read:
    """Return the read of one matrix: a slice of W1 and W3 is some rows, one of W2 some columns of all rows."""
    (key, matrix), (name, place) = where, what
    layout, rank = manifest.layout, manifest.pool.rank
    wanted = (shape.intermediate_size, shape.hidden_size)
    wanted = wanted[::-1] if matrix == _DOWN else wanted
    if place.shape != wanted or place.dtype not in STORED:
        message = (
            f"{name} is {place.dtype} {list(place.shape)}, want one of {', '.join(STORED)} and {list(wanted)} "
            f"as config.json says; fetch the checkpoint anew"
        )
        raise CheckpointError(message)
    offset, part = layout.offset(key, matrix), slice(rank * layout.rows, (rank + 1) * layout.rows)
    if matrix == _DOWN:
        return Read(place, place.start, shape.hidden_size, shape.intermediate_size, part, offset)
    skipped = part.start * shape.hidden_size * STORED[place.dtype].itemsize
    return Read(place, place.start + skipped, layout.rows, shape.hidden_size, slice(None), offset)


def fill(memory: np.ndarray, reads: Iterable[Read], dtype: str, count: Callable[[int], None]) -> None:
    """Do the reads into `memory`, uint8 [pool bytes], as `dtype`; `count` is told the bytes of each.

    Raises CheckpointError when a file ends early or can't be read.
    """
    target = SAFETENSORS_NAMES[dtype]
    for num_bytes in at_once(lambda read: _read_matrix(memory, read, target), reads, NUM_THREADS, "elasticmoe-load"):
        count(num_bytes)


def _read_matrix(memory: np.ndarray, read: Read, target: str) -> int:
    """Read one matrix, straight into its place where nothing is to be converted or cut off."""
    dtype, cols = STORED[target], len(range(read.cols)[read.kept])
    end = read.offset + read.rows * cols * dtype.itemsize
    values = memory[read.offset : end].view(dtype).reshape(read.rows, cols)
    if cols == read.cols and read.place.dtype == target:
        _read_into(values, read)
    else:
        stored = np.empty((read.rows, read.cols), STORED[read.place.dtype])
        _read_into(stored, read)
        values[...] = convert(stored[:, read.kept], read.place.dtype, target)
    return read.num_bytes


def _read_into(stored: np.ndarray, read: Read) -> None:
    view, done = stored.data.cast("B"), 0
    try:
        with read.place.path.open("rb", buffering=0) as file:
            while done < read.num_bytes and (got := os.preadv(file.fileno(), [view[done:]], read.start + done)):
                done += got
    except OSError as error:
        raise CheckpointError(f"{read.place.path} can't be read ({error}); see to the disk") from error
    if done < read.num_bytes:
        message = f"{read.place.path} ended {read.num_bytes - done} bytes early while it was read; leave it in place"
        raise CheckpointError(message)
