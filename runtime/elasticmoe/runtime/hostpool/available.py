"""How much memory a pool may take: what the node has left, and what the process's own cgroup has left."""

import re
from pathlib import Path
from typing import Final, NamedTuple

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.units import align_up, mib

HUGE_BYTES: Final = 2 * 2**20
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_HUGETLB: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


class _Files(NamedTuple):
    """Where a version of cgroups says what, under its mount."""

    limit: str
    usage: str
    stat: str
    prefix: str
    """Before the names in `stat`, to have a whole container counted."""
    hugetlb: str


_V1: Final = _Files(
    limit="memory/memory.limit_in_bytes",
    usage="memory/memory.usage_in_bytes",
    stat="memory/memory.stat",
    prefix="total_",
    hugetlb="hugetlb/hugetlb.2MB.limit_in_bytes",
)
_V2: Final = _Files("memory.max", "memory.current", "memory.stat", "", "hugetlb.2MB.max")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that can be taken without anybody being killed; page cache counts as available."""
    free = _number(r"^MemAvailable:\s+(\d+) kB", meminfo) * 1024
    for files in (_V1, _V2):
        limit = _text(cgroup / files.limit).strip()
        if limit.isdecimal():
            stat = cgroup / files.stat
            cache = sum(_number(rf"^{files.prefix}{kind}_file (\d+)", stat) for kind in ("active", "inactive"))
            free = min(free, max(0, int(limit) - _number(r"^(\d+)", cgroup / files.usage) + cache))
    return free


def free_hugetlb_bytes(free: Path = _HUGETLB, cgroup: Path = _CGROUP) -> int:
    """Return the bytes in 2 MiB pages that are set aside and that our cgroup may use.

    A page beyond the cgroup's limit would end the process when touched.
    """
    node = _number(r"^(\d+)", free) * HUGE_BYTES
    limits = [_text(cgroup / files.hugetlb).strip() for files in (_V1, _V2)]
    return min(node, *(int(limit) for limit in limits if limit.isdecimal()), node)


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
