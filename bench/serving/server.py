"""Starts a server process in a group of its own, waits for its health, and ends the whole group.

Called by the demo and the benches. A server's output goes to a log file, whose last lines are in every error.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx

from bench.serving.errors import ServerFailed

HOST = "127.0.0.1"
SAY_EVERY_S = 15.0
POLL_S = 0.5
STOP_GRACE_S = 30.0
KILLED_WITHIN_S = 30.0
NUM_LOG_LINES = 30
MODEL_NAME = "tiny"
ELASTICMOE = (
    "-c",
    "import sys; from elasticmoe.runtime.cli.main import main; sys.exit(main())",
)  # the `elasticmoe` command
VLLM = ("-m", "vllm.entrypoints.cli.main")
UNSET = ("PYTHONDONTWRITEBYTECODE", "PROMETHEUS_MULTIPROC_DIR", "VLLM_CPU_KVCACHE_SPACE")
SET = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else every start compiles the sampler, for twenty seconds and with g++
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to start: a name for messages, the command after the interpreter, where it listens, where it logs."""

    name: str
    args: tuple[str, ...]
    port: int
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """Where the server answers."""
        return f"http://{HOST}:{self.port}"


def find_free_port() -> int:
    """A loopback port that nobody else is given while this process lives; a server with SO_REUSEADDR may listen on it.

    It stays bound here and does not listen: a server may take its time to start, and ask for other ports before.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    port = int(held.getsockname()[1])
    held.detach()
    return port


def server_env(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server: this one's, without what would make two systems differ."""
    kept = {key: value for key, value in environ.items() if key not in UNSET and not key.startswith("ELASTICMOE_")}
    return kept | SET | dict(extra)


def elastic_spec(model: Path, log: Path, flags: Sequence[str]) -> ServerSpec:
    """`elasticmoe serve` on a free port; `flags` are vLLM's and the elastic ones."""
    port = find_free_port()
    return ServerSpec("elasticmoe", (*ELASTICMOE, "serve", *_place(model, port), *flags), port, log)


def stock_spec(model: Path, log: Path, flags: Sequence[str]) -> ServerSpec:
    """`vllm serve` on a free port, with no plugin loaded."""
    port = find_free_port()
    return ServerSpec("stock vLLM", (*VLLM, "serve", *_place(model, port), *flags), port, log, {"VLLM_PLUGINS": ""})


def _place(model: Path, port: int) -> tuple[str, ...]:
    return (str(model), "--host", HOST, "--port", str(port), "--served-model-name", MODEL_NAME)


def read_last_lines(log: Path, count: int = NUM_LOG_LINES) -> str:
    """The last lines of a log that may not exist yet."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def find_group_members(group: int) -> tuple[int, ...]:
    """Ids of the live processes of a group (zombies left out)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, owner = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(owner) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return tuple(found)


class Server:
    """A started server; a context manager whose end leaves none of its processes behind."""

    def __init__(self, spec: ServerSpec) -> None:
        """Start it; `wait_healthy` says when it is ready."""
        self.spec = spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *spec.args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_env(os.environ, spec.env),
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        self._is_stopped = False

    def __enter__(self) -> Self:
        """The server itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    @property
    def pid(self) -> int:
        """Id of the first process, which is also its group's."""
        return self._process.pid

    def wait_healthy(self, timeout_s: float, say: Callable[[str], None]) -> float:
        """Seconds from the start until /health answered 200; ServerFailed if it ended or took longer."""
        said_s = time.monotonic()
        while not self._is_healthy():
            now_s = time.monotonic()
            if self._process.poll() is not None:
                raise self._failed(f"it ended with code {self._process.returncode}")
            if now_s - self._started_s > timeout_s:
                raise self._failed(f"it was not healthy after {timeout_s:g} s")
            if now_s - said_s >= SAY_EVERY_S:
                say(f"{self.spec.name} is still starting after {now_s - self._started_s:.0f} s (log: {self.spec.log})")
                said_s = now_s
            time.sleep(POLL_S)
        return time.monotonic() - self._started_s

    def _is_healthy(self) -> bool:
        try:
            answer = httpx.get(f"{self.spec.base_url}/health", timeout=2.0, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def _failed(self, why: str) -> ServerFailed:
        last = read_last_lines(self.spec.log)
        return ServerFailed(f"wanted {self.spec.name} to serve, {why}; last lines of {self.spec.log}:\n{last}")

    def stop(self) -> None:
        """End the whole group: asked first, forced after a grace period. A second call does nothing."""
        ways = (signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, KILLED_WITHIN_S)
        if self._is_stopped or any(self._end_group(number, within_s) for number, within_s in ways):
            self._is_stopped = True
            return
        left = find_group_members(self.pid)
        raise ServerFailed(f"wanted {self.spec.name} to end, processes {left} are still there: end them by hand")

    def _end_group(self, number: signal.Signals, within_s: float) -> bool:
        """Whether the group was gone within that time of this signal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None and not find_group_members(self.pid):
                return True
            time.sleep(0.1)
        return False


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def exit_on_sigterm() -> None:
    """Make SIGTERM end this process by SystemExit, so that its servers are stopped on the way out."""
    signal.signal(signal.SIGTERM, _exit)
