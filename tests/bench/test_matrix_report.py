"""What pages get from the serving matrix: its result, its tables and plot, and the timeline of a profile."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench.matrix.cells import CELL
from bench.matrix.combine import combine, tokens_path
from bench.matrix.page import put, table
from bench.matrix.plots import draw_burst, draw_ratios
from bench.matrix.profiles import summary
from bench.matrix.report import compare, report
from bench.matrix.timeline import Layer, case_row, layer_rows, read_layers
from bench.matrix.timeline import report as report_timeline
from bench.serving.errors import BadScenario

ROOT = Path(__file__).resolve().parent.parent.parent
CLOSED: dict[str, Any] = {
    "workload": "closed", "routing": "flat", "kv_gib": 1.0, "gpus": 1, "bus_gb_s": None, "rate": None,
    "has_logprobs": False, "repeat": 0,
    "num_requests": 256, "wall_s": 30.0, "ttft_ms": 400.0, "p99_ttft_ms": 1234.0, "tpot_ms": 20.0, "p99_tpot_ms": 60.5,
    "goodput_ok": 0.5, "preemptions": 7, "peak": 62,
}  # fmt: skip
STOCK = CLOSED | {"system": "stock-graphs", "tok_s": 1000.0, "ratio": 1.0, "resident_min": None}
OURS = CLOSED | {"system": "ours", "tok_s": 1100.0, "ratio": 1.1, "resident_min": 5000, "exposed_s": 2.25}


def _line(text: str, start: str) -> list[str]:
    """Return the cells of the first row of a table that starts so."""
    found = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def _points(drawn: str) -> list[list[str]]:
    """Return the points of each line of an SVG."""
    root = ET.fromstring(drawn)  # noqa: S314 -- our own text
    return [line.get("points", "").split() for line in root.iter("{http://www.w3.org/2000/svg}polyline")]


def test_a_cell_has_both_sides_and_its_goal() -> None:
    """Tokens/s, ratio, goal, preemptions, peaks, residency and waits in the first table, latencies in the second."""
    speed, latency = report([OURS, STOCK]).split("| routing | KV, GiB | TTFT")
    counts = ["7", "7", "62", "62", "5000"]
    assert _line(speed, "flat") == ["flat", "1", "1100", "1000", "1.100", "1.10", *counts, "2.2", "30.0"]
    assert _line(latency, "flat") == ["flat", "1", *["0.40", "1.23"] * 2, *["20.0", "60.5"] * 2, "50 %", "50 %"]


def test_repeats_are_a_median_and_a_range() -> None:
    """And how many runs a cell has is told, of each side."""
    text = report([STOCK, *(OURS | {"repeat": n, "ratio": 1 + n / 10, "tok_s": 1000.0 + n} for n in range(3))])
    assert _line(text, "flat")[2:5] == ["1001", "1000", "1.100 (1.000 to 1.200)"]
    assert "(runs of a cell: ours 3, stock 1)" in text


@pytest.mark.parametrize(
    ("ratio", "says"),
    [(1.0994, "Below its goal: flat at 1 GiB (1.099 of 1.1)."), (1.1, "All 1 goals are reached.")],
)
def test_a_missed_goal_is_told(ratio: float, says: str) -> None:
    """A ratio that would round up to its goal is below it."""
    assert says in report([OURS | {"ratio": ratio}, STOCK])


def test_only_the_plain_closed_batch_has_goals() -> None:
    """Not light load, not a slower bus, not several GPUs."""
    rest = ({"workload": "light"}, {"bus_gb_s": 25.0}, {"gpus": 2}, {"has_logprobs": True})
    others = [OURS | more for more in rest]
    assert [one.goal for one in compare([OURS, *others])].count(None) == 4
    assert "goal:" not in report(others)


def test_stock_stands_beside_every_bus() -> None:
    """A slower bus has tables of its own, with stock's runs without one."""
    text = report([OURS, STOCK, OURS | {"bus_gb_s": 25.1, "tok_s": 900.0}])
    slow = text.split("fetches at 25.1 GB/s")[1]
    assert _line(slow, "flat")[2:4] == ["900", "1000"]


def test_what_only_one_side_ran_has_a_gap() -> None:
    """No figure is made up."""
    assert _line(report([STOCK]), "flat")[2:5] == ["–", "1000", "–"]


