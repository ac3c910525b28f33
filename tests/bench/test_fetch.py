"""The arithmetic of the fetch bench: shares, syncs, orders, and which steps and launches are tried."""

import pytest

from bench import fetch_gpu
from bench.fetch.copies import BLOCKS, FEW, SHARED_BYTES, best_tunings, read_rows, tunings
from bench.fetch.forward import NUM_LAYERS, WATCHED, Case, Launch, buffer_of, count_syncs, layers_ahead, row_of
from elasticmoe.kernels.fetch import MAX_BLOCKS, Tuning

EXPERT_BYTES = 3 * 768 * 2048 * 2


@pytest.mark.parametrize(("step_us", "share"), [(12000, 1.0), (14000, 0.5), (16000, 0.0), (17000, -0.25)])
def test_the_hidden_share_is_what_the_step_did_not_get_longer_by(step_us: float, share: float) -> None:
    """All where the step takes no longer, none where it takes as long as both, less than none if fetches slow it."""
    row = row_of(Case(64, "flat", 2, 10), Launch(Tuning(4)), 48, (12000, step_us, 4000))
    assert row["hidden_share"] == share
    assert row["fetch_gb_s"] == round(48 * EXPERT_BYTES / 4e-3 / 1e9, 2)
    assert (row["batch"], row["routing"], row["blocks"], row["ahead"]) == (64, "flat", 4, 2)
    assert row["fetched_per_layer"] == 1.0


def test_a_step_that_fetches_nothing_hides_nothing() -> None:
    """It has no bandwidth and no share; its time still tells what idle kernels cost."""
    row = row_of(Case(1, "skewed", 1, 10), Launch(Tuning(8)), 0, (5000, 5200, 150))
    assert row["fetch_gb_s"] is None
    assert row["hidden_share"] is row["hidden_of_hideable"] is None
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


@pytest.mark.parametrize(
    ("step_us", "fetch_us", "hideable", "hidden"),
    [(22000, 20000, 0.5, 0.4), (10000, 5000, 1.0, 1.0), (20000, 20000, 0.5, 0.5)],
)
def test_no_more_can_be_hidden_than_a_step_takes(
    step_us: float, fetch_us: float, hideable: float, hidden: float
) -> None:
    """Of fetches twice as long as a step of 10 ms, half; a step that then takes as long as they do hid it all."""
    row = row_of(Case(64, "flat", 1, 2), Launch(Tuning(8)), 48, (10000, step_us, fetch_us))
    assert row["hideable_share"] == hideable
    assert row["hidden_share"] == hidden
    assert row["hidden_of_hideable"] == round(hidden / hideable, 3)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_what_is_fetched_ahead_takes_over_no_buffer_that_is_still_needed(ahead: int) -> None:
    """Every layer but the first is fetched ahead once, and from then on until it is read, no other gets its buffer."""
    started = [later for gate in range(NUM_LAYERS) for later in layers_ahead(gate, ahead)]
    assert started == (list(range(1, NUM_LAYERS)) if ahead else [])
    for gate in range(NUM_LAYERS):
        live = [gate] + [later for at in range(gate + 1) for later in layers_ahead(at, ahead) if later > gate]
        buffers = {buffer_of(layer, ahead) for layer in live}
        assert len(buffers) == len(live) <= ahead + 1
        assert max(buffers) <= ahead


def test_each_batch_is_timed_with_every_load_and_once_with_other_joins() -> None:
    """Flat routing gets fewer offloaded experts; joins other than `late` need something ahead."""
    args = fetch_gpu.parser().parse_args(["--batches", "32", "--ahead", "0,1", "--offloaded", "4,10"])
    late = [Case(32, "skewed", ahead, num) for num in (4, 10) for ahead in (0, 1)]
    late += [Case(32, "flat", ahead, 2) for ahead in (0, 1)]
    found = fetch_gpu.cases(args)
    assert [case for case in found if case.join == "late"] == late
    assert [case for case in found if case.join != "late"] == [
        Case(32, "skewed", 1, 10, "arrived"), Case(32, "skewed", 1, 10, "first")
    ]  # fmt: skip


def test_the_launch_of_the_fastest_steps_is_taken() -> None:
    """By their sum; all launches are tried with the same steps, one ahead of its experts and one not."""
    tables = [
        [{"step_ms": 3.0}, {"step_ms": 2.5}, {"step_ms": 2.9}],
        [{"step_ms": 3.0}, {"step_ms": 2.9}, {"step_ms": 2.4}],
    ]
    assert fetch_gpu.fastest(tables) == 2
    todo = fetch_gpu.cases(fetch_gpu.parser().parse_args([]))
    assert fetch_gpu.middle(todo) == [Case(64, "skewed", 0, 10), Case(64, "skewed", 1, 10)]
    few = fetch_gpu.cases(fetch_gpu.parser().parse_args(["--batches", "8", "--ahead", "2"]))
    assert fetch_gpu.middle(few) == [Case(8, "skewed", 2, 4)]


def test_variants_that_were_timed_before_the_process_died_are_kept() -> None:
    """Other lines are none of ours; the one that took the process down is told by its end."""
    row = '{"variant": "plain", "gb_s": 50.5}'
    assert read_rows(f"warning\n{row}\n", "") == [{"variant": "plain", "gb_s": 50.5}]
    assert read_rows(f"{row}\n", "ended with -6")[1:] == [{"variant": "next one", "error": "ended with -6"}]


def test_the_few_launches_are_of_those_that_fit() -> None:
    """And of every number of thread blocks."""
    assert set(FEW) <= {tuning for blocks in BLOCKS for tuning in tunings(blocks)}
    assert {tuning.num_blocks for tuning in FEW} == set(BLOCKS)


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
