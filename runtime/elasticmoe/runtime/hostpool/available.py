"""How much memory a pool may take: what the node has left, and what the process's own cgroup has left."""

import re
from pathlib import Path
from typing import Final

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.units import align_up, mib

HUGE_BYTES: Final = 2 * 2**20
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_HUGETLB: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that can be taken without anybody being killed; page cache counts as available."""
    node = _number(r"^MemAvailable:\s+(\d+) kB", meminfo) * 1024
    limit = _text(cgroup / "memory.max").strip()
    if not limit.isdecimal():  # no limit, or no cgroup of version 2
        return node
    stat = cgroup / "memory.stat"
    cache = _number(r"^active_file (\d+)", stat) + _number(r"^inactive_file (\d+)", stat)
    own = int(limit) - _number(r"^(\d+)", cgroup / "memory.current") + cache
    return min(node, max(own, 0))


def free_hugetlb_bytes(free: Path = _HUGETLB, cgroup: Path = _CGROUP) -> int:
    """Return the bytes in 2 MiB pages that are set aside and that our cgroup may use.

    A page beyond the cgroup's limit would end the process when touched.
    """
    node = _number(r"^(\d+)", free) * HUGE_BYTES
    limit = _text(cgroup / "hugetlb.2MB.max").strip()
    return min(node, int(limit)) if limit.isdecimal() else node


def require(num_bytes: int, available: int, hugetlb: int) -> None:
    """Raise PoolTooSmallError with the numbers unless the pool fits one of the two kinds of memory."""
    if num_bytes > available and align_up(num_bytes, HUGE_BYTES) > hugetlb:
        message = (
            f"the host pool needs {mib(num_bytes)} of host memory, {mib(available)} is available; "
            "raise the memory limit, or use a node with more"
        )
        raise PoolTooSmallError(message)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        return ""


def _number(pattern: str, path: Path) -> int:
    found = re.search(pattern, _text(path), re.MULTILINE)
    return int(found[1]) if found else 0
