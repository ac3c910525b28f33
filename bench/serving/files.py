"""The files of a bench's command line, read with what was wanted of them, and its faults as one sentence."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.serving.errors import BadScenario, BenchError
from elasticmoe.runtime.errors import ElasticMoEError


def read_text(path: Path) -> str:
    """Return a file's text; raises BadScenario that names a file which can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadScenario(f"{path}: want a text file, it can't be read ({error}); name another") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that a text is; raises BadScenario that tells where it is from."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadScenario(f"{where}: want a JSON object, it can't be read ({error})") from error
    if not isinstance(found, dict):
        raise BadScenario(f"{where}: want a JSON object, it is a {type(found).__name__}")
    return found


def read_part(path: Path, key: str, kind: type) -> Any:  # what JSON holds
    """Return what a file's JSON object has for a key; raises BadScenario if that is missing or of another kind."""
    return take_part(parse_object(read_text(path), str(path)), key, kind, str(path))


def take_part(result: dict[str, Any], key: str, kind: type, where: str) -> Any:  # what JSON holds
    """Return what a result that was read has for a key; raises as `read_part`."""
    found = result.get(key)
    if not isinstance(found, kind):
        raise BadScenario(f"{where}: want a result with {key!r} in it, there is none; name a result's file")
    return found


def end_in_a_sentence(main: Callable[[], int]) -> int:
    """Return the exit status of a bench's `main`; a fault of its input or output is one sentence on stderr."""
    try:
        status = main()
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (BenchError, ElasticMoEError, OSError) as error:
        print(f"The bench failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("The bench was interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status
