"""Requests to simulate: the same for the same seed, with the lengths that were published."""

import statistics
from pathlib import Path

import pytest

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.requests import Arrival
from elasticmoe.runtime.simulator.workload import burst_then_calm, closed_batch, excerpt, read_trace, sharegpt

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,374,44
2023-11-16 18:15:50.9951690,396,0
2023-11-16 18:16:00,5000,3000
"""


def test_the_closed_batch_is_the_measured_one() -> None:
    """256 requests at once, 168 tokens in and 205 out on average."""
    batch = closed_batch()
    assert {one.at_s for one in batch} == {0.0}
    assert statistics.mean(one.prompt_tokens for one in batch) == pytest.approx(168, abs=1)
    assert statistics.mean(one.output_tokens for one in batch) == pytest.approx(205, abs=1)


def test_sharegpt_has_its_means_and_its_rate() -> None:
    """215 in and 198 out, ten a second; cut answers are as long as allowed."""
    requests = sharegpt(1000, 10.0, 4096)
    assert statistics.mean(one.prompt_tokens for one in requests) == pytest.approx(215.2, rel=0.01)
    assert statistics.mean(one.output_tokens for one in requests) == pytest.approx(198.3, rel=0.01)
    assert requests[-1].at_s == pytest.approx(100, rel=0.1)
    assert max(one.output_tokens for one in sharegpt(1000, 10.0, 512)) == 512
    assert sharegpt(50, 10.0, 512, seed=1) == sharegpt(50, 10.0, 512, seed=1) != sharegpt(50, 10.0, 512, seed=2)


def test_calm_follows_the_burst() -> None:
    """The burst at its time, then a trickle of the same lengths until the end."""
    burst = (Arrival(0.0, 7, 8), Arrival(0.0, 9, 10))
    requests = burst_then_calm(burst, calm_s=100.0, rate_s=0.5)
    assert requests[:2] == burst
    trickle = requests[2:]
    assert 30 < len(trickle) < 70
    assert all(0 < one.at_s < 100 for one in trickle)
    assert {(one.prompt_tokens, one.output_tokens) for one in trickle} == {(7, 8), (9, 10)}


def test_a_trace_starts_at_zero(tmp_path: Path) -> None:
    """Times are seconds since the first request, to the microsecond; no request is empty."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    trace = read_trace(path)
    assert [round(one.at_s, 4) for one in trace] == [0.0, 4.4952, 13.5]
    assert (trace[1].prompt_tokens, trace[1].output_tokens) == (396, 1)


def test_an_excerpt_starts_anew_and_fits(tmp_path: Path) -> None:
    """Gaps are stretched; half of the context at most is the answer, the prompt what is left."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    part = excerpt(read_trace(path), 1, 2, stretch=2.0, max_tokens=4096)
    assert [round(one.at_s, 3) for one in part] == [0.0, 18.01]
    assert (part[1].prompt_tokens, part[1].output_tokens) == (2048, 2048)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", None])
def test_another_file_is_refused(tmp_path: Path, text: str | None) -> None:
    """Missing, without the columns, or with something else in them."""
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="want a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens"):
        read_trace(path)
