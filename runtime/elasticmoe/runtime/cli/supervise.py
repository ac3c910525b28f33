"""Runs a server as a child and ends it in time, as an init does: a container's first process has no default signals.

vLLM's own process can't be relied on to hear SIGTERM while it starts: its main thread waits in a library, for as long
as the engine loads. A process whose main thread does nothing else hears it always.
"""

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ENV_SERVING_FD: Final = "ELASTICMOE_SERVING_FD"
"""Names the descriptor that the server writes to when it serves: from then on it ends by itself."""
_ASKED_TO_END: Final = (signal.SIGTERM, signal.SIGINT)
_HEARD: Final = {*_ASKED_TO_END, signal.SIGCHLD}
_CLEANED_WITHIN_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def hold_signals() -> None:
    """Keep signals for `supervise`, so that one that comes before it is not lost."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who starts us may ignore it, and then no child has a status
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)


def supervise(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `command` until it ends and return its exit status, 128 + n if signal n ended it.

    A server that serves is told to end by SIGTERM, whether this process got SIGTERM or SIGINT. One that still starts
    has no answers to finish, so it is killed; so is one that is told for the second time. No process that it started
    outlives it; if this one is killed itself, the server is too, and a container ends the server's own processes.
    """
    hold_signals()
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    server = subprocess.Popen([*command], env={**env, ENV_SERVING_FD: str(writer)}, pass_fds=(writer,))  # noqa: S603
    os.close(writer)
    server.returncode = _wait(server.pid, reader)  # reaped here, not by Popen
    os.close(reader)
    _kill_descendants()
    return server.returncode


def begin_supervised() -> None:
    """Say in the child that signals arrive again, and that it is to die with the one who supervises it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _is_orphaned():  # the kernel tells only of a death to come
        os.kill(os.getpid(), signal.SIGKILL)


def _is_orphaned() -> bool:
    """Return whether nobody can read any more what `tell_serving` would write."""
    descriptor = os.environ.get(ENV_SERVING_FD)
    if descriptor is None:
        return False
    pipe = select.poll()
    pipe.register(int(descriptor), 0)
    return bool(pipe.poll(0))


def tell_serving() -> None:
    """Tell the supervisor, if there is one, that this server now listens to signals itself."""
    if descriptor := os.environ.pop(ENV_SERVING_FD, None):
        os.write(int(descriptor), b"1")
        os.close(int(descriptor))


def _wait(server: int, serving: int) -> int:
    """Return the exit status of process `server`, passing on or enforcing what signals ask for."""
    is_serving = is_ending = False
    while True:
        number = signal.sigwait(_HEARD)
        if number in _ASKED_TO_END:
            is_serving = is_serving or _has_byte(serving)
            if is_ending or not is_serving:
                _kill_descendants()
                return 128 + number
            os.kill(server, signal.SIGTERM)  # SIGINT it may have from the terminal, and a second one means impatience
            is_ending = True
        elif (status := _reap().get(server)) is not None:
            return status


def _has_byte(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return False


def _reap() -> dict[int, int]:
    """Return the exit status, by process, of the children that have ended; orphans are ours too."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = 128 - code if code < 0 else code


def _kill_descendants() -> None:
    """Kill all processes below this one, at last those too that clean up after the others, which get some time first.

    Looks again until none is left: one that is being killed may have started another meanwhile.
    """
    deadline_s, is_late = time.monotonic() + _CLEANED_WITHIN_S, False
    while not is_late and (left := _descendants()):
        is_late = time.monotonic() > deadline_s
        for pid in left:
            if is_late or not _is_cleaner(pid):
                _send_kill(pid)
        time.sleep(0.02)
        _reap()
    _reap()


def _send_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_cleaner(pid: int) -> bool:
    """Return whether a process is Python's resource tracker, which unlinks shared memory once its owners are dead."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descendants() -> list[int]:
    """Return all processes below this one."""
    children: dict[int, list[int]] = {}
    for pid, parent in _all_processes():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _all_processes() -> Iterator[tuple[int, int]]:
    """Yield each process of this namespace that is not dead, with its parent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it ended meanwhile
            state, parent = stat.rpartition(")")[2].split()[:2]  # its name may hold anything
            if state != "Z":
                yield int(folder.name), int(parent)


def _control(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
