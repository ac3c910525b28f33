"""A day of a vLLM deployment as its metrics tell it: how full KV was, how many requests ran and waited.

Read from what Prometheus' query_range returns, or from a CSV file. With several engines, figures are means over them.
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.outcome import find_quantile

SERIES = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",  # its name before vLLM 0.11
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
COLUMNS = ("time", "kv_usage", "running", "waiting")
FULL = 0.9
"""Share of KV in use from which the next request or block may not fit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of an engine's metrics."""

    at_s: float
    kv_usage: float
    """Share of KV in use, 0 to 1."""
    running: float
    waiting: float

    @property
    def is_full(self) -> bool:
        """Return whether KV is full for practical purposes."""
        return self.kv_usage >= FULL


@dataclass(frozen=True, slots=True)
class Usage:
    """Readings in order of time, at least one."""

    samples: tuple[Sample, ...]

    def kv_usage(self, quantile: float) -> float:
        """Return a quantile of KV's use."""
        return find_quantile([one.kv_usage for one in self.samples], quantile)

    def demand(self, quantile: float) -> float:
        """Return a quantile of the requests that were there, running or waiting."""
        return find_quantile([one.running + one.waiting for one in self.samples], quantile)

    @property
    def waiting_share(self) -> float:
        """Return the share of readings with requests waiting."""
        return sum(one.waiting > 0 for one in self.samples) / len(self.samples)

    @property
    def full_share(self) -> float:
        """Return the share of readings with KV full."""
        return sum(one.is_full for one in self.samples) / len(self.samples)

    @property
    def short_share(self) -> float:
        """Return the share of readings with requests waiting while KV is full: those that memory holds up."""
        return sum(one.is_full and one.waiting > 0 for one in self.samples) / len(self.samples)

    @property
    def hours(self) -> float:
        """Return the hours between the first reading and the last."""
        return (self.samples[-1].at_s - self.samples[0].at_s) / 3600


def read_usage(paths: list[Path]) -> Usage:
    """Return the readings of one CSV file, or of one or more files of Prometheus' answers."""
    if len(paths) == 1 and paths[0].suffix.lower() == ".csv":
        return _checked(_read_csv(paths[0]), str(paths[0]))
    series: dict[str, dict[float, list[float]]] = {name: defaultdict(list) for name in COLUMNS[1:]}
    for path in paths:
        if path.suffix.lower() == ".csv":
            raise ConfigError(
                f"{path}: want one CSV file alone, there are {len(paths)} files; give it without the others"
            )
        _add_prometheus(path, series)
    source = ", ".join(map(str, paths))
    missing = [name for name, found in series.items() if not found]
    if missing:
        wanted = ", ".join(metric for metric, name in SERIES.items() if name in missing)
        raise ConfigError(f"{source}: want range queries of {wanted}; there are none of {', '.join(missing)}")
    usage, running, waiting = (
        {at_s: sum(values) / len(values) for at_s, values in series[name].items()} for name in COLUMNS[1:]
    )
    common = sorted(usage.keys() & running.keys() & waiting.keys())
    return _checked([Sample(at_s, usage[at_s], running[at_s], waiting[at_s]) for at_s in common], source)


def _checked(samples: list[Sample], source: str) -> Usage:
    if not samples:
        raise ConfigError(f"{source}: want readings of KV use, running and waiting at the same times, there are none")
    for one in samples:
        if not 0 <= one.kv_usage <= 1:
            raise ConfigError(f"{source}: want KV use as a share from 0 to 1, it is {one.kv_usage} at {one.at_s:.0f} s")
        if not math.isfinite(one.at_s):
            raise ConfigError(f"{source}: want times in seconds or as ISO dates, there is {one.at_s}")
        if not (0 <= one.running < math.inf and 0 <= one.waiting < math.inf):
            raise ConfigError(f"{source}: want counts of requests, there are {one.running} and {one.waiting}")
    return Usage(tuple(samples))


def _read_csv(path: Path) -> list[Sample]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin it with a byte order mark
            rows = [{name: row[name] for name in COLUMNS} for row in csv.DictReader(file)]
        samples = [
            Sample(_seconds(row["time"]), float(row["kv_usage"]), float(row["running"]), float(row["waiting"]))
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: want a CSV file with the columns {', '.join(COLUMNS)} ({error})") from error
    return sorted(samples, key=lambda one: one.at_s)


def _add_prometheus(path: Path, series: Mapping[str, dict[float, list[float]]]) -> None:
    """Add one answer's values to those of its metrics."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        for result in document["data"]["result"]:
            name = SERIES.get(result["metric"].get("__name__", ""))
            for at_s, value in result["values"] if name else ():
                series[str(name)][float(at_s)].append(float(value))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"{path}: want Prometheus' answer to a range query (JSON), or a .csv file ({error!r})"
        raise ConfigError(message) from error


def _seconds(text: str) -> float:
    """Return a time in seconds: as it is, or of an ISO date, UTC if it names no zone."""
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
