"""The runs elsewhere than in the simulator's table: where they are, what is offered there, and what is told of them."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import elsewhere
from bench.simulation.cells import EXCERPTS, Cell, Row, make_row, make_system, offer, simulate

PLACE = Cell("h200", "skewed", 1.0, "code")
PLACED = {"gpu": "h200", "routing": "skewed", "kv_gib": 1.0, "workload": "code"}


def test_each_run_is_elsewhere_and_within_its_trace() -> None:
    """Three GPUs, two routings, four rooms, two traces, three times: no cell of the table, no excerpt cut short."""
    cells = list(elsewhere.list_cells())
    assert len(cells) == len(set(cells)) == 3 * 2 * 4 * 2 * 3
    assert all(cell.seed or cell.later for cell in cells)
    for workload, later in {(cell.workload, cell.later) for cell in cells}:
        _, first, num = EXCERPTS[workload]
        assert first + later >= 0
        assert len(offer(workload, "h200", later)) == num


def test_later_counts_requests_of_the_trace() -> None:
    """What is offered 50 requests later is the table's excerpt from its 50th on; earlier likewise."""
    table, later, earlier = (offer("code", "h200", by) for by in (0, 50, -50))
    assert table == offer("code", "h200")
    lengths = [[(one.prompt_tokens, one.output_tokens) for one in some] for some in (table, later, earlier)]
    assert lengths[1][:-50] == lengths[0][50:]
    assert lengths[2][50:] == lengths[0][:-50]
    assert later[0].at_s == earlier[0].at_s == 0.0


def test_a_run_at_the_tables_place_is_the_tables() -> None:
    """Seed 0 and no request later: the rows of each policy are those of the table; another seed or excerpt's differ."""
    stock, threshold, goodput = simulate(PLACE, None), simulate(PLACE, "threshold"), simulate(PLACE, "goodput")
    table = {
        "stock": make_row(PLACE, None, stock, stock.tok_s),
        "threshold": make_row(PLACE, "threshold", threshold, stock.tok_s),
        "goodput": make_row(PLACE, "goodput", goodput, stock.tok_s),
    }
    assert elsewhere.run_cell(replace(PLACE, seed=0, later=0)) == table
    assert make_system(PLACE, None).seed == 0
    for cell in (replace(PLACE, seed=1), replace(PLACE, later=700)):
        assert simulate(cell, "threshold").tok_s != threshold.tok_s


def test_misses_are_counted_and_listed() -> None:
    """Two of three runs miss promises: each promise is counted, the TPOT that is told is the worse one."""
    cells = [replace(PLACE, seed=1), replace(PLACE, later=700), replace(PLACE, later=-900)]
    row = Row(
        *("qwen", "h200", "skewed", 1.0, "code", "stock", 1.0, True, True, 100.0, 20.0, 900.0),
        *(30, 800, 0, 5, 5, 0, 0.1, None, None),
    )
    kept = {name: replace(row, policy=name) for name in ("stock", "threshold", "goodput")}
    late = replace(row, tpot_ok=False, tpot_p99_ms=130.0)
    worse = replace(row, tpot_ok=False, tpot_p99_ms=150.0, ratio_to_stock=0.9, tok_s=90.0)
    assert elsewhere.judge(cells, [kept | {"goodput": worse}, kept, kept | {"goodput": late}]) == {
        "num_runs": 3,
        "num_missed": {"ratio_to_stock": 1, "ratio_to_threshold": 1, "tpot_p99_ms": 2},
        "worst_tpot_p99_ms": 150.0,
        "missed": [
            {**PLACED, "seed": 1, "later": 0, "ratio_to_stock": 0.9, "ratio_to_threshold": 0.9, "tpot_p99_ms": 150.0},
            {**PLACED, "seed": 0, "later": -900, "tpot_p99_ms": 130.0},
        ],
    }
    nothing = {"ratio_to_stock": 0, "ratio_to_threshold": 0, "tpot_p99_ms": 0}
    unmissed = {"num_runs": 1, "num_missed": nothing, "worst_tpot_p99_ms": None, "missed": []}
    assert elsewhere.judge(cells[:1], [kept]) == unmissed


def test_a_result_has_every_run_and_what_it_is_judged_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two cells in processes of their own: rows in the cells' order, a line for each, the verdict of these rows."""
    cells, out = [replace(PLACE, later=-900), replace(PLACE, seed=1)], tmp_path / "result.json"
    monkeypatch.setattr(elsewhere, "list_cells", lambda: iter(cells))
    monkeypatch.setattr(sys, "argv", ["elsewhere", "--out", str(out)])
    assert elsewhere.main() == 0
    result = json.loads(out.read_text())
    assert list(result) == ["meta", "rows", "verdict"]
    found = [elsewhere.run_cell(cell) for cell in cells]
    assert result["rows"] == elsewhere.dump(cells, found)
    assert result["verdict"] == elsewhere.judge(cells, found)
    places = [(row["seed"], row["later"], row["policy"]) for row in result["rows"]]
    names = ("stock", "threshold", "goodput")
    assert places == [(*place, name) for place in ((0, -900), (1, 0)) for name in names]
    assert set(result["rows"][0]) == {*PLACED, "seed", "later", "policy", *elsewhere.FIGURES}
    told = capsys.readouterr().out
    assert "1 of 2: h200, skewed, 1.0 GiB, code, seed 0, -900 requests: " in told
    assert "2 of 2: h200, skewed, 1.0 GiB, code, seed 1, +0 requests: " in told