def test_other_systems_follow_and_a_replay_does_not() -> None:
    """The replay is a reference of tokens, not of speed."""
    text = report([OURS, STOCK, STOCK | {"system": "uva", "tok_s": 77.0}, OURS | {"system": "replay", "tok_s": 78.0}])
    assert _line(text, "uva")[1:5] == ["closed", "flat", "1", "77"]
    assert "replay" not in text


def test_starts_are_told() -> None:
    """Each start of one GPU once: until ready, GB in use, and what pinning took; nothing without."""
    start = {"ready_s": 185.2, "gpu_bytes": [{"used": 72.76e9}], "pin_s": [42.0], "pin_waited_s": [1.26]}
    stock = STOCK | {"ready_s": 87.6, "gpu_bytes": None, "pin_s": [None]}
    rows = [stock, OURS | start, OURS | start | {"repeat": 1}, OURS | start | {"ready_s": 99.0, "gpus": 2}]
    assert report(rows).split("**Starts**:")[1].splitlines()[4:] == [
        "| ours | 185 | 72.8 | 42.0 | 1.3 |",
        "| stock-graphs | 88 | – | – | – |",
    ]
    assert "Starts" not in report([OURS, STOCK | {"ready_s": None}])


def test_compared_tokens_are_told() -> None:
    """Equal, or in how many runs not; nothing without a replay."""
    told = OURS | {"tokens_equal": True, "num_comparable": 200}
    assert "In 1 runs 200 requests" in report([told])
    assert "their tokens are equal" in report([told])
    assert "differ in 1 of the runs" in report([told, told | {"repeat": 1, "tokens_equal": False}])
    assert "replay" not in report([OURS | {"tokens_equal": None, "num_comparable": 0}])


def test_routings_and_rooms_are_in_order() -> None:
    """Skewed first, small rooms first; workloads as the matrix lists them."""
    cells = [("light", "skewed", 8.0), ("closed", "flat", 0.5), ("closed", "skewed", 8.0), ("closed", "skewed", 0.5)]
    rows = [OURS | dict(zip(("workload", "routing", "kv_gib"), cell, strict=True)) for cell in cells]
    places = [tuple(one.cell[name] for name in ("workload", "routing", "kv_gib")) for one in compare(rows)]
    assert places == [cells[3], cells[2], cells[1], cells[0]]


def test_the_plot_has_ratios_and_goals() -> None:
    """Two charts of two lines each; where nothing was measured the first line is empty."""
    lines = _points(draw_ratios([OURS, OURS | {"kv_gib": 8.0}, STOCK]))
    assert [len(points) for points in lines] == [0, 5, 2, 5]


def test_a_burst_is_drawn_over_time() -> None:
    """Experts away of ours, requests and TPOT of both, left out where there is none; no plot without both sides."""
    series = [{"s": at, "resident": 9 - at, "running": at, "tpot_ms": at or None} for at in range(3)]
    ours = OURS | {"workload": "burst", "series": series}
    stock = STOCK | {"workload": "burst", "series": [one | {"resident": None} for one in series]}
    drawn = draw_burst([ours, stock, OURS])
    assert drawn is not None
    lines = _points(drawn)
    assert [len(points) for points in lines] == [3, 3, 3, 2, 2]
    assert draw_burst([ours, STOCK]) is None


def test_a_burst_without_its_series_is_left_out() -> None:
    """Of repeats the first that has one is drawn, of cells likewise; where no pair has any there is no plot."""
    series = [{"s": at, "resident": 9 - at, "running": at, "tpot_ms": 1} for at in range(3)]
    bare = [one | {"workload": "burst"} for one in (OURS, STOCK)]
    empty = [one | {"series": []} for one in bare]
    more = [one | {"series": series} for one in bare]
    later = [one | {"kv_gib": 8.0} for one in more]
    assert draw_burst([*bare, *empty, *more]) == draw_burst(more) is not None
    assert draw_burst([*bare, *later]) == draw_burst(later) is not None
    assert draw_burst([*bare, *empty]) is None
    assert draw_burst([bare[0], more[1]]) is None


def test_a_report_says_which_plot_it_has_not_drawn(tmp_path: Path) -> None:
    """One sentence beside the tables, and the plot that is there stays."""
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"rows": [one | {"workload": "burst"} for one in (OURS, STOCK)]}))
    (tmp_path / "burst-h200.svg").write_text("old")
    words = ["-m", "bench.serving_h200", "report", str(result), "--plots", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("burst-h200.svg is not drawn: want a burst's series by ours and by stock")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "burst-h200.svg").read_text() == "old"


