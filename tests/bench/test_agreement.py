"""How often two runs choose the same token, and how far apart their logprobs are."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.matrix.agreement import agreements, tolerances, top1_agreement
from bench.matrix.cells import CELL
from bench.matrix.combine import combine, tokens_path


def _entry(system: str, kv_gib: float, tokens: list[int], choices: dict[str, Any] | None = None) -> dict[str, Any]:
    cell = ["closed", "flat", kv_gib, 1, None, None, False]
    return {"system": system, "cell": cell, "repeat": 0, "tokens": {"0": tokens, "1": [5, 5]}, "choices": choices}


def test_agreement_counts_tokens_after_the_same_ones() -> None:
    """What follows the first that differs doesn't count, nor do requests of one run only."""
    assert top1_agreement({"0": [1, 2, 3, 4], "1": [7]}, {"0": [1, 2, 9, 4], "1": [7], "2": [8]}) == 3 / 4
    assert top1_agreement({"0": [1]}, {"1": [1]}) is None


def test_a_run_is_held_against_stock_and_against_itself_in_most_room() -> None:
    """Stock against itself only: that is as far apart as other batches alone make it."""
    ours, roomy = _entry("ours", 1.0, [1, 2, 3]), _entry("ours", 8.0, [1, 2, 3])
    stock, stock_roomy = _entry("stock-graphs", 1.0, [1, 9, 3]), _entry("stock-graphs", 8.0, [4, 9, 3])
    tokens = [ours, roomy, stock, stock_roomy]
    got = [agreements(one, tokens, "stock-graphs") for one in tokens]
    assert [one["agrees_with_stock"] for one in got] == [3 / 4, 2 / 3, None, None]
    assert [one["agrees_with_itself"] for one in got] == [1.0, None, 2 / 3, None]


def test_tolerances_are_of_tokens_chosen_alike_and_margins_of_the_others() -> None:
    """Nothing is told where one of them noted no logprobs."""
    ours = _entry("ours", 1.0, [1, 2], choices={"0": [(-1.0, 0.5), (-2.0, 0.1)], "1": [(-1.0, 0.5), (-1.0, 0.5)]})
    stock = _entry(
        "stock-graphs", 1.0, [1, 9], choices={"0": [(-1.5, 0.4), (-2.0, 0.2)], "1": [(-1.0, 0.5), (-1.1, 0.5)]}
    )
    assert tolerances(ours, stock) == {
        "logprob_apart_median": pytest.approx(0.1),
        "logprob_apart_max": 0.5,
        "margin_where_apart_median": 0.2,
        "margin_where_apart_max": 0.2,
    }
    assert tolerances(ours, _entry("stock-graphs", 1.0, [1, 9])) == {}


def test_another_routing_or_rate_is_another_run() -> None:
    """Only the room may differ from what a run is held against; stock's tokens stand beside every bus."""
    ours, stock = _entry("ours", 1.0, [1, 2]), _entry("stock-graphs", 1.0, [1, 2])
    for place, value in ((1, "skewed"), (5, 2.0)):
        other = _entry("ours", 8.0, [9, 9])
        other["cell"][place] = value
        assert agreements(ours, [ours, other, stock], "stock-graphs")["agrees_with_itself"] is None
    slow = _entry("ours", 1.0, [1, 2])
    slow["cell"][4] = 26.0
    assert agreements(slow, [slow, stock], "stock-graphs")["agrees_with_stock"] == 1.0


def _write(path: Path, system: str, tokens: list[int]) -> Path:
    entry = _entry(system, 1.0, tokens)
    row = dict(zip(CELL, entry["cell"], strict=True)) | {"system": system, "repeat": 0, "tok_s": 1.0}
    path.write_text(json.dumps(row) + "\n")
    tokens_path(path).write_text(json.dumps(entry | {"company": {}}) + "\n")
    return path


def test_a_result_holds_the_agreement_with_the_rows_that_are_in_it(tmp_path: Path) -> None:
    """A run that a later one replaced is compared with nothing."""
    old, new = _write(tmp_path / "old", "stock-graphs", [9, 9]), _write(tmp_path / "new", "stock-graphs", [1, 2])
    rows = combine([old, _write(tmp_path / "ours", "ours", [1, 2]), new], "a GPU", "abc", meta={})["rows"]
    assert [(row["system"], row["agrees_with_stock"]) for row in rows] == [("stock-graphs", None), ("ours", 1.0)]
    tokens_path(new).unlink()
    assert "agrees_with_stock" not in combine([old, new], "a GPU", "abc", meta={})["rows"][0]
