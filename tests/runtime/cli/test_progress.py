"""How far a command is."""

import io
import os
import shutil
import sys

import pytest

from elasticmoe.runtime.cli.progress import BAR, CLEAR, Progress, progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_a_terminal_has_one_bar_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step redraws the same line; it is cut at the terminal's width, and gone at the end."""
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    stream = Terminal()
    shown = Progress("plan", stream)
    shown.begin("first", 0.0)
    shown.begin("second " + 99 * "x", 0.5)
    shown.clear()
    _, empty, half, rest = stream.getvalue().split(CLEAR)
    assert empty == f"plan [{' ' * BAR}]   0% first"
    assert half.startswith(f"plan [{'#' * (BAR // 2)}{' ' * (BAR // 2)}]  50% second x")
    assert len(half) == 59
    assert rest == ""


def test_elsewhere_each_step_is_a_line() -> None:
    """No control characters reach a file or a pipe."""
    stream = io.StringIO()
    shown = Progress("plan", stream)
    shown.begin("first", 0.0)
    shown.begin("second", 0.5)
    shown.clear()
    assert stream.getvalue() == "plan: first …\nplan: second …\n"


def test_an_error_leaves_no_bar_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed of it starts on a clean line."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)

    def fail() -> None:
        with progress("plan") as shown:
            shown.begin("first", 0.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.getvalue().endswith(CLEAR)
