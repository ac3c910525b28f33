"""The memory report's lines."""

from dataclasses import replace

from elasticmoe.runtime.contract.report import MemoryReport

REPORT = MemoryReport(
    arena_bytes=96 * 2**20,
    expert_page_bytes=3 * 2**20,
    block_bytes=3 * 2**19,
    huge_page_bytes=3 * 2**20,
    waste_ratio=0.004,
    num_blocks=64,
    num_experts=16,
    num_resident=8,
    loading_bytes=6 * 2**20,
    host_pool_bytes=144 * 2**20,
    is_pinned=True,
)


def test_the_report_has_every_number() -> None:
    """Arena, page sizes, padding, residents, loading buffers and host pool, in three lines."""
    assert REPORT.lines() == [
        "arena 96.00 MiB: 64 blocks of 1572864 bytes, expert pages of 3145728, huge pages of 3145728 (padding 0.40%)",
        "8 of 16 experts resident, loading buffers 6.00 MiB",
        "host pool 144.00 MiB, pinned",
    ]


def test_unpinned_host_memory_is_said() -> None:
    """Pageable memory is slower to copy from, so the report says it."""
    assert replace(REPORT, is_pinned=False).lines()[-1] == "host pool 144.00 MiB, pageable"
