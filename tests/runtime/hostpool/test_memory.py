"""Host memory for the pool."""

import mmap
import sys

import pytest

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.hostpool.memory import allocate


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
