"""Servers as processes: healthy, failed or late, and gone with all their children after the end."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench.serving.errors import ServerFailed
from bench.serving.server import Server, ServerSpec, find_free_port, find_group_members, server_env

SERVE = """
import http.server, signal, subprocess, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def make_spec(tmp_path: Path, code: str, mode: str = "kind") -> ServerSpec:
    """A server whose program is `code`."""
    port = find_free_port()
    return ServerSpec("the server", ("-c", textwrap.dedent(code), str(port), mode), port, tmp_path / "logs" / "log")


def ignore(_: str) -> None:
    """Say nothing."""


def test_a_server_is_stopped_with_its_children(tmp_path: Path) -> None:
    """Nothing of the group is left, and a second stop does nothing."""
    with Server(make_spec(tmp_path, SERVE)) as server:
        assert server.wait_healthy(60, ignore) > 0
        child = int((tmp_path / "logs" / "log").read_text().split()[1])
        assert set(find_group_members(server.pid)) == {server.pid, child}
    assert find_group_members(server.pid) == ()
    server.stop()


def test_a_server_that_ignores_the_asking_is_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL follows SIGTERM after the grace period."""
    monkeypatch.setattr("bench.serving.server.STOP_GRACE_S", 0.5)
    with Server(make_spec(tmp_path, SERVE, "stubborn")) as server:
        server.wait_healthy(60, ignore)
    assert find_group_members(server.pid) == ()


def test_a_server_that_ends_is_told_with_its_last_lines(tmp_path: Path) -> None:
    """The error has the exit code and the log's end."""
    with (
        Server(make_spec(tmp_path, "import sys; print('no such flag: --x'); sys.exit(3)")) as server,
        pytest.raises(ServerFailed, match=r"(?s)it ended with code 3.*no such flag: --x"),
    ):
        server.wait_healthy(60, ignore)


def test_a_server_that_is_late_is_told_and_still_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it waits, gives up at the bound, and leaves nothing behind."""
    monkeypatch.setattr("bench.serving.server.SAY_EVERY_S", 0.0)
    said: list[str] = []
    with (
        Server(make_spec(tmp_path, "import time; time.sleep(600)")) as server,
        pytest.raises(ServerFailed, match=r"not healthy after 3 s"),
    ):
        server.wait_healthy(3, said.append)
    assert said
    assert "still starting" in said[0]
    assert find_group_members(server.pid) == ()


def test_a_free_port_is_for_a_server_and_for_nobody_else() -> None:
    """A server can listen on it whenever it comes; who takes any port does not get it."""
    port = find_free_port()
    assert find_free_port() != port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass


def test_the_environment_is_the_same_for_every_system() -> None:
    """What would make systems differ, or belongs to another run, is left out."""
    environ = {"HOME": "/h", "PYTHONDONTWRITEBYTECODE": "1", "ELASTICMOE_LIMIT": "3", "PROMETHEUS_MULTIPROC_DIR": "/p"}
    env = server_env(environ, {"VLLM_PLUGINS": ""})
    assert set(env) == {
        "HOME",
        "HF_HUB_OFFLINE",
        "PYTHONUNBUFFERED",
        "TORCH_COMPILE_DISABLE",
        "VLLM_NO_USAGE_STATS",
        "VLLM_PLUGINS",
        "VLLM_USE_V2_MODEL_RUNNER",
    }


def test_sigterm_to_a_script_stops_its_servers(tmp_path: Path) -> None:
    """A script that is asked to end takes its servers with it."""
    root = Path(__file__).resolve().parents[2]
    script = f"""
    import sys; sys.path.insert(0, {str(root)!r})
    from pathlib import Path
    from bench.serving.server import Server, ServerSpec, exit_on_sigterm
    import time
    exit_on_sigterm()
    with Server(ServerSpec("s", ("-c", "import time; time.sleep(600)"), 1, Path({str(tmp_path / "log")!r}))) as server:
        print(server.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        assert find_group_members(group)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert find_group_members(group) == ()
