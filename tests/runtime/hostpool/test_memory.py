"""Host memory for the pool."""

import ctypes
import logging
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.hostpool import memory, shared
from elasticmoe.runtime.hostpool.memory import allocate, populate


def test_memory_is_zeroed_writable_and_as_large_as_asked() -> None:
    """A fresh private mapping."""
    with allocate(3 * mmap.PAGESIZE) as memory:
        assert len(memory) == 3 * mmap.PAGESIZE
        assert memory[:] == bytes(3 * mmap.PAGESIZE)
        memory[-1:] = b"x"
        assert memory[-1:] == b"x"


@pytest.mark.parametrize("num_bytes", [2**62, sys.maxsize + 1, -1])
def test_memory_that_the_host_does_not_have_is_refused_with_its_size(num_bytes: int) -> None:
    """More than the address space, or no size at all: one sentence with the size."""
    with pytest.raises(
        PoolTooSmallError, match=r"the host pool needs -?[0-9.]+ MiB of host memory, the system refused"
    ):
        allocate(num_bytes)


def _resident_kib(start: int) -> int:
    """Return what of the mapping at `start` is in memory."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines())
    for line in lines:
        first, _, last = line.split()[0].partition("-")
        if last and int(first, 16) <= start < int(last, 16):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"nothing is mapped at {start:x}")


def test_populated_memory_is_there_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of several chunks, the last of them a part, exist; their bytes are still zero, or what was written."""
    monkeypatch.setattr(memory, "POPULATE_BYTES", 2**21)
    num_bytes = 5 * 2**21 + mmap.PAGESIZE
    with allocate(num_bytes) as own:
        own[:1] = b"x"
        start = ctypes.addressof(here := ctypes.c_char.from_buffer(own))
        populate(start, num_bytes, is_writable=True)
        assert _resident_kib(start) >= num_bytes // 1024
        assert own[:2] == b"x\0"
        assert own[-1:] == b"\0"
        del here


def test_memory_that_cannot_be_populated_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """What doesn't start with a page the system refuses; that is told, and no more."""
    with allocate(2 * mmap.PAGESIZE) as own, caplog.at_level(logging.INFO):
        start = ctypes.addressof(here := ctypes.c_char.from_buffer(own))
        populate(start + 1, mmap.PAGESIZE, is_writable=True)
        del here
    assert "could not be made in advance" in caplog.text


def test_memory_that_can_only_be_read_is_populated_too() -> None:
    """A sealed pool that a coordinator filled: a write would be refused."""
    num_bytes = 2**21
    fd = shared.create("elasticmoe-test", num_bytes)
    filled = shared.map_writable(fd)
    filled[:] = b"x" * num_bytes
    filled.close()
    shared.seal(fd)
    mapped = shared.map_sealed(fd)
    os.close(fd)
    own = np.frombuffer(mapped, dtype=np.uint8)
    populate(own.ctypes.data, num_bytes, is_writable=False)
    assert _resident_kib(own.ctypes.data) == num_bytes // 1024
