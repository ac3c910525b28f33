"""How every process of the command tells a fault of the user's: one sentence on stderr, and status 2."""

import sys
from pathlib import Path
from typing import Final

from elasticmoe.runtime.errors import ConfigError

_USAGE_ERROR: Final = 2


def refuse(sentence: str) -> int:
    """Print why the command ends and return its exit status."""
    print(f"elasticmoe: {sentence}", file=sys.stderr)
    return _USAGE_ERROR


def refuse_output(flag: str, path: Path) -> None:
    """Raise ConfigError if no file can be written at `path`: asked before the work whose result goes there."""
    if path.is_dir() or not path.parent.is_dir():
        there = "that is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{flag} {path}: want a file to write, {there}; name another")
