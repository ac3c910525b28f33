"""Runs the tests that launch kernels in Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parents[1].rglob("interpreted*.py"))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes, but many more on a busy machine
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_kernels_are_the_reference_in_the_interpreter(file: Path) -> None:
    """Every test in `interpreted*.py` passes on the CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-q", "--timeout=0", "-p", "no:cacheprovider", "-p", "no:randomly"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=file.parents[2],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
