"""Host memory for the pool: one anonymous mapping, huge pages where the kernel gives them."""

import contextlib
import ctypes
import logging
import mmap
import os
from typing import Final

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.hostpool.at_once import at_once
from elasticmoe.runtime.units import mib

logger = logging.getLogger(__name__)

MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python doesn't name them yet."""
POPULATE_BYTES: Final = 2**29
MOST_THREADS: Final = 16


def allocate(num_bytes: int) -> mmap.mmap:
    """Return a private mapping of that many bytes; it is freed with its last reference.

    Raises PoolTooSmallError when the host has no such address space.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        message = f"the host pool needs {mib(num_bytes)} of host memory, the system refused ({error}); free some"
        raise PoolTooSmallError(message) from error
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower to fill, nothing else
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(start: int, num_bytes: int, *, is_writable: bool) -> None:
    """Have the pages of a mapping at `start` exist, many at a time: whoever touches or pins them finds them there.

    A system that can't leaves them to be made one after the other; nothing else changes. A process that ends meanwhile,
    as a refused start does, waits for none of them.
    """
    advice = MADV_POPULATE_WRITE if is_writable else MADV_POPULATE_READ
    libc = ctypes.CDLL(None, use_errno=True)  # lets other threads run meanwhile, as mmap.madvise does not

    def one(offset: int) -> int:
        size = min(POPULATE_BYTES, num_bytes - offset)
        failed = libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(size), advice)
        return ctypes.get_errno() if failed else 0

    num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    errors = set(at_once(one, range(0, num_bytes, POPULATE_BYTES), num_threads, "populate")) - {0}
    if errors:
        reasons = ", ".join(sorted(map(os.strerror, errors)))
        logger.info("the host pool's pages could not be made in advance (%s)", reasons)
