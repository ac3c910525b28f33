"""A pool's memory as a file descriptor: an anonymous file that is filled once, sealed, and mapped read-only.

Sealed with F_SEAL_FUTURE_WRITE: F_SEAL_WRITE would forbid even read-only shared mappings before Linux 6.7, and a
private mapping would be copied when CUDA pins it.
"""

import contextlib
import fcntl
import logging
import mmap
import os
from pathlib import Path
from typing import Final

from elasticmoe.runtime.errors import CoordinatorError, PoolTooSmallError
from elasticmoe.runtime.hostpool.available import HUGE_BYTES, free_hugetlb_bytes
from elasticmoe.runtime.units import align_up, mib

logger = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; Python names it from 3.13 on."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


def create(name: str, num_bytes: int) -> int:
    """Return a descriptor of fresh memory, of 2 MiB pages where enough are set aside on the node.

    Raises PoolTooSmallError when the system refuses.
    """
    huge_bytes = align_up(num_bytes, HUGE_BYTES)
    if huge_bytes <= free_hugetlb_bytes():
        try:
            return _create(name, huge_bytes, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        except OSError as error:
            logger.warning("huge pages for the host pool were refused (%s); plain pages are used", error)
    try:
        return _create(name, num_bytes, 0)
    except OSError as error:
        message = f"the host pool needs {mib(num_bytes)} of shared memory, the system refused ({error}); free some"
        raise PoolTooSmallError(message) from error


def _create(name: str, num_bytes: int, flags: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, num_bytes)
        mmap.mmap(fd, 0).close()  # huge pages are set aside when they are mapped: refused here, not while filling
    except OSError:
        os.close(fd)
        raise
    return fd


def map_writable(fd: int) -> mmap.mmap:
    """Return a mapping to fill the memory through; close it before `seal`."""
    memory = mmap.mmap(fd, 0)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower to pin, nothing else
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def seal(fd: int) -> None:
    """Forbid every later write and change of size, for everybody and for ever."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def map_sealed(fd: int) -> mmap.mmap:
    """Return the memory for reading."""
    return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def check_sealed(fd: int, name: str, num_bytes: int) -> None:
    """Raise CoordinatorError unless the descriptor is sealed memory of that name and at least that size."""
    have_name = Path(f"/proc/self/fd/{fd}").readlink().name.removesuffix(" (deleted)").removeprefix("memfd:")
    if have_name != name:
        message = f"want the pool {name}, the descriptor is {have_name}; connect to the coordinator of the same model"
        raise CoordinatorError(message)
    have_bytes = os.fstat(fd).st_size
    if have_bytes < num_bytes:
        message = f"want a pool of {num_bytes} bytes, {name} has {have_bytes}; restart the one that made it"
        raise CoordinatorError(message)
    have_seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if have_seals & SEALS != SEALS:
        message = f"want a pool sealed against writing ({SEALS:#x}), {name} has seals {have_seals:#x}; load it anew"
        raise CoordinatorError(message)
