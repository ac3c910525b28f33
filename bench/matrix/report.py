"""What a page says of the matrix's result: Markdown tables by workload, and which goals are missed. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.matrix.cells import ANY_BUS, CELL
from bench.matrix.combine import OURS, REPLAY, RIVAL, cell_of
from bench.matrix.page import table

Rows = list[dict[str, Any]]

GOALS = {
    "skewed": {0.5: 2.7, 1.0: 1.8, 2.0: 1.2, 4.0: 1.0, 8.0: 0.98},
    "flat": {0.5: 1.2, 1.0: 1.1, 2.0: 0.98, 4.0: 0.98, 8.0: 0.98},
}
"""Tokens/s over stock's that the closed batch should reach, by GiB of KV, in plain cells."""
PLAIN = {"gpus": 1, "bus_gb_s": None, "has_logprobs": False}
TITLES = {
    "closed": "Closed batch, {num_requests} requests at once",
    "light": "Light load, {num_requests} requests",
    "open": "Open loop: the trace, faster by the rate",
    "burst": "A burst and the calm after it, {num_requests} requests",
}
SPEED = (
    "routing", "KV, GiB", "tok/s", "stock", "ratio", "goal", "preempted", "stock", "peak", "stock", "least resident",
    "waited, s", "of, s",
)  # fmt: skip
LATENCY = (
    "routing", "KV, GiB", "TTFT, s", "P99", "stock", "P99", "TPOT, ms", "P99", "stock", "P99", "kept", "stock",
)  # fmt: skip
AGREEMENT = ("routing", "KV, GiB", "ours as stock", "ours as itself in most room", "stock as itself in most room")
OTHERS = ("system", "workload", "routing", "KV, GiB", "tok/s", "ratio", "TTFT, s", "P99 TPOT, ms", "preempted", "peak")
STARTS = ("system", "ready after, s", "GB in use", "pinning, s", "waited for, s")
NONE = "–"


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of one cell by ours and by stock; one of them may have none."""

    cell: dict[str, Any]
    ours: Rows
    stock: Rows

    @property
    def goal(self) -> float | None:
        """Return the goal for the ratio, None where there is none."""
        is_plain = self.cell | PLAIN | {"workload": "closed"} == self.cell
        return GOALS[self.cell["routing"]].get(self.cell["kv_gib"]) if is_plain else None

    @property
    def ratio(self) -> float | None:
        """Return the median of the ratios."""
        return middle(self.ours, "ratio")


def middle(rows: Rows, field: str) -> float | None:
    """Return the median of a figure over the runs that have it."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return statistics.median(values) if values else None


def compare(rows: Rows) -> list[Compared]:
    """Return the cells that ours or stock served, in the tables' order; stock's stands beside every bus."""
    by_cell: dict[str, dict[tuple[Any, ...], Rows]] = {OURS: defaultdict(list), RIVAL: defaultdict(list)}
    for row in rows:
        if row["system"] in by_cell:
            by_cell[row["system"]][cell_of(row)].append(row)
    cells = [dict(zip(CELL, cell, strict=True)) for cell in set(by_cell[OURS]) | set(by_cell[RIVAL])]
    return [
        Compared(cell, by_cell[OURS][cell_of(cell)], by_cell[RIVAL][cell_of(cell | ANY_BUS)])
        for cell in sorted(cells, key=_order)
    ]


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    place = list(TITLES).index(cell["workload"]), cell["gpus"], cell["bus_gb_s"] or 0.0, cell["has_logprobs"]
    return (*place, cell["routing"] != "skewed", cell["kv_gib"], cell["rate"] or 0.0)


def report(rows: Rows) -> str:
    """Return the tables in Markdown, each workload's goals and comparisons of tokens below it."""
    groups: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for one in compare(rows):
        groups[tuple(one.cell[name] for name in ("workload", *PLAIN))].append(one)
    parts = [part for group in groups.values() for part in _section(group)]
    others = [row for row in rows if row["system"] not in (OURS, RIVAL, REPLAY)]
    return "\n\n".join([*parts, *_others(others), *_starts(rows)])


def _section(group: list[Compared]) -> Iterator[str]:
    cell, requests = group[0].cell, (group[0].ours or group[0].stock)[0]["num_requests"]
    title = TITLES[cell["workload"]].format(num_requests=requests)
    gpus = f", {cell['gpus']} GPUs" if cell["gpus"] > 1 else ""
    bus = f", fetches at {cell['bus_gb_s']:g} GB/s" if cell["bus_gb_s"] else ""
    logprobs = ", each token's logprob asked for" if cell["has_logprobs"] else ""
    yield f"**{title}{gpus}{bus}{logprobs}** ({_runs(group)}):"
    yield table(SPEED, map(_speed, group))
    yield table(LATENCY, map(_latency, group))
    yield from filter(None, (_goals(group), _tokens(group), _agreement(group)))


def _runs(group: list[Compared]) -> str:
    ours, stock = [len(one.ours) for one in group], [len(one.stock) for one in group]
    return f"runs of a cell: ours {_span(ours)}, stock {_span(stock)}"


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def _name(cell: dict[str, Any]) -> list[str]:
    rate = f", rate {cell['rate']:g}" if cell["rate"] else ""
    return [cell["routing"] + rate, f"{cell['kv_gib']:g}"]


