"""One result out of the runs of all systems: ratios to stock, tokens beside the replay's. Pure but for its files."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.matrix.agreement import agreements
from bench.matrix.cells import ANY_BUS, CELL
from bench.serving.errors import BadScenario
from bench.serving.files import parse_object, read_text
from bench.serving.meta import collect_meta

NEEDED = ("system", "repeat", "tok_s")
"""What each row has beside its cell."""
RIVAL, OURS, REPLAY = "stock-graphs", "ours", "replay"


def tokens_path(out: Path) -> Path:
    """Return where a run leaves the tokens of its rows."""
    return out.with_name(out.name + ".tokens.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, none without a file; raises BadScenario for a line that is none.

    The last line may be broken off, and is left out then.
    """
    lines = read_text(path).splitlines() if path.exists() else []
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            objects.append(parse_object(line, f"{path}:{number}"))
        except BadScenario:
            if number < len(lines) or line.endswith("}"):
                raise
    return objects


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's file; raises BadScenario if it has none."""
    rows = read_lines(path)
    if not rows:
        there = "it has none" if path.exists() else "there is no such file"
        raise BadScenario(f"{path}: want rows of `run`, {there}; leave it out or name another")
    refuse_other_rows(rows, str(path))
    return rows


def refuse_other_rows(rows: Iterable[Any], where: str) -> None:
    """Raise BadScenario if one of the rows isn't a run of a cell."""
    for row in rows:
        lacks = [name for name in (*CELL, *NEEDED) if not isinstance(row, dict) or name not in row]
        if lacks:
            raise BadScenario(f"{where}: want rows of cells, one has no {', '.join(lacks)}; name another file")


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what rows of different systems must share to be compared."""
    return tuple(row[name] for name in CELL)


def add_ratios(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with its tokens/s over the median of stock with graphs in the same cell, None without."""
    rows = list(rows)
    rivals: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["system"] == RIVAL:
            rivals[cell_of(row | ANY_BUS)].append(row["tok_s"])
    medians = {cell: statistics.median(values) for cell, values in rivals.items()}
    beside = [medians.get(cell_of(row | ANY_BUS)) for row in rows]
    return [row | {"ratio": row["tok_s"] / rival if rival else None} for row, rival in zip(rows, beside, strict=True)]


def compare_tokens(ours: dict[str, Any], replays: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return how many requests both ran in the same batches, by the replay with most of them, and if all are equal."""
    best: tuple[int, int] | None = None
    for replay in replays:
        same = [n for n, chain in ours["company"].items() if replay["company"].get(n) == chain]
        num_equal = sum(ours["tokens"][n] == replay["tokens"][n] for n in same)
        best = max(best or (0, 0), (len(same), num_equal))
    num_same, num_equal = best or (0, 0)
    return {"num_comparable": num_same, "tokens_equal": num_same == num_equal if num_same else None}


def add_tokens(rows: list[dict[str, Any]], by_key: dict[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, ours with `tokens_equal` and `num_comparable`, ours and stock's with their agreements.

    `by_key` has the kept tokens by system, cell and repeat.
    """
    replays: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for entry in by_key.values():
        if entry["system"] == REPLAY:
            replays[tuple(entry["cell"])].append(entry)
    added = []
    for row in rows:
        own = by_key.get((row["system"], *cell_of(row), row["repeat"]))
        told: dict[str, Any] = {}
        if own is not None and row["system"] in (OURS, RIVAL):
            told |= agreements(own, by_key.values(), RIVAL)
        if own is not None and row["system"] == OURS:
            told |= compare_tokens(own, replays[cell_of(row)])
        added.append(row | told)
    return added


def combine(
    paths: list[Path], device: str, commit: str | None, *, meta: dict[str, Any] | None = None, keep: bool = False
) -> dict[str, Any]:
    """Return the whole result, with this machine's meta data if none are given.

    A row that a later file or line has again replaces the earlier one; with `keep` a later file's is a further repeat.
    Raises BadScenario for a file that has no rows, or is named twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise BadScenario(f"want each run once, one is named twice: {', '.join(map(str, paths))}")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    tokens: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        before = Counter((system, *cell) for system, *cell, _ in rows) if keep else Counter()
        for row in read_rows(path):
            repeat = row["repeat"] + before[row["system"], *cell_of(row)]
            key = row["system"], *cell_of(row), repeat
            rows[key] = row | {"repeat": repeat}
            tokens.pop(key, None)
        for entry in read_lines(tokens_path(path)):
            repeat = entry["repeat"] + before[entry["system"], *entry["cell"]]
            tokens[entry["system"], *entry["cell"], repeat] = entry | {"repeat": repeat}
    told = (meta or asdict(collect_meta())) | {"gpu": device} | ({"commit": commit} if commit else {})
    return {"meta": told, "rows": add_tokens(add_ratios(rows.values()), tokens)}
