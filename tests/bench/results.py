"""Burst results and snapshots with chosen numbers, for the tests of a burst's and a report's arithmetic."""

from bench.serving import metrics
from bench.serving.burst import BurstResult
from bench.serving.client import Completion
from bench.serving.metrics import Snapshot, series


def make_snapshot(  # noqa: PLR0913 -- what tests vary
    *,
    running: int = 0,
    resident: int = 0,
    evicted: int = 0,
    loaded: int = 0,
    preempted: int = 0,
    tokens: int = 0,
    steps: int = 0,
    tpots_s: tuple[float, ...] = (),
) -> Snapshot:
    """A snapshot of an elastic server."""
    values = {
        metrics.RUNNING: running,
        metrics.RESIDENT: resident,
        metrics.PREEMPTIONS: preempted,
        metrics.TOKENS: tokens,
        metrics.STEPS: steps,
        metrics.TPOT_SUM: sum(tpots_s),
        metrics.TPOT_COUNT: len(tpots_s),
        series(metrics.CHANGES, kind="evict"): evicted,
        series(metrics.CHANGES, kind="load"): loaded,
        'elasticmoe_arena_bytes{owner="expert"}': resident * 1024,
        'elasticmoe_arena_bytes{owner="kv"}': running * 2048,
    }
    return Snapshot(0.0, {key: float(value) for key, value in values.items()})


def make_completion(token_ids: tuple[int, ...] = (1, 2), ttft_s: float = 0.5) -> Completion:
    """A finished request."""
    return Completion(token_ids, "", "length", ttft_s, elapsed_s=1.0)


def make_result(
    *,
    completions: tuple[Completion, ...] = (make_completion(),),
    wall_s: float = 2.0,
    before: Snapshot | None = None,
    samples: tuple[Snapshot, ...] | None = None,
    calm: Snapshot | None = None,
) -> BurstResult:
    """A burst; what is not given is an idle server."""
    idle = make_snapshot()
    return BurstResult(completions, wall_s, before or idle, samples or (idle,), calm or idle, calm or idle)
