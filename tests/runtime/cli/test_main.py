"""The `elasticmoe` command itself, whichever subcommand it finds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticmoe.runtime.cli import plan
from elasticmoe.runtime.cli.main import main
from tests.runtime.cli.first_process import FIRST_PROCESS, find_first, need_namespaces
from tests.runtime.simulator.models import TINY

MAIN = (sys.executable, "-m", "elasticmoe.runtime.cli.main")
END_S = 60.0


def test_a_containers_first_process_ends_whatever_it_does(tmp_path: Path) -> None:
    """It has no default signals; here it reads a file of which the rest never comes."""
    need_namespaces()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    usage = tmp_path / "usage.csv"
    os.mkfifo(usage)
    options = ("--prompt-tokens", "60", "--answer-tokens", "40", "--max-model-len", "256")
    command = [
        *FIRST_PROCESS,
        *MAIN,
        "plan",
        "--model",
        str(tmp_path),
        "--gpu",
        "h200",
        "--usage",
        str(usage),
        *options,
    ]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            with usage.open("w"):  # waits until it reads
                os.kill(find_first(process.pid), signal.SIGTERM)
                assert process.wait(END_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_an_output_that_nobody_reads_is_no_fault() -> None:
    """The command ends as if by the signal, and says nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*MAIN, "serve", "--help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_output_without_room_is_told_in_one_sentence() -> None:
    """Status 2, not a traceback while the interpreter ends."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*MAIN, "serve", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("elasticmoe: want files and an output that can be used: [Errno 28] No space left")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_it_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it is at work."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "read_served", interrupt)
    assert main(["plan", "--model", "here", "--gpu", "h200", "--usage", "x.csv"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "elasticmoe: interrupted\n"


def test_a_librarys_own_sentence_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some raise OSError for what no system said, in several lines."""

    def fail(*_: object) -> None:
        raise OSError("no such model,\nlook elsewhere")

    monkeypatch.setattr(plan, "read_served", fail)
    assert main(["plan", "--model", str(tmp_path), "--gpu", "h200", "--usage", "x.csv"]) == 2
    assert capsys.readouterr().err == "elasticmoe: no such model, look elsewhere\n"
