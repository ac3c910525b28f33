"""The `elasticmoe` command itself, whichever subcommand it finds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.runtime.cli.first_process import FIRST_PROCESS, find_first, need_namespaces
from tests.runtime.simulator.models import TINY

MAIN = (sys.executable, "-m", "elasticmoe.runtime.cli.main")
END_S = 10.0


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
