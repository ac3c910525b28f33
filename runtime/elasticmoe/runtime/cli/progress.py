"""How far a command is, on stderr: a bar that is redrawn on a terminal, elsewhere a line for each thing that begins."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

BAR = 24
"""Characters of a full bar."""
CLEAR = "\r\x1b[K"


class Progress:
    """Tells of one command."""

    def __init__(self, command: str, stream: TextIO) -> None:
        """Write to `stream`."""
        self._command = command
        self._stream = stream
        self._is_terminal = stream.isatty()

    def begin(self, what: str, done: float) -> None:
        """Tell what begins now, and the share of the work that is done."""
        if not self._is_terminal:
            print(f"{self._command}: {what} …", file=self._stream, flush=True)
            return
        full = "#" * round(BAR * done)
        line = f"{self._command} [{full:{BAR}}] {done:4.0%} {what}"
        self._stream.write(CLEAR + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def clear(self) -> None:
        """Take the bar away, so that whatever is printed next stands alone."""
        if self._is_terminal:
            self._stream.write(CLEAR)
            self._stream.flush()


@contextmanager
def progress(command: str) -> Iterator[Progress]:
    """Tell on stderr, and leave no bar behind, not even when something fails."""
    shown = Progress(command, sys.stderr)
    try:
        yield shown
    finally:
        shown.clear()
