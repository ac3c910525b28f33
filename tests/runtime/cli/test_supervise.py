"""How `elasticmoe serve` ends its server: whenever it is told to, with all that the server started."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.serving.server import find_group_members
from tests.runtime.cli.first_process import FIRST_PROCESS, find_first, need_namespaces

SUPERVISE = """
import os, sys
from elasticmoe.runtime.cli.supervise import supervise
sys.exit(supervise([sys.executable, "-c", sys.argv[1]], os.environ))
"""
BEGIN = """
import os, signal, subprocess, sys, time
from elasticmoe.runtime.cli.supervise import begin_supervised, tell_serving
begin_supervised()
"""
DEAF = f"{BEGIN}signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('begun', flush=True)\n"
SLEEP = "time.sleep(600)\n"
SLEEPER = f"import time; time.sleep(600)  # for {os.getpid()}"
"""Other runs of these tests, at the same time, have sleepers of their own."""
CHILD = f"subprocess.Popen([sys.executable, '-c', '{SLEEPER}'], start_new_session=True)\n"
END_S = 60.0
"""No test measures how long an end takes: a process that is still there after this hangs."""


@contextlib.contextmanager
def supervised(script: str, *, before: Sequence[str] = ()) -> "Iterator[subprocess.Popen[str]]":
    """Give a supervisor of `script`, once that has said a line; what is left of it is killed."""
    command = [*before, sys.executable, "-c", SUPERVISE, script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()
            for pid in (*find_group_members(process.pid), *find_sleepers()):
                with contextlib.suppress(ProcessLookupError):  # it died meanwhile
                    os.kill(pid, signal.SIGKILL)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return when something is so; fails if it is not to be."""
    deadline_s = time.monotonic() + END_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_servers_status_is_the_commands() -> None:
    """Its own, or 128 + the signal that ended it."""
    for script, want in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)):
        assert subprocess.run([sys.executable, "-c", SUPERVISE, script], check=False).returncode == want


def test_the_status_is_told_by_one_who_was_started_to_ignore_children() -> None:
    """A parent may hand that down, and the kernel then keeps no child's status and sends no signal."""
    command = ["env", "--ignore-signal=CHLD", sys.executable, "-c", SUPERVISE, "raise SystemExit(3)"]
    assert subprocess.run(command, check=False, timeout=END_S).returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_starts_is_ended_at_once_though_it_hears_nothing(number: signal.Signals) -> None:
    """With everything that it started, even in a session of its own."""
    with supervised(BEGIN + CHILD + DEAF + SLEEP) as process:
        wait_until(lambda: len(find_sleepers()) == 1)  # it has its name a moment after it was started
        left = [*find_group_members(process.pid), *find_sleepers()]
        assert len(left) == 3
        process.send_signal(number)
        assert process.wait(END_S) == 128 + number
        assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def find_sleepers() -> list[int]:
    """Return the processes that CHILD started."""
    found = subprocess.run(
        ["pgrep", "--full", "-x", re.escape(f"{sys.executable} -c {SLEEPER}")],
        check=False,
        capture_output=True,
        text=True,
    )
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_serves_ends_by_itself(number: signal.Signals) -> None:
    """It is told by SIGTERM, and takes the time that it needs."""
    script = (
        f"{BEGIN}signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)))\n"
        f"tell_serving()\nprint('begun', flush=True)\n{SLEEP}"
    )
    with supervised(script) as process:
        started_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(END_S) == 7
        assert time.monotonic() - started_s >= 1


def test_a_second_signal_is_not_to_be_ignored() -> None:
    """A server that serves and does not end is killed when it is told again."""
    told = "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
    with supervised(f"{BEGIN}{told}tell_serving()\nprint('begun', flush=True)\n{SLEEP}") as process:
        assert process.stdout is not None
        process.terminate()
        assert process.stdout.readline() == "told\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.terminate()
        assert process.wait(END_S) == 128 + signal.SIGTERM


def test_the_server_dies_with_its_supervisor() -> None:
    """Also of SIGKILL, which nobody can pass on."""
    with supervised(DEAF + SLEEP) as process:
        process.kill()
        process.wait(END_S)
        wait_until(lambda: not find_group_members(process.pid))


def test_a_server_whose_supervisor_died_before_it_began_dies_too() -> None:
    """It would be told of a later death only."""
    wait = "while os.getppid() == parent:\n    time.sleep(0.01)\n"
    script = f"import os, time\nparent = os.getppid()\nprint('begun', flush=True)\n{wait}{BEGIN}print('lives')\n"
    with supervised(script) as process:
        process.kill()
        assert process.stdout is not None
        assert not process.stdout.read()


def test_what_a_dead_server_leaves_is_ended() -> None:
    """A server that crashes leaves no engine behind."""
    assert not find_sleepers()
    with supervised(f"{BEGIN}{CHILD}print('begun', flush=True)\nsys.stdin.readline()\nos._exit(5)\n") as process:
        wait_until(lambda: len(find_sleepers()) == 1)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(END_S) == 5
        assert not find_sleepers()


def test_a_containers_first_process_ends_too() -> None:
    """It has no default signals: what it does not handle is lost."""
    need_namespaces()
    with supervised(DEAF + SLEEP, before=FIRST_PROCESS) as process:
        os.kill(find_first(process.pid), signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
