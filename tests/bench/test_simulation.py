"""The simulator's bench: its cells, its rows, and what it says of goodput."""

from dataclasses import replace

import pytest

from bench.simulation import cells
from bench.simulation.cells import Cell, Row, list_cells, make_row, offer, simulate
from bench.simulation.verdict import find_misses, judge

PLACE = Cell("h200", "skewed", 0.5, "closed")


def row(policy: str, ratio: float = 1.0, *, tpot_ok: bool = True, ttft_ok: bool = True) -> Row:
    """Return a row of the first cell."""
    return Row(
        *("qwen", "h200", "flat", 0.5, "closed", policy, ratio, tpot_ok, ttft_ok, 1000 * ratio, 20.0, 900.0),
        *(30, 800, 0, 5, 5, 0, 0.1, None, None),
    )


def judge_ours(ours: Row, **others: Row) -> dict[str, float]:
    """Return what goodput misses beside these rows."""
    return find_misses({"stock": row("stock"), "threshold": row("threshold"), **others, "goodput": ours})


def test_the_table_has_all_its_cells() -> None:
    """Three GPUs, two routings, five rooms, four workloads, each once."""
    found = list(list_cells())
    assert len(found) == len(set(found)) == 3 * 2 * 5 * 4


@pytest.mark.parametrize("workload", cells.WORKLOADS)
def test_every_request_fits_the_smallest_room(workload: str) -> None:
    """No request is longer than max_model_len; slower GPUs get the same requests, later."""
    fast, slow = offer(workload, "h200"), offer(workload, "rtx5090")
    assert max(one.prompt_tokens + one.output_tokens for one in (*fast, *slow)) <= cells.MAX_TOKENS
    assert slow[-1].at_s >= fast[-1].at_s


def test_a_row_compares_with_stock() -> None:
    """Half a GiB of KV and skewed routing: stock's own ratio is 1, threshold's well above."""
    stock, ours = simulate(PLACE, None), simulate(PLACE, "threshold")
    assert make_row(PLACE, None, stock, stock.tok_s).ratio_to_stock == 1.0
    made = make_row(PLACE, "threshold", ours, stock.tok_s)
    assert made.ratio_to_stock > 2
    assert (made.steps, made.peak_concurrency) == (ours.num_steps, ours.peak)
    assert made.recovery_s is None


def test_kept_promises_are_no_misses() -> None:
    """As fast as both, within the SLO, home in time."""
    assert judge_ours(replace(row("goodput"), recovery_s=1.9, recovery_copy_s=1.0)) == {}


def test_each_promise_is_judged() -> None:
    """Slower than stock, than threshold where that keeps both SLOs, over the TPOT where stock isn't, late at home."""
    assert judge_ours(row("goodput", 0.97), threshold=row("threshold", 0.5)) == {"ratio_to_stock": 0.97}
    assert judge_ours(row("goodput", 1.1), threshold=row("threshold", 1.2)) == {"ratio_to_threshold": 0.9167}
    assert judge_ours(row("goodput", 1.1), threshold=row("threshold", 1.2, ttft_ok=False)) == {}
    assert judge_ours(row("goodput", tpot_ok=False)) == {"tpot_p99_ms": 20.0}
    assert judge_ours(row("goodput", tpot_ok=False), stock=row("stock", tpot_ok=False)) == {}
    assert judge_ours(replace(row("goodput"), recovery_s=3.0, recovery_copy_s=1.0)) == {"recovery_s": 3.0}
    assert judge_ours(replace(row("goodput"), recovery_copy_s=1.0)) == {"recovery_s": float("inf")}


def test_misses_are_counted_and_placed() -> None:
    """One cell judged, one promise missed there; cells without goodput are not judged."""
    verdict = judge([row("stock"), row("threshold"), row("goodput", 0.9), replace(row("stock"), kv_gib=8.0)])
    assert verdict["num_cells"] == 1
    assert verdict["missed"] == [
        {"gpu": "h200", "routing": "flat", "kv_gib": 0.5, "workload": "closed"}
        | {"ratio_to_stock": 0.9, "ratio_to_threshold": 0.9}
    ]
