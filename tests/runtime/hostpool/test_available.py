"""How much memory a pool may take."""

from pathlib import Path

import pytest

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.hostpool.available import HUGE_BYTES, available_bytes, free_hugetlb_bytes, require

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def _write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_without_a_limit_the_node_says(tmp_path: Path) -> None:
    """MemAvailable, in bytes, where the cgroup has no limit or there is none."""
    folder = _write(tmp_path, meminfo=MEMINFO)
    assert available_bytes(folder / "meminfo", folder) == 600 * 1024
    _write(tmp_path, memory__max="max\n")
    assert available_bytes(folder / "meminfo", folder) == 600 * 1024


@pytest.mark.parametrize(
    ("current", "available"), [("200000", 130000), ("900000", 0), ("1000", 329000)], ids=["some", "none", "most"]
)
def test_a_limit_leaves_what_is_not_used_but_page_cache(tmp_path: Path, current: str, available: int) -> None:
    """The cgroup's limit less its use; its page cache can be dropped, so it counts as free."""
    stat = "anon 5\ninactive_file 10000\nactive_file 20000\n"
    folder = _write(tmp_path, meminfo=MEMINFO, memory__max="300000\n", memory__current=current, memory__stat=stat)
    assert available_bytes(folder / "meminfo", folder) == available


def test_a_limit_of_the_first_version_counts_as_well(tmp_path: Path) -> None:
    """Its files have other names, and its totals those of a whole container."""
    folder = _write(
        tmp_path,
        meminfo=MEMINFO,
        memory___memory__limit_in_bytes="300000\n",
        memory___memory__usage_in_bytes="200000\n",
        memory___memory__stat="active_file 1\ntotal_inactive_file 10000\ntotal_active_file 20000\n",
    )
    assert available_bytes(folder / "meminfo", folder) == 130000


def test_the_node_bounds_a_generous_limit(tmp_path: Path) -> None:
    """A limit above what the node has is no promise."""
    folder = _write(tmp_path, meminfo=MEMINFO, memory__max="99999999", memory__current="0", memory__stat="")
    assert available_bytes(folder / "meminfo", folder) == 600 * 1024


def test_huge_pages_count_up_to_the_cgroups_limit(tmp_path: Path) -> None:
    """A pod that asked for none may touch none, however many the node has set aside."""
    folder = _write(tmp_path, free="3\n")
    assert free_hugetlb_bytes(folder / "free", folder) == 3 * HUGE_BYTES
    _write(tmp_path, hugetlb__2MB__max="max\n")
    assert free_hugetlb_bytes(folder / "free", folder) == 3 * HUGE_BYTES
    _write(tmp_path, hugetlb__2MB__max="0\n")
    assert free_hugetlb_bytes(folder / "free", folder) == 0
    _write(tmp_path, hugetlb__2MB__max="max\n", hugetlb___hugetlb__2MB__limit_in_bytes=f"{HUGE_BYTES}\n")
    assert free_hugetlb_bytes(folder / "free", folder) == HUGE_BYTES
    assert free_hugetlb_bytes(folder / "missing", folder) == 0


def test_a_pool_must_fit_one_kind_of_memory() -> None:
    """Plain pages or huge ones, the latter in whole pages; else one sentence with both sizes."""
    require(10, 10, 0)
    require(10, 0, HUGE_BYTES)
    with pytest.raises(PoolTooSmallError, match=r"needs 3\.00 MiB of host memory, 2\.00 MiB is available"):
        require(3 * 2**20, 2**21, HUGE_BYTES)


def test_this_machine_has_some() -> None:
    """The defaults are the paths of a real system."""
    assert available_bytes() > 2**20
