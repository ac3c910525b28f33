"""The bench of the promised time to the first token: one cell of it simulated, and what its result says."""

import json
import sys
from pathlib import Path

import pytest

from bench import ttft
from bench.serving.meta import ROOT
from bench.simulation.cells import SLO, Cell
from elasticmoe.runtime.simulator.requests import Arrival, Request

CELL = Cell("h200", "flat", 1.0, "burst")


def committed() -> list[ttft.Row]:
    """The rows of the result."""
    return [ttft.Row(**row) for row in json.loads(ttft.DEFAULT_OUT.read_text(encoding="utf-8"))["rows"]]


@pytest.mark.parametrize(
    ("first_s", "finished_s", "kept"), [(5.9, 6.9, True), (6.1, 6.2, False), (5.9, 7.0, False), (6.0, 6.0, True)]
)
def test_a_request_keeps_both_promises_or_none(first_s: float, finished_s: float, kept: bool) -> None:  # noqa: FBT001
    """It came at 1 s: its first token is there by 6 s, each of the ten after it within 100 ms on average."""
    assert (SLO.ttft_s, SLO.tpot_s) == (5.0, 0.1)
    request = Request(Arrival(1.0, 5, 11), 0, 16, first_token_s=first_s, finished_s=finished_s)
    assert ttft.is_kept(request) == kept


def test_a_promised_first_token_is_kept_where_it_was_not_and_experts_leave_once() -> None:
    """From one cell's start to its end; the rows are the result's, without the promise the simulator's table's."""
    stock, without, promised = rows = ttft.make_rows(CELL)
    assert rows == [row for row in committed() if (row.routing, row.kv_gib, row.workload) == ("flat", 1.0, "burst")]
    assert stock.kept_share < without.kept_share < 0.8 < promised.kept_share == 1.0
    assert promised.ratio_to_stock > 0.95 * without.ratio_to_stock > 1
    assert without.evicted < promised.evicted == promised.loaded < 1.6 * without.evicted
    table = json.loads((ROOT / "bench" / "results" / "simulator.json").read_text(encoding="utf-8"))["rows"]
    place = {"gpu": "h200", "routing": "flat", "kv_gib": 1.0, "workload": "burst", "policy": "goodput"}
    (same,) = [row for row in table if row | place == row]
    assert (same["tok_s"], same["evicted"]) == (without.tok_s, without.evicted)


def test_the_promise_costs_no_cell_more_than_its_gain() -> None:
    """All cells: never below 0.98 of stock, never fewer requests that keep both promises than without it."""
    rows = committed()
    cells = [(cell.routing, cell.kv_gib, cell.workload) for cell in ttft.list_cells()]
    assert [(row.routing, row.kv_gib, row.workload) for row in rows[::3]] == cells
    for without, promised in zip(rows[1::3], rows[2::3], strict=True):
        assert (without.system, promised.system) == ("goodput", "goodput, ttft")
        assert promised.ratio_to_stock >= 0.98
        assert promised.kept_share >= without.kept_share


def test_a_result_has_every_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a line for each, and where it was written."""
    out = tmp_path / "result.json"
    monkeypatch.setattr(ttft, "list_cells", lambda: iter([CELL]))
    monkeypatch.setattr(sys, "argv", ["ttft", "--out", str(out)])
    assert ttft.main() == 0
    result = json.loads(out.read_text())
    assert list(result) == ["meta", "rows"]
    assert [row["system"] for row in result["rows"]] == ["stock", "goodput", "goodput, ttft"]
    assert "flat, 1.0 GiB, burst: stock 40% kept, 1.000; goodput 69% kept" in capsys.readouterr().out
