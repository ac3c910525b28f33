"""A result that is there is replaced by a whole one or stays, whichever bench writes it."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import fetch_gpu, kernel_gpu, serving_gpu
from elasticmoe.runtime.errors import UnsupportedError

BENCH = Path(serving_gpu.__file__).parent
IN_PLACE = re.compile(r"\.write_(text|bytes)\(|open\([^)\n]*\"[wx]b?\"|json\.dump\(|savefig\(")
LOGS = {"demo_times.py", "cluster/reach.py", "serving/server.py"}
"""What a process says is written as it comes."""
Measure = Callable[[argparse.Namespace, dict[str, Any]], Iterator[None]]


def test_no_bench_writes_a_result_in_place() -> None:
    """But logs; the matrix appends its rows, one by one."""
    found = {str(path.relative_to(BENCH)) for path in BENCH.rglob("*.py") if IN_PLACE.search(path.read_text())}
    assert found == LOGS


def _measure_one(out: Path, seen: list[str]) -> Measure:
    """Return a measurement that looks at what is written after its first part, and then is ended."""

    def measure(_: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
        result["rows"] = [1]
        yield
        seen.append(out.read_text())
        raise KeyboardInterrupt

    return measure


@pytest.mark.parametrize(
    ("bench", "words", "measures"),
    [(kernel_gpu, ["run", "qwen3-30b"], "run_shapes"), (fetch_gpu, [], "measure")],
)
def test_what_a_gpu_bench_has_measured_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: ModuleType, words: list[str], measures: str
) -> None:
    """After each part, in the old result's place: who reads that reads it to its end."""
    out, seen = tmp_path / "result.json", list[str]()
    out.write_text("old")
    monkeypatch.setattr(sys, "argv", ["bench", *words, "--out", str(out)])
    monkeypatch.setattr(bench, "meta", lambda: {"device": "none"})
    monkeypatch.setattr(bench, measures, _measure_one(out, seen))
    with out.open() as reader:
        with pytest.raises(KeyboardInterrupt):
            bench.main()
        assert reader.read() == "old"
    assert [json.loads(text) for text in seen] == [{"meta": {"device": "none"}, "rows": [1]}]
    assert list(tmp_path.iterdir()) == [out]


def test_runs_are_combined_into_a_whole_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""
    run = {"tok_s": 2.0, "peak": 4, "schedule": [[1]], "tokens": [[7, 8]]}
    for system in serving_gpu.SYSTEMS:
        (tmp_path / system).write_text(json.dumps(run | {"system": system}))
    out = tmp_path / "result.json"
    out.write_text("old")
    paths = [str(tmp_path / system) for system in serving_gpu.SYSTEMS]
    monkeypatch.setattr(sys, "argv", ["bench", "combine", *paths, "--device", "none", "--out", str(out)])
    with out.open() as reader:
        assert serving_gpu.main() == 0
        assert reader.read() == "old"
    result = json.loads(out.read_text())
    assert (result["ratio_tok_s"], result["tokens_equal"], result["num_tokens"]) == (1.0, True, 2)


def test_a_model_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """As every bench and command refuses it."""
    config = json.loads((BENCH / "models" / "qwen3-30b-a3b.json").read_text())
    assert serving_gpu.expert_bytes(BENCH / "models" / "qwen3-30b-a3b.json") == 54 * 2**30
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**6}))
    with pytest.raises(UnsupportedError, match="has 1000000 for num_hidden_layers"):
        serving_gpu.expert_bytes(tmp_path / "config.json")
