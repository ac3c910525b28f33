"""Where `goodput` keeps its promises in the table, and where it doesn't. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.simulation.cells import Row

LEAST_OF_STOCK = 0.98
ROUNDING = 1e-3
"""Of a ratio, within which two policies did the same."""
MOST_RECOVERY = 2.0
SLACK_S = 0.1
"""A few steps: what stands between a need's end and the first copy."""

NAMES = ("gpu", "routing", "kv_gib", "workload")
"""Of what makes a place."""
PROMISES = ("ratio_to_stock", "ratio_to_threshold", "tpot_p99_ms", "recovery_s")

Place = tuple[str, str, float, str]


def group_by_place(rows: Sequence[Row]) -> dict[Place, dict[str, Row]]:
    """Return the rows of each cell by policy."""
    places: dict[Place, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        places[row.gpu, row.routing, row.kv_gib, row.workload][row.policy] = row
    return dict(places)


def find_misses(policies: dict[str, Row]) -> dict[str, float]:
    """Return the promises that goodput misses in one cell, each with its number."""
    ours, stock, threshold = (policies[name] for name in ("goodput", "stock", "threshold"))
    misses = {}
    if ours.ratio_to_stock < LEAST_OF_STOCK:
        misses["ratio_to_stock"] = ours.ratio_to_stock
    if threshold.tpot_ok and threshold.ttft_ok and ours.ratio_to_stock < threshold.ratio_to_stock - ROUNDING:
        misses["ratio_to_threshold"] = round(ours.tok_s / threshold.tok_s, 4)
    if stock.tpot_ok and not ours.tpot_ok:
        misses["tpot_p99_ms"] = ours.tpot_p99_ms
    if ours.recovery_copy_s is not None:
        took_s = float("inf") if ours.recovery_s is None else ours.recovery_s
        if took_s > MOST_RECOVERY * ours.recovery_copy_s + SLACK_S:
            misses["recovery_s"] = took_s
    return misses


def judge(rows: Sequence[Row]) -> dict[str, object]:
    """Return how often each promise is missed, and every miss with its place."""
    places = group_by_place(rows)
    judged = [
        (dict(zip(NAMES, place, strict=True)), find_misses(policies))
        for place, policies in places.items()
        if "goodput" in policies
    ]
    return {"num_cells": len(judged)} | tally(judged, PROMISES)


def tally(judged: Sequence[tuple[dict[str, Any], dict[str, float]]], promises: Sequence[str]) -> dict[str, object]:
    """Return how often each promise is missed, and every miss with its place: of places and what each one misses."""
    counts = {name: sum(name in misses for _, misses in judged) for name in promises}
    return {"num_missed": counts, "missed": [place | misses for place, misses in judged if misses]}


def dump(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows as JSON-able data."""
    return [asdict(row) for row in rows]
