"""Where tensors lie in safetensors files."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file

from elasticmoe.runtime.coordinator.checkpoint import parse_header, read_places, read_shape
from elasticmoe.runtime.errors import CheckpointError, UnsupportedError


def test_every_tensor_is_where_the_library_finds_it(tiny: Path) -> None:
    """Names, shapes and bytes are those that safetensors itself reads."""
    places = read_places(tiny)
    tensors = load_file(next(tiny.glob("*.safetensors")))
    assert places.keys() == tensors.keys()
    for name, place in list(places.items())[::29]:
        with place.path.open("rb") as file:
            file.seek(place.start)
            raw = file.read(place.end - place.start)
        assert raw == tensors[name].numpy().tobytes()
        assert place.shape == tuple(tensors[name].shape)
        assert place.dtype == "F32"


def test_an_index_says_which_files_count(tiny: Path, tmp_path: Path) -> None:
    """Files that it does not name are another checkpoint's."""
    for name in ("model-1.safetensors", "consolidated.safetensors"):
        shutil.copy(next(tiny.glob("*.safetensors")), tmp_path / name)
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {place.path.name for place in read_places(tmp_path).values()} == {"model-1.safetensors"}


def test_an_index_without_files_is_refused(tmp_path: Path) -> None:
    """No weight_map, or one of files that are not there: named."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json names no files"):
        read_places(tmp_path)
    index.write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors can't be read"):
        read_places(tmp_path)


def test_the_shape_comes_from_config_json(tiny: Path, tmp_path: Path) -> None:
    """As the engine's does; a folder without one, or of another model, is refused."""
    assert read_shape(tiny).num_experts > 1
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json can't be read"):
        read_shape(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json can't be read .* name the folder of a whole checkpoint"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: want a JSON object, it is a list"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"architecture \(none\) is not one that elasticmoe pages"):
        read_shape(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Its name is in the message."""
    with pytest.raises(CheckpointError, match=f"want a checkpoint of safetensors files in {tmp_path}"):
        read_places(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 4) + b"[[[[",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"version https://",
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    """Empty, cut, of an impossible length, or a pointer to a file in its place."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file"):
        read_places(tmp_path)


@pytest.mark.parametrize(
    "header", [[1], {"w": 3}, {"w": {"dtype": "F32", "shape": [2]}}, {"w": {"data_offsets": [0, 8]}}]
)
def test_a_header_without_the_fields_is_refused(header: object) -> None:
    """Each tensor has dtype, shape and offsets."""
    with pytest.raises(CheckpointError, match="its header can't be read"):
        parse_header(json.dumps(header).encode(), Path("model.safetensors"), 100)


def test_a_file_that_is_cut_short_is_named_with_both_sizes() -> None:
    """An interrupted download is found before anything is read."""
    raw = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    want = 8 + len(raw) + 8
    assert parse_header(raw, Path("m"), want)["w"].end == want
    with pytest.raises(CheckpointError, match=rf"m is cut short: its header speaks of {want} bytes, it has {want - 1}"):
        parse_header(raw, Path("m"), want - 1)
