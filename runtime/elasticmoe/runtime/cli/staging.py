"""Files and folders that are written whole or not at all, beside their place first. Called by the commands that write.

A command that is ended tidies up; one that is killed can't: what it left is removed by the next that writes there.
"""

import fcntl
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from elasticmoe.runtime.errors import ConfigError

_PREFIX: Final = ".writing-"
_OURS: Final = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")  # as tempfile names it
_ENDS: Final = (signal.SIGTERM, signal.SIGINT)


def write_whole(path: Path, text: str) -> None:
    """Write a text in the place of what is there, which stays if this fails or is interrupted."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device or a pipe; a folder is refused
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def filled_whole(target: Path, last: str) -> Iterator[Path]:
    """Yield a folder whose files go into the folder `target` once all are there, the one named `last` after the others.

    An error, SIGTERM or Ctrl-C before that leaves `target` as it was. Raises ConfigError if it can't be a folder, or
    while another process fills it. To be entered by the main thread: only there are signals heard.
    """
    is_new = not target.exists()

    def tidy() -> None:
        _remove_leftovers(target)
        if is_new:
            with suppress(OSError):  # it is filled
                target.rmdir()

    _make(target)
    with _locked(target), _tidied(tidy):
        _remove_leftovers(target)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target))
        yield folder
        with _undisturbed():
            for file in sorted(folder.iterdir(), key=lambda one: one.name == last):
                file.replace(target / file.name)


def is_leftover(path: Path) -> bool:
    """Return whether a path is what a killed process left of a folder that it was to fill."""
    return bool(_OURS.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def _remove_leftovers(target: Path) -> None:
    for left in filter(is_leftover, target.iterdir()):
        shutil.rmtree(left, ignore_errors=True)


def refuse_no_folder(target: Path) -> None:
    """Raise ConfigError if `target` can't be made a folder: asked before the work whose result goes there."""
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise _no_folder(target, f"{there} is {'read-only' if there.is_dir() else 'a file'}")


def _make(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(target, str(error.strerror)) from error


def _no_folder(target: Path, why: str) -> ConfigError:
    return ConfigError(f"need a folder to write the model into, {target} can't be one ({why}): name another path")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    descriptor = os.open(target, os.O_RDONLY)
    try:
        _lock(descriptor, target)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"need {target} alone, another process is writing a model into it: wait for it, or name another path"
        raise ConfigError(message) from error


@contextmanager
def _tidied(tidy: Callable[[], None]) -> Iterator[None]:
    """Have `tidy` called afterwards, and before SIGTERM ends the process."""

    def end(number: int, _: FrameType | None) -> None:
        tidy()
        os._exit(128 + number)  # an exception could be swallowed by a library

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        with _undisturbed():
            tidy()
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore what would end the process in the middle of a short thing, after which it ends or goes on by itself."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