def _speed(one: Compared) -> list[str]:
    both = [(one.ours, "tok_s"), (one.stock, "tok_s")]
    counts = [(runs, field) for field in ("preemptions", "peak") for runs in (one.ours, one.stock)]
    return [
        *_name(one.cell),
        *(_show(middle(*each), 0) for each in both),
        _ratio(one.ours),
        _show(one.goal, 2),
        *(_show(middle(*each), 0) for each in [*counts, (one.ours, "resident_min")]),
        *(_show(middle(one.ours, field), 1) for field in ("exposed_s", "wall_s")),
    ]


def _ratio(runs: Rows) -> str:
    values = [row["ratio"] for row in runs if row.get("ratio") is not None]
    if len(values) < 2:
        return _show(values[0] if values else None, 3)
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _latency(one: Compared) -> list[str]:
    times = [("ttft_ms", 2, 1000), ("tpot_ms", 1, 1)]
    return [
        *_name(one.cell),
        *(
            _show(middle(runs, prefix + field), digits, unit)
            for field, digits, unit in times
            for runs in (one.ours, one.stock)
            for prefix in ("", "p99_")
        ),
        *(_percent(middle(runs, "goodput_ok")) for runs in (one.ours, one.stock)),
    ]


def _show(value: float | None, digits: int, unit: float = 1) -> str:
    return NONE if value is None else f"{value / unit:.{digits}f}"


def _percent(share: float | None, digits: int = 0) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def _goals(group: list[Compared]) -> str:
    asked = [(one.cell, one.ratio, one.goal) for one in group if one.goal is not None]
    measured = [(cell, ratio, goal) for cell, ratio, goal in asked if ratio is not None and goal is not None]
    missed = [
        f"{cell['routing']} at {cell['kv_gib']:g} GiB ({ratio:.3f} of {goal:g})"
        for cell, ratio, goal in measured
        if ratio < goal
    ]
    if not measured:
        return ""
    return f"Below its goal: {', '.join(missed)}." if missed else f"All {len(measured)} goals are reached."


def _tokens(group: list[Compared]) -> str:
    told = [row for one in group for row in one.ours if row.get("tokens_equal") is not None]
    if not told:
        return ""
    requests = sum(row["num_comparable"] for row in told)
    differing = sum(not row["tokens_equal"] for row in told)
    end = f"differ in {differing} of the runs" if differing else "are equal"
    return (
        f"In {len(told)} runs {requests} requests were in the same batches as in a replay with every expert resident: "
        f"their tokens {end}."
    )


def _agreement(group: list[Compared]) -> str:
    shares = [
        [middle(one.ours, "agrees_with_stock"), *(middle(runs, "agrees_with_itself") for runs in (one.ours, one.stock))]
        for one in group
    ]
    rows = [
        [*_name(one.cell), *(_percent(share, 1) for share in each)]
        for one, each in zip(group, shares, strict=True)
        if any(share is not None for share in each)
    ]
    text = f"Tokens chosen alike after the same ones:\n\n{table(AGREEMENT, rows)}" if rows else ""
    told = [row for one in group for row in one.ours if "logprob_apart_max" in row]
    if told:
        median, most = middle(told, "logprob_apart_median"), max(row["logprob_apart_max"] for row in told)
        text += f"\n\nTheir logprobs are {median:.1e} apart in the median and {most:.1e} at most"
        margins = [row["margin_where_apart_max"] for row in told if "margin_where_apart_max" in row]
        if margins:
            text += f"; where stock chose another token, its two best were {max(margins):.1e} apart at most"
        text += "."
    return text


def _others(rows: Rows) -> Iterator[str]:
    groups: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        groups[row["system"], *cell_of(row)].append(row)
    if groups:
        yield "**Other systems**:"
        yield table(OTHERS, [_other(runs) for runs in groups.values()])


def _other(runs: Rows) -> list[str]:
    one = runs[0]
    gpus = f", {one['gpus']} GPUs" if one["gpus"] > 1 else ""
    return [
        one["system"], one["workload"] + gpus, *_name(one), _show(middle(runs, "tok_s"), 0), _ratio(runs),
        _show(middle(runs, "ttft_ms"), 2, 1000), _show(middle(runs, "p99_tpot_ms"), 1),
        *(_show(middle(runs, field), 0) for field in ("preemptions", "peak")),
    ]  # fmt: skip


def _starts(rows: Rows) -> Iterator[str]:
    """Tell each start of one GPU once, ours first; its rows share the seconds until it was ready."""
    started = {(row["system"], row["ready_s"]): row for row in rows if row["gpus"] == 1 and row.get("ready_s")}
    told = [row for name in (OURS, RIVAL) for (system, _), row in sorted(started.items()) if system == name]
    if told:
        yield "**Starts**:"
        yield table(STARTS, [_start(row) for row in told])


def _start(row: dict[str, Any]) -> list[str]:
    used = (row.get("gpu_bytes") or [{}])[0].get("used")
    pinned, waited = ((row.get(field) or [None])[0] for field in ("pin_s", "pin_waited_s"))
    return [row["system"], _show(row["ready_s"], 0), _show(used, 1, 1e9), _show(pinned, 1), _show(waited, 1)]