def test_a_part_of_a_page_is_written_anew() -> None:
    """What stands around it stays; a page without the part, or with two, is refused."""
    page = "before\n<!-- it -->\nold\n<!-- /it -->\nafter\n"
    assert put(page, "it", "new") == "before\n<!-- it -->\nnew\n<!-- /it -->\nafter\n"
    for wrong in ("nothing", page + page):
        with pytest.raises(BadScenario, match="each once"):
            put(wrong, "it", "new")


def test_a_table_is_markdown() -> None:
    """Numbers to the right."""
    assert table(("a", "b"), [("x", "1")]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def _write(path: Path, tok_s: float, tokens: list[int]) -> Path:
    path.write_text(json.dumps(OURS | {"tok_s": tok_s}) + "\n")
    cell = [OURS[name] for name in CELL]
    kept = {"system": "ours", "cell": cell, "repeat": 0, "tokens": {"0": tokens}, "company": {"0": "a"}}
    replay = kept | {"system": "replay", "tokens": {"0": [1]}}
    tokens_path(path).write_text(json.dumps(kept) + "\n" + json.dumps(replay) + "\n")
    return path


def test_agreement_stands_below_the_tables() -> None:
    """Of both sides; tolerances where logprobs were noted."""
    close = {"logprob_apart_median": 0.001, "logprob_apart_max": 0.02, "margin_where_apart_max": 0.01}
    ours = OURS | {"agrees_with_stock": 0.98, "agrees_with_itself": 0.99} | close
    text = report([ours, STOCK | {"agrees_with_stock": None, "agrees_with_itself": None}])
    assert "| flat | 1 | 98.0 % | 99.0 % | – |" in text
    assert "1.0e-03 apart in the median and 2.0e-02 at most" in text
    assert "its two best were 1.0e-02 apart at most" in text
    assert "chosen alike" not in report([OURS, STOCK])
    del ours["margin_where_apart_max"]
    assert "2.0e-02 at most." in report([ours, STOCK])


def test_a_later_file_replaces_or_repeats(tmp_path: Path) -> None:
    """With `keep` its rows are further repeats, each with its own tokens; given meta data are not this machine's."""
    paths = [_write(tmp_path / "a.jsonl", 10.0, [1]), _write(tmp_path / "b.jsonl", 20.0, [2])]
    result = combine(paths, "a GPU", "abc", meta={"num_cores": 16})
    assert [(row["repeat"], row["tok_s"]) for row in result["rows"]] == [(0, 20.0)]
    assert result["meta"] == {"num_cores": 16, "gpu": "a GPU", "commit": "abc"}
    rows = combine(paths, "a GPU", "abc", keep=True)["rows"]
    assert [(row["repeat"], row["tok_s"], row["tokens_equal"]) for row in rows] == [(0, 10.0, True), (1, 20.0, False)]


def test_the_command_writes_page_and_plot(tmp_path: Path) -> None:
    """And prints the tables where no page is named."""
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    result.write_text(json.dumps({"rows": [OURS, STOCK]}))
    page.write_text("<!-- serving -->\n<!-- /serving -->\n")
    command = [sys.executable, "-m", "bench.serving_h200", "report", str(result), "--plots", str(tmp_path / "plots")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert _line(printed, "flat")[2] == "1100"
    subprocess.run([*command, "--page", str(page)], cwd=ROOT, check=True)
    assert page.read_text() == f"<!-- serving -->\n{printed}<!-- /serving -->\n"
    assert (tmp_path / "plots" / "serving.svg").read_text().startswith("<svg")


# Two layers as a profile has them: the experts that are there are computed beside the fetch, kernels overlap, and the
# sum starts early. The first layer fetches nothing, the second waits 200 µs.
RAW = [
    [0.0, 4.0, "_fetch", 7], [0.2, 5.0, "_place_experts", 8], [3.0, 150.0, "gate_up_kernel", 8],
    [140.0, 100.0, "down_kernel", 8], [240.5, 0.5, "_stamp", 8], [241.5, 1.0, "gate_up_kernel", 7],
    [242.5, 1.0, "down_kernel", 7], [243.0, 5.0, "sum_kernel", 7],
    [300.0, 445.0, "_fetch", 7], [300.2, 5.0, "_place_experts", 8], [303.0, 150.0, "gate_up_kernel", 8],
    [440.0, 104.0, "down_kernel", 8], [544.5, 0.5, "_stamp", 8], [545.0, 1.0, "Memcpy", 9],
    [745.0, 14.0, "gate_up_kernel", 7], [746.0, 20.0, "down_kernel", 7], [747.0, 24.0, "sum_kernel", 7],
    [800.0, 4.0, "_fetch", 7],
]  # fmt: skip
PROFILE = {
    "raw": RAW, "span_us": 20000.0, "cpu": {"cudaGraphLaunch": [2, 1.0]},
    "top": [["gate_up_kernel", 4, 3000.0], ["down_kernel", 4, 1000.0], ["_fetch", 4, 898.0], ["other", 1, 9.0]],
}  # fmt: skip


def test_a_profile_is_what_the_timeline_reads() -> None:
    """Kernels in order of start however they come, sums by kernel and by call of CUDA, and no other call."""
    kernels: list[Any] = [(name, start, us, stream) for start, us, name, stream in RAW]
    calls = [("cudaGraphLaunch", 1.0, 4.0, None), ("aten::mm", 2.0, 9.0, None), ("cudaGraphLaunch", 3.0, 6.0, None)]
    made = summary(reversed(kernels), calls)
    assert [list(event) for event in made["raw"]] == RAW
    assert made["span_us"] == 800.0
    assert made["cpu"] == {"cudaGraphLaunch": [2, 10.0]}
    assert made["top"][0] == ["_fetch", 3, 453.0]
    assert ["gate_up_kernel", 4, 315.0] in made["top"]
    assert case_row("x", made, 2)[4:] == ["1 of 2", "0.2", "55 %", "3.0"]


def test_layers_of_a_timeline() -> None:
    """Waits are from the stamp to the late experts' first kernel; a layer that is cut off is left out."""
    idle, fetching = read_layers(RAW)
    fields = ("fetch_us", "resident_us", "waited_us", "added_us", "whole_us")
    assert [getattr(idle, field) for field in fields] == pytest.approx([4.0, 240.0, 0.0, 3.0, 248.0])
    assert [getattr(fetching, field) for field in fields] == pytest.approx([445.0, 244.0, 200.0, 3.0, 471.0])
    assert (idle.is_fetching, fetching.is_fetching) == (False, True)


def test_a_case_is_told_per_step() -> None:
    """Over both steps by kernels, and of the last layers by the timeline: 245 of 445 µs were hidden."""
    assert case_row("x", PROFILE, 2) == ["x", "10.0", "2.0", "0.4", "1 of 2", "0.2", "55 %", "3.0"]
    assert case_row("x", PROFILE, 1)[4:] == ["1 of 1", "0.2", "55 %", ""]


def test_picked_layers() -> None:
    """The mean of those that fetch nothing, and three of those that do, by the length of the fetch."""
    layers = [Layer(us, 240.0, us / 2, 3.0, 500.0) for us in (400.0, 4.0, 200.0, 8.0, 600.0)]
    rows = layer_rows(layers)
    assert [row[1] for row in rows] == ["6", "200", "400", "600"]
    assert [row[3] for row in rows] == ["3", "100", "200", "300"]


def test_the_timeline_shows_the_case_that_fetches_most() -> None:
    """And says nothing of layers that fetch where none does."""
    quiet = PROFILE | {"raw": RAW[:8]}
    assert "step of `busy`" in report_timeline({"quiet": quiet, "busy": PROFILE}, 2)
    assert "longest" not in report_timeline({"quiet": quiet}, 2)


def test_a_profile_gets_its_meta_data(tmp_path: Path) -> None:
    """Of a result of the same machine, with the commit that ran; the table is the same with and without them."""
    raw, out, meta, page = (tmp_path / name for name in ("raw.json", "out.json", "meta.json", "page.md"))
    raw.write_text(json.dumps({"x": PROFILE}))
    meta.write_text(json.dumps({"meta": {"commit": "old", "num_cores": 16}}))
    page.write_text("<!-- timeline -->\n<!-- /timeline -->\n")
    command = [sys.executable, "-m", "bench.matrix.timeline", "--layers", "2"]
    refused = subprocess.run([*command, raw, "--out", out], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "--out wants --meta and --commit" in refused.stderr
    subprocess.run([*command, raw, "--meta", meta, "--commit", "new", "--out", out], cwd=ROOT, check=True)
    assert json.loads(out.read_text())["meta"] == {"commit": "new", "num_cores": 16}
    printed = subprocess.run([*command, raw], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    subprocess.run([*command, out, "--page", page], cwd=ROOT, check=True)
    assert page.read_text() == f"<!-- timeline -->\n{printed}<!-- /timeline -->\n"
