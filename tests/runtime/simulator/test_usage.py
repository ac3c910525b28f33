"""A deployment's metrics, from Prometheus or a CSV file; what can't be used is refused with what was wanted."""

import json
from pathlib import Path

import pytest

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.usage import Sample, Usage, read_usage

CSV = "time,kv_usage,running,waiting\n60,0.95,10,2\n0,0.5,4,0\n"


def answer(path: Path, *series: tuple[str, list[list[object]]]) -> Path:
    """Write a Prometheus answer with these series."""
    result = [
        {"metric": {"__name__": name, "pod": str(n)}, "values": values} for n, (name, values) in enumerate(series)
    ]
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    return path


def test_a_csv_file_is_read_in_order_of_time(tmp_path: Path) -> None:
    """Columns time, kv_usage, running, waiting; times may be ISO dates."""
    path = tmp_path / "day.csv"
    path.write_text(CSV)
    assert read_usage([path]).samples == (Sample(0, 0.5, 4, 0), Sample(60, 0.95, 10, 2))
    path.write_text("time,kv_usage,running,waiting\n1970-01-01T00:01:00,0,0,0\n1970-01-01T01:01:00+01:00,1,0,0\n")
    assert [one.at_s for one in read_usage([path]).samples] == [60, 60]


def test_a_byte_order_mark_is_not_a_columns_name(tmp_path: Path) -> None:
    """Spreadsheets write one."""
    path = tmp_path / "day.csv"
    path.write_text(CSV, encoding="utf-8-sig")
    assert len(read_usage([path]).samples) == 2


def test_a_csv_file_stands_alone(tmp_path: Path) -> None:
    """Beside other files it would have to be joined with them."""
    with pytest.raises(ConfigError, match="want one CSV file alone, there are 2 files"):
        read_usage([tmp_path / "day.csv", tmp_path / "other.csv"])


def test_prometheus_answers_are_joined(tmp_path: Path) -> None:
    """One file a metric or one for all; several engines are averaged; only common times count."""
    usage = answer(
        tmp_path / "usage.json",
        ("vllm:kv_cache_usage_perc", [[0, "0.2"], [30, "0.4"], [60, "0.6"]]),
        ("vllm:kv_cache_usage_perc", [[0, "0.4"], [30, "0.6"]]),
        ("up", [[0, "1"]]),
    )
    rest = answer(
        tmp_path / "rest.json",
        ("vllm:num_requests_running", [[0, "3"], [30, "5"]]),
        ("vllm:num_requests_waiting", [[0, "0"], [30, "1"]]),
    )
    samples = read_usage([usage, rest]).samples
    assert [one.kv_usage for one in samples] == pytest.approx([0.3, 0.5])
    assert [(one.running, one.waiting) for one in samples] == [(3, 0), (5, 1)]


def test_shares_of_the_day() -> None:
    """Of four readings one waits with KV full, one waits without, one is full without anyone waiting."""
    usage = Usage((Sample(0, 1.0, 9, 1), Sample(1, 0.5, 9, 1), Sample(2, 0.95, 9, 0), Sample(7200, 0.1, 2, 0)))
    assert (usage.waiting_share, usage.full_share, usage.short_share) == (0.5, 0.5, 0.25)
    assert (usage.kv_usage(0.99), usage.demand(0.99), usage.demand(0.25)) == (1.0, 10, 2)
    assert usage.hours == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "time,kv\n1,2\n", "want a CSV file with the columns time, kv_usage, running, waiting"),
        ("a.csv", "time,kv_usage,running,waiting\n", "there are none"),
        ("a.csv", "time,kv_usage,running,waiting\n0,95,1,1\n", "want KV use as a share from 0 to 1, it is 95.0"),
        ("a.csv", "time,kv_usage,running,waiting\n0,nan,1,1\n", "want KV use as a share"),
        ("a.csv", "time,kv_usage,running,waiting\n0,0.5,-1,1\n", "want counts of requests, there are -1.0"),
        ("a.csv", "time,kv_usage,running,waiting\n0,0.5,inf,1\n", "want counts of requests, there are inf"),
        (
            "a.csv",
            "time,kv_usage,running,waiting\nnan,0.5,1,1\n",
            "want times in seconds or as ISO dates, there is nan",
        ),
        ("a.csv", "time,kv_usage,running,waiting\nnoon,0.5,1,1\n", "want a CSV file"),
        ("a.csv", f"time,kv_usage,running,waiting\n0,0.5,1,{'1' * 200_000}\n", "want a CSV file"),
        ("a.json", "[" * 100_000, "want Prometheus' answer to a range query"),
        ("a.json", "{}", "want Prometheus' answer to a range query"),
        ("a.json", "time", "want Prometheus' answer to a range query"),
        ("a.json", '{"data": {"result": [{"metric": {"__name__": "vllm:num_requests_running"}}]}}', "want Prometheus'"),
        ("a.json", '{"data": {"result": []}}', "want range queries of vllm:kv_cache_usage_perc"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    """The error names the file and what was wanted."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_usage([path])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=r"gone\.csv"):
        read_usage([tmp_path / "gone.csv"])
