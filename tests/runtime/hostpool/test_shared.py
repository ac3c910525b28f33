"""The pool's memory as a descriptor, on the real kernel."""

import mmap
import os
from collections.abc import Iterator

import pytest

from elasticmoe.runtime.errors import CoordinatorError, PoolTooSmallError
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.available import HUGE_BYTES, free_hugetlb_bytes

NAME = "elasticmoe-test"
NUM_BYTES = 3 * mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    """Give fresh memory, not sealed."""
    fd = shared.create(NAME, NUM_BYTES)
    yield fd
    os.close(fd)


def _fill(fd: int, data: bytes) -> None:
    memory = shared.map_writable(fd)
    memory[: len(data)] = data
    memory.close()
    shared.seal(fd)


def test_a_sealed_pool_is_read_by_all_and_written_by_none(fd: int) -> None:
    """After seal no mapping can write, nothing changes the size, and the bytes are those that were filled in."""
    _fill(fd, b"weights")
    memory = shared.map_sealed(fd)
    assert memory[:8] == b"weights\0"
    with pytest.raises(TypeError):
        memory[:1] = b"x"
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)


def test_mappings_share_one_memory(fd: int) -> None:
    """What is written through one mapping is read through another: no copy is made."""
    writable = shared.map_writable(fd)
    first, second = shared.map_sealed(fd), shared.map_sealed(fd)
    writable[-1:] = b"z"
    assert first[-1:] == second[-1:] == b"z"


def test_the_right_pool_passes(fd: int) -> None:
    """Name, size and seals are as wanted; smaller needs pass as well."""
    _fill(fd, b"")
    shared.check_sealed(fd, NAME, NUM_BYTES)
    shared.check_sealed(fd, NAME, 1)


def test_another_pool_is_refused_by_its_name(fd: int) -> None:
    """The kernel keeps the name with the memory, so that it can't be passed off as another."""
    _fill(fd, b"")
    with pytest.raises(CoordinatorError, match=r"^want the pool elasticmoe-other, the descriptor is elasticmoe-test;"):
        shared.check_sealed(fd, "elasticmoe-other", NUM_BYTES)


def test_a_pool_that_is_too_small_is_refused(fd: int) -> None:
    """Both sizes are said."""
    _fill(fd, b"")
    with pytest.raises(CoordinatorError, match=rf"want a pool of {NUM_BYTES + 1} bytes, .* has {NUM_BYTES}"):
        shared.check_sealed(fd, NAME, NUM_BYTES + 1)


def test_a_pool_that_can_be_written_is_refused(fd: int) -> None:
    """Memory that somebody may still write is no pool."""
    with pytest.raises(CoordinatorError, match=r"want a pool sealed against writing"):
        shared.check_sealed(fd, NAME, NUM_BYTES)


def test_a_plain_file_is_refused() -> None:
    """A descriptor that is no such memory is refused by its path, not by an error of the kernel."""
    with open(os.devnull, "rb") as file, pytest.raises(CoordinatorError, match="the descriptor is null"):  # noqa: PTH123
        shared.check_sealed(file.fileno(), NAME, 0)


def test_memory_that_the_system_refuses_is_named_with_its_size() -> None:
    """No more than a file may be long."""
    with pytest.raises(
        PoolTooSmallError, match=r"the host pool needs [0-9.]+ MiB of shared memory, the system refused"
    ):
        shared.create(NAME, 2**62)


def test_huge_pages_that_are_refused_are_replaced_by_plain_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that promises 2 MiB pages and has none gives plain ones, with a warning."""
    num_bytes = free_hugetlb_bytes() + 1
    monkeypatch.setattr(shared, "free_hugetlb_bytes", lambda: 2 * num_bytes + HUGE_BYTES)
    fd = shared.create(NAME, num_bytes)
    assert os.fstat(fd).st_size == num_bytes
    assert "huge pages for the host pool were refused" in caplog.text
    os.close(fd)
