"""Real coordinators and workers as processes of their own, which a test may kill."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

ELASTICMOE = (sys.executable, "-m", "elasticmoe.runtime.cli.main")
WORKER = """
import sys, time
from pathlib import Path
from elasticmoe.runtime.coordinator.checkpoint import read_shape
from elasticmoe.runtime.coordinator.client import acquire
from elasticmoe.runtime.hostpool.manifest import PoolId, plan_manifest
socket, model, tp, rank = sys.argv[1:]
wanted = plan_manifest(PoolId(model, "", "float32", int(tp), int(rank)), read_shape(Path(model)))
lease = acquire(Path(socket), wanted, 60)
print(len(lease.memory), flush=True)
time.sleep(600)
"""


def coordinator_command(socket: Path, model: Path, *flags: str) -> list[str]:
    """Return a coordinator's command line, with metrics on a free port."""
    return [*ELASTICMOE, "coordinator", "--socket", str(socket), "--model", str(model), "--metrics-port", "0", *flags]


class Process:
    """A started process; `kill` ends it as the kernel would."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it and wait for its first line of output; what it says to stderr is pytest's."""
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().strip()
        assert self.first_line, f"{command} ended with {self.process.wait()} before it said anything"

    def __enter__(self) -> Self:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it if it is still alive."""
        if self.is_alive:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self.process.poll() is None

    def peak_bytes(self) -> int:
        """Return the most memory that the process has had, shared memory included."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

    def pool_inodes(self) -> set[int]:
        """Return the pools that the process has open, by the kernel's number of their memory."""
        inodes = set()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a connection that was closed meanwhile
                if "memfd:elasticmoe-" in os.readlink(link):  # noqa: PTH115
                    inodes.add(link.stat().st_ino)
        return inodes


class CoordinatorProcess(Process):
    """`elasticmoe coordinator` and its metrics."""

    def __init__(self, socket: Path, model: Path, *flags: str) -> None:
        """Start it with metrics on a free port."""
        super().__init__(coordinator_command(socket, model, *flags))
        self._port = int(self.first_line.rsplit(" ", 1)[1])

    def metric(self, name: str) -> float:
        """Return one series' value."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return next(s.value for family in families for s in family.samples if s.name == name)

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a series has that value."""
        wait_until(lambda: self.metric(name) == value, lambda: f"{name} is {self.metric(name)}, not {value}")


class WorkerProcess(Process):
    """A process that holds a lease and does nothing else."""

    def __init__(self, socket: Path, model: Path, tp: int = 1, rank: int = 0) -> None:
        """Start it; returns when it has mapped the pool."""
        super().__init__((sys.executable, "-c", WORKER, str(socket), str(model), str(tp), str(rank)))


def wait_until(is_done: Callable[[], bool], why: Callable[[], str], timeout_s: float = 60) -> None:
    """Return when `is_done` says so; fails after the timeout with what `why` says."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.05)
