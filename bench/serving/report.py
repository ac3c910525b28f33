"""The arithmetic of a comparison, and the demo's story as text. Pure; called by the demo and the benches."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.serving.burst import BurstResult
from bench.serving.metrics import Snapshot
from bench.serving.sizing import Sizing

ELASTIC, STOCK = "elasticmoe", "stock"
MIN_RATIO = 2.0
KIB = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One burst on one system, beside the same burst on stock."""

    system: str
    repeat: int
    tok_s: float
    ratio_to_stock: float
    preemptions: int
    requests_per_step: float
    evictions: int
    loads: int
    ttft_ms: float
    tpot_ms: float
    wall_s: float
    calm_s: float
    is_calm: bool
    num_differing: int
    tokens_equal: bool


@dataclass(frozen=True, slots=True)
class Promise:
    """Something that must hold, whether it did, and the numbers behind it."""

    what: str
    holds: bool
    numbers: str


def count_differing(left: BurstResult, right: BurstResult) -> int:
    """Requests whose generated tokens are not the same in both."""
    return sum(one != other for one, other in zip(left.token_ids, right.token_ids, strict=True))


def make_row(system: str, repeat: int, result: BurstResult, stock: BurstResult) -> Row:
    """The numbers of one burst; `stock` is the result of the same requests on stock vLLM."""
    num_differing = count_differing(result, stock)
    return Row(
        system=system,
        repeat=repeat,
        tok_s=round(result.tok_s, 2),
        ratio_to_stock=round(result.tok_s / stock.tok_s, 3),
        preemptions=result.preemptions,
        requests_per_step=round(result.requests_per_step, 2),
        evictions=result.evictions,
        loads=result.loads,
        ttft_ms=round(result.ttft_ms, 1),
        tpot_ms=round(result.tpot_ms, 2),
        wall_s=round(result.wall_s, 2),
        calm_s=round(result.calm_s, 2),
        is_calm=result.is_calm,
        num_differing=num_differing,
        tokens_equal=num_differing == 0,
    )


def median_by_system(rows: Sequence[Row]) -> dict[str, dict[str, float | bool]]:
    """Per system the median of every number, and whether every flag held in all repeats."""
    return {
        system: _median([row for row in rows if row.system == system])
        for system in dict.fromkeys(r.system for r in rows)
    }


def _median(rows: Sequence[Row]) -> dict[str, float | bool]:
    columns = {key: [asdict(row)[key] for row in rows] for key in asdict(rows[0]) if key not in {"system", "repeat"}}
    return {
        key: all(values) if isinstance(values[0], bool) else round(statistics.median(values), 3)
        for key, values in columns.items()
    }


def check_promises(elastic: BurstResult, stock: BurstResult) -> tuple[Promise, ...]:
    """What the demo promises, each with its numbers."""
    differing, count = count_differing(elastic, stock), len(stock.completions)
    ratio = elastic.requests_per_step / stock.requests_per_step if stock.requests_per_step else 0.0
    return (
        Promise("the tokens are those of stock vLLM", differing == 0, f"{count - differing} of {count} requests equal"),
        Promise("no request was preempted", elastic.preemptions == 0, f"{elastic.preemptions} preemptions"),
        Promise("experts gave their pages to requests", elastic.evictions > 0, f"{elastic.evictions} evicted"),
        Promise("experts came back", elastic.loads > 0, f"{elastic.loads} loaded"),
        Promise(
            f"a step serves at least {MIN_RATIO:g}x as many requests as stock's",
            ratio >= MIN_RATIO,
            f"{elastic.requests_per_step:.1f} against {stock.requests_per_step:.1f} on average: {ratio:.1f}x",
        ),
    )


def show_promises(promises: Sequence[Promise]) -> str:
    """One line per promise."""
    return "\n".join(f"  {'kept  ' if one.holds else 'BROKEN'}  {one.what}: {one.numbers}" for one in promises)


def show_arena(result: BurstResult) -> str:
    """The arena's bytes by owner before the burst, at its peak, and when it was calm again."""
    moments = (("before", result.before), ("at peak", result.peak), ("after", result.calm))
    owners = list(dict.fromkeys(owner for _, snapshot in moments for owner in snapshot.arena()))
    head = f"  {'arena, KiB':<12}" + "".join(f"{owner:>10}" for owner in (*owners, "sum"))
    return "\n".join([head, *(_arena_line(name, snapshot, owners) for name, snapshot in moments)])


def _arena_line(name: str, snapshot: Snapshot, owners: Sequence[str]) -> str:
    arena = snapshot.arena()
    values = [arena.get(owner, 0) for owner in owners]
    return f"  {name:<12}" + "".join(f"{value // KIB:>10}" for value in (*values, sum(values)))


def show_side_by_side(elastic: Row, stock: Row) -> str:
    """Both systems' numbers, one line per number."""
    lines = (
        ("tokens/s", elastic.tok_s, stock.tok_s),
        ("mean requests per step", elastic.requests_per_step, stock.requests_per_step),
        ("preemptions", elastic.preemptions, stock.preemptions),
        ("experts evicted", elastic.evictions, "-"),
        ("experts brought back", elastic.loads, "-"),
        ("median ms to first token", elastic.ttft_ms, stock.ttft_ms),
        ("mean ms per token", elastic.tpot_ms, stock.tpot_ms),
        ("seconds", elastic.wall_s, stock.wall_s),
    )
    head = f"  {'':<26}{'elasticmoe':>12}{'stock vLLM':>12}"
    return "\n".join([head, *(f"  {name:<26}{left!s:>12}{right!s:>12}" for name, left, right in lines)])


def show_sizing(sizing: Sizing, num_requests: int, block_size: int) -> str:
    """Why this burst is too much for stock."""
    arena, kv = sizing.arena_bytes // KIB, sizing.stock_kv_bytes // KIB
    return (
        f"Both get {arena} KiB: {arena - kv} hold all experts, {kv} are left for KV, {sizing.stock_blocks} blocks of "
        f"{block_size} tokens.\nThe {num_requests} requests need up to {sizing.peak_blocks} blocks at a time. Stock "
        f"keeps every expert; elasticmoe may offload up to {sizing.limit} of each layer."
    )
