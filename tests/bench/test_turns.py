"""Systems of the matrix that share a GPU take turns."""

import argparse
import contextlib
import fcntl
import os
import re
import threading
import time
from pathlib import Path

import pytest

from bench.matrix import run as matrix_run
from bench.matrix.cells import Cell
from bench.matrix.run import turn
from bench.serving_h200 import make_parser


@pytest.mark.parametrize("with_others", [False, True])
def test_cells_of_systems_that_share_a_file_take_turns(tmp_path: Path, with_others: bool) -> None:  # noqa: FBT001
    """The other one's cell begins once this one's has ended, or all have started; without a file nobody waits."""
    order: list[str] = []

    def other() -> None:
        with turn(tmp_path / "turns"):
            order.append("other in")

    thread = threading.Thread(target=other)
    with turn(tmp_path / "turns", with_others=with_others):
        thread.start()
        let_it_come_in(order)
        with turn(None if not with_others else tmp_path / "turns", with_others=True):
            order.append("nobody waits")
        order.append("out")
    thread.join()
    assert order == ["nobody waits", "out", "other in"]


def let_it_come_in(order: list[str]) -> None:
    """Return when a thread of this process waits for a lock (Linux marks it by an arrow) or is in, or after a while."""
    waits = re.compile(rf"-> FLOCK .* {os.getpid()} ")
    for _ in range(500):
        if order or waits.search(Path("/proc/locks").read_text(encoding="ascii")):
            return
        time.sleep(0.01)


def test_an_engine_starts_while_no_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start holds the turn with other starts, and nobody holds it once that is over."""
    turns = tmp_path / "turns"
    seen: list[str] = []

    def holder() -> str:
        with turns.open("a") as file:
            for name, kind in (("nobody", fcntl.LOCK_EX), ("starts", fcntl.LOCK_SH)):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                    return name
        return "a cell"

    class Started:
        def __init__(self, _: argparse.Namespace) -> None:
            seen.append(holder())

        def run(self, cells: tuple[Cell, ...]) -> None:
            seen.extend([holder(), cells[0].workload])

    monkeypatch.setattr(matrix_run, "Bench", Started)
    words = ["run", "--system", "ours", "--model", "x", "--cells", "closed:flat:1", "--turns", str(turns)]
    matrix_run.run(make_parser().parse_args([*words, "--out", str(tmp_path / "rows.jsonl")]))
    assert seen == ["starts", "nobody", "closed"]
