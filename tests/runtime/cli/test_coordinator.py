"""`elasticmoe coordinator` as a command."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ELASTICMOE = (sys.executable, "-m", "elasticmoe.runtime.cli.main")
LIST_MODULES = """
import sys
import elasticmoe.runtime.cli.main, elasticmoe.runtime.cli.coordinator
import elasticmoe.runtime.coordinator.server, elasticmoe.runtime.coordinator.store
print(*sys.modules)
"""


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [*ELASTICMOE, "coordinator", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_needs_neither_torch_nor_vllm() -> None:
    """So its image is small and needs no GPU."""
    done = subprocess.run([sys.executable, "-c", LIST_MODULES], capture_output=True, text=True, check=True)
    assert {"torch", "vllm", "transformers", "triton"}.isdisjoint(done.stdout.split())


def test_help_names_its_flags() -> None:
    """Each with what it is for."""
    done = _run("--help")
    assert done.returncode == 0
    for flag in ("--socket", "--model", "--revision", "--metrics-port", "--grace-s", "--adopt-wait-s", "--drain-s"):
        assert flag in done.stdout


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """One sentence, status 2, and no socket is left."""
    done = _run("--socket", str(tmp_path / "s"), "--model", str(tmp_path), "--metrics-port", "0")
    assert done.returncode == 2
    assert "config.json can't be read" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--grace-s", "nan"), "--grace-s: want seconds from 0 to 1000000000, it is nan"),
        (("--drain-s", "inf"), "--drain-s: want seconds from 0 to 1000000000, it is inf"),
        (("--adopt-wait-s", "-1"), "--adopt-wait-s: want seconds from 0 to 1000000000, it is -1"),
        (("--metrics-port", "99999"), "port 99999 for metrics can't be had"),
    ],
)
def test_numbers_that_are_no_times_or_ports_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """By flag."""
    done = _run("--socket", str(tmp_path / "s"), "--model", str(tmp_path), "--metrics-port", "0", *words)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_a_socket_that_cannot_be_made_is_refused(tmp_path: Path, taken: str) -> None:
    """A file stands at its path or at its folder's: it is named, and left as it is."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1,'
        ' "hidden_size": 8, "moe_intermediate_size": 8}'
    )
    (tmp_path / "taken").write_text("mine")
    path = tmp_path / "taken" if taken == "file" else tmp_path / "taken" / "pool.sock"
    done = _run("--socket", str(path), "--model", str(tmp_path), "--metrics-port", "0")
    assert done.returncode == 2
    assert f"the socket {path} can't be made" in done.stderr.splitlines()[-1]
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    """The port, and the flag to choose another."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104  # as the coordinator would
        taken.listen()
        port = str(taken.getsockname()[1])
        done = _run("--socket", str(tmp_path / "s"), "--model", str(tmp_path), "--metrics-port", port)
    assert done.returncode == 2
    assert f"port {port} for metrics can't be had" in done.stderr.splitlines()[-1]
