"""Where each tensor lies in a checkpoint's safetensors files, and the shape of its experts from config.json.

Reads headers only: 8 bytes of length, that many bytes of JSON, then the data.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticmoe.runtime.contract.model import ModelShape, parse_model_shape
from elasticmoe.runtime.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100 * 10**6
"""What the safetensors library allows."""
_LENGTH: Final = struct.Struct("<Q")
INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a checkpoint: its file, dtype (in safetensors' words), shape, and bytes [start, end)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_shape(folder: Path) -> ModelShape:
    """Return the sizes of the checkpoint's experts; raises CheckpointError or UnsupportedError."""
    config = _read_json(folder / "config.json")
    return parse_model_shape(config.get("architectures") or (), config)


def read_places(folder: Path) -> dict[str, TensorPlace]:
    """Return the place of every tensor by name; raises CheckpointError if there is none, or a file is damaged."""
    places: dict[str, TensorPlace] = {}
    for path in _list_files(folder):
        try:
            places |= parse_header(_read_header(path), path, path.stat().st_size)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read ({error}); fetch the checkpoint anew") from error
    return places


def _read_header(path: Path) -> bytes:
    """Return a file's header without its length, nothing if there is none."""
    with path.open("rb") as file:
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        return file.read(length) if length <= MAX_HEADER_BYTES else b""


def parse_header(raw: bytes, path: Path, file_bytes: int) -> dict[str, TensorPlace]:
    """Return the places that a file's header names; raises CheckpointError if it is no header or the file too short."""
    try:
        header = json.loads(raw)
        data = _LENGTH.size + len(raw)
        places = {name: _parse_place(entry, path, data) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{path} is no safetensors file: its header can't be read; fetch it anew"
        raise CheckpointError(message) from error
    end = max((place.end for place in places.values()), default=0)
    if end > file_bytes:
        message = f"{path} is cut short: its header speaks of {end} bytes, it has {file_bytes}; fetch it anew"
        raise CheckpointError(message)
    return places


def _parse_place(entry: Mapping[str, Any], path: Path, data: int) -> TensorPlace:
    start, end = entry["data_offsets"]
    return TensorPlace(path, str(entry["dtype"]), tuple(map(int, entry["shape"])), data + int(start), data + int(end))


def _list_files(folder: Path) -> list[Path]:
    """Return the files that the index names, all safetensors files where there is no index."""
    index = folder / INDEX
    if index.exists():
        try:
            return sorted(folder / name for name in set(_read_json(index)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            message = f"{index} names no files: want a weight_map in it; fetch the checkpoint anew"
            raise CheckpointError(message) from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        message = f"want a checkpoint of safetensors files in {folder}, there is none; give --model a folder with one"
        raise CheckpointError(message)
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} can't be read ({error}); name the folder of a whole checkpoint"
        raise CheckpointError(message) from error
    if not isinstance(found, dict):
        message = f"{path}: want a JSON object, it is a {type(found).__name__}; name the folder of a whole checkpoint"
        raise CheckpointError(message)
    return found
