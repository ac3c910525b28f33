"""Pieces of work at a time: all results, the first fault, and a process that ends without waiting for the rest."""

import subprocess
import sys
import time
from threading import Barrier, Event, Thread, current_thread

import pytest

from elasticmoe.runtime.hostpool.at_once import at_once

ENDS_MEANWHILE = """
import ctypes, threading, time
{start}
threading.Thread(target=work, daemon=True).start()
begun.acquire()
"""
"""A process whose main thread ends once a piece of its work is in hand."""
POPULATING = """
from types import SimpleNamespace
from elasticmoe.runtime.hostpool import memory
begun = threading.Semaphore(0)
def madvise(*_):
    begun.release()
    time.sleep(20)
    return 0
ctypes.CDLL = lambda *_, **__: SimpleNamespace(madvise=madvise)
work = lambda: memory.populate(0, 64 * memory.POPULATE_BYTES, is_writable=True)
"""
READING = """
import os, tempfile
from pathlib import Path
import numpy as np
from elasticmoe.runtime.coordinator.checkpoint import TensorPlace
from elasticmoe.runtime.coordinator.loader import Read, fill
begun = threading.Semaphore(0)
path = Path(tempfile.mkdtemp()) / "disk that says nothing"
os.mkfifo(path)
place = TensorPlace(path, "F32", (1, 1), 0, 4)
reads = (begun.release() or Read(place, 0, 1, 1, slice(None), 0) for _ in range(64))
work = lambda: fill(np.zeros(4, np.uint8), reads, "float32", lambda _: None)
"""


@pytest.mark.parametrize("num_pieces", [0, 1, 100])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_every_piece_is_done_once(num_pieces: int, num_threads: int) -> None:
    """Whatever the threads; None and falsy values are results too."""
    results = list(at_once(lambda piece: piece or None, range(num_pieces), num_threads, "test"))
    assert sorted(result or 0 for result in results) == list(range(num_pieces))


def test_pieces_are_done_at_a_time_in_threads_of_that_name() -> None:
    """Four pieces that wait for each other end; a piece more than there are threads would wait for ever."""
    all_here = Barrier(4)

    def meet(_: int) -> str:
        all_here.wait(30)
        return current_thread().name

    assert list(at_once(meet, range(4), 4, "meet")) == ["meet"] * 4


def test_a_fault_is_raised_and_nothing_more_is_begun() -> None:
    """The caller gets what the piece raised, once the pieces in hand are done."""
    begun, failed, done = list[int](), Event(), list[int]()

    def work(piece: int) -> None:
        begun.append(piece)
        if piece == 1:
            failed.set()
            raise ValueError(piece)
        failed.wait(30)
        done.append(piece)

    with pytest.raises(ValueError, match="1"):
        list(at_once(work, range(10**6), 2, "test"))
    assert len(begun) < 10**6
    assert sorted([*done, 1]) == sorted(begun)


def test_where_a_thread_is_refused_those_before_it_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets what the system said, once the pieces in hand are done; nothing goes on behind its back."""
    threads, begun, done = list[Thread](), Event(), list[int]()

    class Refused(Thread):
        """A thread of which the system allows two."""

        def start(self) -> None:
            if len(threads) == 2:
                assert begun.wait(30)
                raise RuntimeError("can't start new thread")  # as Python says it
            threads.append(self)
            super().start()

    def work(piece: int) -> None:
        begun.set()
        time.sleep(0.1)
        done.append(piece)

    monkeypatch.setattr("elasticmoe.runtime.hostpool.at_once.Thread", Refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(at_once(work, range(10**6), 4, "test"))
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    assert 1 <= len(done) <= 4


@pytest.mark.parametrize("start", [POPULATING, READING], ids=["populating", "reading"])
def test_a_process_that_ends_does_not_wait_for_work(start: str) -> None:
    """A refused start, or Ctrl-C, while pages are made or a checkpoint is read: pieces in hand and to come are left."""
    subprocess.run([sys.executable, "-c", ENDS_MEANWHILE.format(start=start)], check=True, timeout=15)
