"""A pool filled from a real checkpoint holds its matrices, in any slice and dtype, and each byte is read once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from elasticmoe.runtime.coordinator.checkpoint import TensorPlace, read_places, read_shape
from elasticmoe.runtime.coordinator.loader import PROJECTIONS, fill, plan_reads
from elasticmoe.runtime.errors import CheckpointError
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId, plan_manifest
from elasticmoe.runtime.units import ExpertKey

NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


def _manifest(model: Path, dtype: str = "float32", tp: int = 1, rank: int = 0) -> Manifest:
    return plan_manifest(PoolId(str(model), "", dtype, tp, rank), read_shape(model))


def _load(model: Path, manifest: Manifest) -> tuple[torch.Tensor, int]:
    """Return a filled pool, uint8, and the bytes that were read for it."""
    memory = np.zeros(manifest.layout.pool_bytes, np.uint8)
    counted: list[int] = []
    fill(memory, plan_reads(manifest, read_shape(model), read_places(model)), manifest.pool.dtype, counted.append)
    return torch.from_numpy(memory), sum(counted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_every_matrix_is_in_its_place(tiny: Path, dtype: str, tp: int, rank: int) -> None:
    """Rows of W1 and W3, columns of W2, as torch converts them; no part of the pool is left over."""
    manifest, shape = _manifest(tiny, dtype, tp, rank), read_shape(tiny)
    pool, _ = _load(tiny, manifest)
    tensors, layout = load_file(next(tiny.glob("*.safetensors"))), manifest.layout
    part = slice(rank * layout.rows, (rank + 1) * layout.rows)
    for number, layer in enumerate(shape.moe_layers):
        for expert in range(shape.num_experts):
            for matrix, projection in enumerate(PROJECTIONS):
                whole = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"]
                want = (whole[:, part] if projection == "down_proj" else whole[part]).to(getattr(torch, dtype))
                start = layout.offset(ExpertKey(number, expert), matrix)
                have = pool[start : start + layout.matrix_bytes].view(want.dtype).view(want.shape)
                assert torch.equal(have, want)


def test_each_tensor_is_read_once(tiny: Path) -> None:
    """Unsliced, the bytes read are those of the experts in the checkpoint, whatever the pool's dtype."""
    wanted = sum(place.end - place.start for name, place in read_places(tiny).items() if ".experts." in name)
    assert _load(tiny, _manifest(tiny))[1] == wanted
    assert _load(tiny, _manifest(tiny, "bfloat16"))[1] == wanted


def test_a_slice_reads_its_rows_alone(tiny: Path) -> None:
    """A half reads half of W1 and W3, and all of W2, whose columns lie apart."""
    whole = _load(tiny, _manifest(tiny))[1]
    assert _load(tiny, _manifest(tiny, tp=2))[1] == whole * 2 // 3


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    """Before anything is read, with how many are missing."""
    places = read_places(tiny)
    del places[NAME]
    with pytest.raises(CheckpointError, match=rf"the checkpoint lacks {NAME} \(1 of \d+ matrices are missing\)"):
        plan_reads(_manifest(tiny), read_shape(tiny), places)


@pytest.mark.parametrize("change", [{"shape": (3, 5)}, {"dtype": "F8_E4M3"}])
def test_a_tensor_of_another_shape_or_dtype_is_named(tiny: Path, change: dict[str, object]) -> None:
    """What config.json says is what must be there."""
    places = read_places(tiny)
    fields = {name: getattr(places[NAME], name) for name in TensorPlace.__slots__}
    places[NAME] = TensorPlace(**{**fields, **change})
    with pytest.raises(CheckpointError, match=rf"^{NAME} is .* as config\.json says"):
        plan_reads(_manifest(tiny), read_shape(tiny), places)


@pytest.mark.parametrize("broken", ["short", "gone"])
def test_a_file_that_changes_while_it_is_read_is_named(tiny: Path, tmp_path: Path, broken: str) -> None:
    """It ends early or is no longer there."""
    manifest, places = _manifest(tiny), read_places(tiny)
    path = tmp_path / "model.safetensors"
    if broken == "short":
        path.write_bytes(b"x" * 100)
    reads = plan_reads(manifest, read_shape(tiny), {name: replace(p, path=path) for name, p in places.items()})
    message = r"model\.safetensors ended \d+ bytes early" if broken == "short" else r"model\.safetensors can't be read"
    with pytest.raises(CheckpointError, match=message):
        fill(np.zeros(manifest.layout.pool_bytes, np.uint8), reads, "float32", lambda _: None)
