"""The bench of launches, whose layer is compiled for a GPU that isn't there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_both_ways_launch_a_layer(tmp_path: Path) -> None:
    """Sorting, two GEMMs, two more for late experts and the sum; where many tokens are sorted, by one launch more."""
    out = tmp_path / "result.json"
    words = ["bench/launches.py", "--tokens", "64,8192", "--calls", "2", "--turns", "3", "--out", str(out)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(row["tokens"], row["launches"]) for row in result["rows"]] == [(64, 6), (8192, 7)]
    for row in result["rows"]:
        for name in ("ours", "triton"):
            assert 0 < row[f"{name}_us"] <= row[f"{name}_median_us"]
    assert "triton" in result["meta"]["packages"]
