"""Checkpoints with something wrong."""

from pathlib import Path


def drop_tensor(model: Path, name: str) -> None:
    """Write a checkpoint's file anew without one tensor."""
    from safetensors.torch import load_file, save_file

    path = next(model.glob("*.safetensors"))
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
