"""What a page shows of the matrix's result: the closed batch's ratios, and a burst over time, as SVG. Pure."""

from collections.abc import Sequence

from bench.matrix.combine import OURS, RIVAL
from bench.matrix.report import GOALS, Compared, Rows, compare
from elasticmoe.runtime.simulator.svg import Points, chart, stack, thin

OVER_TIME = {
    "away": "experts away from the device, by seconds since the burst",
    "running": "requests that run",
    "tpot_ms": "ms between two tokens of a request",
}
"""Of a burst's series, one chart each."""


def draw_ratios(rows: Rows) -> str:
    """Return the closed batch's ratios by GiB of KV beside their goals, one chart a routing."""
    cells = compare(rows)
    return stack([_ratios(cells, routing) for routing in GOALS])


def _ratios(cells: Sequence[Compared], routing: str) -> str:
    found = [one for one in cells if one.goal is not None and one.cell["routing"] == routing]
    ours: Points = [(one.cell["kv_gib"], one.ratio) for one in found if one.ratio is not None]
    goals: Points = list(GOALS[routing].items())
    return chart(f"tokens/s over stock's, by GiB of KV: closed batch, {routing}", {"ours": ours, "goal": goals})


def draw_burst(rows: Rows) -> str | None:
    """Return the first burst that ours and stock served over time: experts away, requests, TPOT; None without one.

    Rows without their series over time are left out.
    """
    cells = compare([row for row in rows if row["workload"] == "burst" and row.get("series")])
    both = next((one for one in cells if one.ours and one.stock), None)
    if both is None:
        return None
    sides = {OURS: _with_away(both.ours[0]["series"]), RIVAL: both.stock[0]["series"]}
    charts = []
    for field, title in OVER_TIME.items():
        lines = {name: _points(series, field) for name, series in sides.items()}
        charts.append(chart(title, {name: points for name, points in lines.items() if points}))
    return stack(charts)


def _with_away(series: Rows) -> Rows:
    most = max(one["resident"] for one in series)
    return [one | {"away": most - one["resident"]} for one in series]


def _points(series: Rows, field: str) -> Points:
    return thin([(one["s"], one[field]) for one in series if one.get(field) is not None])
