"""What a bench needs and the machine hasn't is told in one sentence, before anything else is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serving import needs
from bench.serving.errors import BenchError

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "bench/models/qwen3-30b-a3b.json"
WITHOUT = """
import runpy, sys
hidden, script, *words = sys.argv[1:]
sys.modules[hidden] = None  # as if it weren't installed
sys.argv = [script, *words]
sys.path.insert(0, ".")
if script.endswith(".py"):
    runpy.run_path(script, run_name="__main__")
else:
    runpy.run_module(script, run_name="__main__")
"""
PROFILES = ["bench.matrix.profiles", "--system", "ours", "--model", MODEL]
KERNEL = ["bench.kernel_gpu", "run", "qwen3-30b"]
SERVING = ["bench.serving_gpu", "run", "--system", "stock", "--model", MODEL]
MATRIX = ["bench.serving_h200", "run", "--system", "stock-graphs", "--model", MODEL, "--cells", "closed:flat:1"]
INSTALL = "use .venv/bin/python after `make setup`, or install elasticmoe[gpu] where there is a GPU"


def _run(out: Path, code: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words, "--out", str(out)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | (env or {})
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("hidden", "wanted", "words"),
    [
        *(("vllm", "vllm", words) for words in (KERNEL, PROFILES, SERVING, MATRIX, ["bench/burst_cpu.py"])),
        *(("triton", "torch and triton", words) for words in (KERNEL, ["bench.fetch_gpu"], ["bench/launches.py"])),
        *(("torch", "torch and triton", words) for words in (KERNEL, ["bench.fetch_gpu"], ["bench/launches.py"])),
    ],
    ids=lambda value: value[0].rpartition(".")[2] if isinstance(value, list) else value,
)
def test_a_package_that_is_not_there_is_named(tmp_path: Path, hidden: str, wanted: str, words: list[str]) -> None:
    """Status 1, one line, and nothing is written or started."""
    out = tmp_path / "result.json"
    done = _run(out, WITHOUT, hidden, *words)
    assert (done.returncode, done.stdout, out.exists()) == (1, "", False)
    assert done.stderr == f"The bench failed: want {wanted}, {sys.executable} has no {hidden}; {INSTALL}\n"


def test_the_demo_says_it_in_its_own_words() -> None:
    """It has a story, and ends it."""
    command = [sys.executable, "-c", WITHOUT, "vllm", "bench/demo.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"The demo failed: want vllm, {sys.executable} has no vllm; {INSTALL}" in done.stdout


def test_profiles_want_a_gpu_before_an_engine_starts(tmp_path: Path) -> None:
    """Not after the first case."""
    done = _run(tmp_path / "result.json", WITHOUT, "nothing", *PROFILES)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "The bench failed: want an NVIDIA GPU, torch finds none; run it on a machine that has one\n"


@pytest.mark.parametrize("words", [SERVING, MATRIX], ids=["serving_gpu", "serving_h200"])
@pytest.mark.parametrize(("version", "is_refused"), [("0.26.0", True), ("0.26.0+cpu", False)])
def test_a_vllm_for_gpus_wants_one(tmp_path: Path, words: list[str], version: str, *, is_refused: bool) -> None:
    """That for CPUs serves without one, and fails here for the model alone, which is none."""
    built = tmp_path / f"vllm-{version}.dist-info"
    built.mkdir()
    (built / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    words = [str(tmp_path / "gone") if word == MODEL else word for word in words]
    done = _run(tmp_path / "result.json", WITHOUT, "nothing", *words, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert ("want an NVIDIA GPU" in last) == is_refused
    assert ("gone" in last) != is_refused


def test_what_is_there_is_imported_by_nobody() -> None:
    """Looking costs nothing, and names all that is missing."""
    needs.packages("json", "this")
    assert "this" not in sys.modules
    with pytest.raises(BenchError, match=r"want json and gone and lost, .* has no gone or lost; "):
        needs.packages("json", "gone", "lost")
