"""Host memory for the pool: one anonymous mapping, huge pages where the kernel gives them."""

import contextlib
import mmap

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.units import mib


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
