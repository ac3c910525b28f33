"""What a command is told to serve: a checkpoint's folder, judged before vLLM starts, or what vLLM fetches by itself."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from elasticmoe.runtime.coordinator.checkpoint import read_shape
from elasticmoe.runtime.errors import ConfigError

_FETCHED: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?|\w+://.+")
"""A hub's id, such as Qwen/Qwen3-30B-A3B, or an address."""
_OTHER_CONFIG: Final = ("--config", "--config-format", "--hf-config-path", "--hf-overrides")
"""vLLM's flags that may put something else in the place of what config.json says."""


def refuse_model(model: str, flags: Sequence[str]) -> None:
    """Raise if `model` is a path to no folder, or to one whose config.json is none of a model that is paged.

    ConfigError, CheckpointError or UnsupportedError. A hub's id passes, unless there is such a folder; so does what
    config.json says where vLLM's `flags` may replace it.
    """
    folder = Path(model)
    if not folder.exists() and _FETCHED.fullmatch(model):
        return
    if not model or not folder.is_dir():
        there = "that is a file" if model and folder.exists() else "there is no such folder"
        wanted = "want the folder of a checkpoint or a hub's id such as Qwen/Qwen3-30B-A3B"
        raise ConfigError(f"model {model!r}: {wanted}, {there}; name another")
    if not any(re.split(r"[.=]", word, maxsplit=1)[0] in _OTHER_CONFIG for word in flags):
        read_shape(folder)
