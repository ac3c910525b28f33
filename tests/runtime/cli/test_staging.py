"""What is written whole or not at all, and what ends and kills leave of it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticmoe.runtime.cli.staging import filled_whole, is_leftover, refuse_no_folder, write_whole
from elasticmoe.runtime.errors import ConfigError

FILL = """
import sys, time
from pathlib import Path
from elasticmoe.runtime.cli.staging import filled_whole
try:
    with filled_whole(Path(sys.argv[1]), last="config.json") as folder:
        (folder / "weights").write_text("half")
        print("begun", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
END_S = 60.0


@contextmanager
def _filling(target: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has begun to fill a folder."""
    with subprocess.Popen([sys.executable, "-c", FILL, str(target)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_a_text_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Through a link too; what was there stays when it can't be written, and no part of the new one does."""
    path, link = tmp_path / "result.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    with pytest.raises(UnicodeEncodeError):
        write_whole(link, "new \ud800")
    assert path.read_text() == "old"
    write_whole(link, "new")
    assert (path.read_text(), link.is_symlink()) == ("new", True)
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_reader_sees_the_old_text_or_the_new(tmp_path: Path) -> None:
    """The new one is another file, put in the old one's place: who has the old one open reads it to its end."""
    path = tmp_path / "result.json"
    path.write_text("old")
    with path.open() as reader:
        write_whole(path, "new")
        assert reader.read() == "old"


def test_a_folder_is_filled_once_all_is_there(tmp_path: Path) -> None:
    """Files of the same names are replaced, others stay; of what was beside them nothing does."""
    target = tmp_path / "new" / "model"
    for text in ("first", "second"):
        with filled_whole(target, last="config.json") as folder:
            for name in ("config.json", "weights"):
                (folder / name).write_text(text)
                assert text == "second" or not (target / name).exists()
        assert {file.name: file.read_text() for file in target.iterdir()} == {"config.json": text, "weights": text}


def test_the_last_file_comes_last(tmp_path: Path) -> None:
    """If one of the others can't be put in its place, the one that makes a folder a model isn't either."""
    (tmp_path / "weights" / "mine").mkdir(parents=True)

    def fill() -> None:
        with filled_whole(tmp_path, last="config.json") as folder:
            for name in ("config.json", "weights"):
                (folder / name).write_text("new")

    with pytest.raises(OSError, match="weights"):
        fill()
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_leaves_all_as_it_was(tmp_path: Path, number: signal.Signals, *, is_there: bool) -> None:
    """A folder that was made for it goes, one that was there has the files it had."""
    target = tmp_path / "model"
    if is_there:
        target.mkdir()
        (target / "mine").write_text("keep")
    with _filling(target) as process:
        process.send_signal(number)
        assert process.wait(END_S) == 128 + number
    assert [path.name for path in tmp_path.rglob("*")] == (["model", "mine"] if is_there else [])


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    """Nobody's own folder does, though it looks alike."""
    (tmp_path / ".writing-mine").mkdir()
    (tmp_path / ".writing-abcdefgh").symlink_to("/")
    with _filling(tmp_path) as process:
        process.kill()
    (left,) = filter(is_leftover, tmp_path.iterdir())
    assert (left / "weights").exists()
    with filled_whole(tmp_path, last="config.json") as folder:
        assert not left.exists()
        (folder / "config.json").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-abcdefgh", ".writing-mine", "config.json"]


def test_two_do_not_fill_one_folder_at_once(tmp_path: Path) -> None:
    """The second is refused, and the first's part stays."""
    with _filling(tmp_path) as process:
        with pytest.raises(ConfigError, match="alone, another process is writing a model into it"):
            filled_whole(tmp_path, last="config.json").__enter__()
        assert len(list(tmp_path.glob(".writing-*/weights"))) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
    with filled_whole(tmp_path, last="config.json"):
        pass


def test_tests_hear_an_interrupt_where_their_shell_ignores_it() -> None:
    """As in a job in the background: the tests above still end what they start."""
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "an_end_leaves and 2-False"]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", ignoring, *command], capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout


def test_signals_are_heard_again_afterwards(tmp_path: Path) -> None:
    """As before."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with filled_whole(tmp_path, last="config.json"):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_folder_that_cannot_be_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A file in its place or on the way to it is named."""
    (tmp_path / "file").touch()
    for target in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(ConfigError, match=rf"{target} can't be one \({tmp_path / 'file'} is a file\)"):
            refuse_no_folder(target)
    refuse_no_folder(tmp_path / "new" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"link can't be one \(File exists\)"):
        filled_whole(tmp_path / "link", last="config.json").__enter__()
