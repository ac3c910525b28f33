"""The arithmetic of the fetch bench: shares, syncs, and which launches are tried."""

import pytest

from bench.fetch.copies import BLOCKS, SHARED_BYTES, best_tunings, tunings
from bench.fetch.forward import WATCHED, Case, count_syncs, row_of
from elasticmoe.kernels.fetch import MAX_BLOCKS, Tuning

EXPERT_BYTES = 3 * 768 * 2048 * 2


@pytest.mark.parametrize(("step_us", "share"), [(12000, 1.0), (14000, 0.5), (16000, 0.0), (17000, -0.25)])
def test_the_hidden_share_is_what_the_step_did_not_get_longer_by(step_us: float, share: float) -> None:
    """All where the step takes no longer, none where it takes as long as both, less than none if fetches slow it."""
    row = row_of(Case(64, "flat", 2, 10), Tuning(4), 48, (12000, step_us, 4000))
    assert row["hidden_share"] == share
    assert row["fetch_gb_s"] == round(48 * EXPERT_BYTES / 4e-3 / 1e9, 2)
    assert (row["batch"], row["routing"], row["blocks"], row["ahead"]) == (64, "flat", 4, 2)
    assert row["fetched_per_layer"] == 1.0


def test_a_step_that_fetches_nothing_hides_nothing() -> None:
    """It has no bandwidth and no share; its time still tells what idle kernels cost."""
    row = row_of(Case(1, "skewed", 1, 10), Tuning(8), 0, (5000, 5200, 150))
    assert row["fetch_gb_s"] is None
    assert row["hidden_share"] is None
    assert row["step_ms"] == 5.2


def test_waits_count_that_began_within_the_steps_and_copies_to_the_host_whenever() -> None:
    """The profiler's own wait comes after; a copy may end later than the call that asked for it."""
    events = [
        ("cudaDeviceSynchronize", 0, 1),
        (WATCHED, 10, 20),
        ("cudaGraphLaunch", 11, 12),
        ("cudaStreamSynchronize", 13, 30),
        ("cudaEventSynchronize", 19, 20),
        ("Memcpy DtoH (Device -> Pinned)", 25, 26),
        ("Memcpy HtoD (Pinned -> Device)", 12, 13),
        ("cudaDeviceSynchronize", 31, 40),
    ]
    assert count_syncs(events) == 3


@pytest.mark.parametrize("blocks", BLOCKS)
def test_only_launches_that_fit_the_device_are_tried(blocks: int) -> None:
    """At most eight blocks, 1,024 threads, what a thread's registers hold, and what the shared memory holds."""
    tried = list(tunings(blocks))
    assert len(tried) >= 10
    for tuning in tried:
        assert tuning.num_blocks == blocks <= MAX_BLOCKS
        assert tuning.num_warps * 32 <= 1024
        assert tuning.chunk_bytes // (tuning.num_warps * 32) <= 256
        assert (tuning.num_stages - 1) * tuning.chunk_bytes <= SHARED_BYTES <= 227 * 1024


def test_each_number_of_blocks_keeps_its_fastest_launch() -> None:
    """By GB/s; the rest of a step's rows are measured with it."""
    rows = [
        {"blocks": 4, "chunk_bytes": 16384, "num_warps": 4, "num_stages": 1, "gb_s": 40.0},
        {"blocks": 4, "chunk_bytes": 32768, "num_warps": 8, "num_stages": 3, "gb_s": 50.0},
        {"blocks": 8, "chunk_bytes": 65536, "num_warps": 16, "num_stages": 1, "gb_s": 45.0},
    ]
    assert best_tunings(rows) == {4: Tuning(4, 32768, 8, 3), 8: Tuning(8, 65536, 16, 1)}
