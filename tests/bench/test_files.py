"""What a bench's command line says of files that it can't use, and what becomes of those that are there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.serving.errors import BadScenario
from bench.serving.files import read_part

ROOT = Path(__file__).resolve().parent.parent.parent
ROW: dict[str, Any] = {
    "workload": "closed", "routing": "flat", "kv_gib": 1.0, "gpus": 1, "bus_gb_s": None, "rate": None,
    "has_logprobs": False, "system": "ours", "repeat": 0, "tok_s": 10.0,
}  # fmt: skip

KERNEL = ["-m", "bench.kernel_gpu", "run", "qwen3-30b", "--out", "X"]


def _run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "want a text file, it can't be read"),
        (b"\xff", "want a text file, it can't be read"),
        (b"", "want a JSON object, it can't be read"),
        (b"[" * 100_000, "want a JSON object, it can't be read"),
        (b"[1]", "want a JSON object, it is a list"),
        (b"{}", "want a result with 'rows' in it, there is none"),
        (b'{"rows": 3}', "want a result with 'rows' in it, there is none"),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    """With what was wanted of it."""
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadScenario, match=rf"result\.json: {message}"):
        read_part(path, "rows", list)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["gone"], "gone: want rows of `run`, there is no such file; leave it out or name another"),
        (["a", "empty"], "empty: want rows of `run`, it has none"),
        (["a", "a"], "want each run once, one is named twice"),
        (["other"], "other: want rows of cells, one has no workload"),
    ],
)
def test_runs_that_are_none_leave_the_result_as_it_is(tmp_path: Path, runs: list[str], message: str) -> None:
    """One sentence, status 1: a wrong name doesn't replace a result by an empty one."""
    (tmp_path / "a").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "other").write_text('{"repeat": 0, "system": "ours"}\n')
    out = tmp_path / "result.json"
    out.write_text("old")
    paths = [str(tmp_path / name) for name in runs]
    done = _run("-m", "bench.serving_h200", "combine", *paths, "--device", "none", "--out", str(out))
    assert (done.returncode, out.read_text()) == (1, "old")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_page_that_is_none_leaves_the_plot_as_it_is(tmp_path: Path) -> None:
    """Nothing is written before all that is to be written is known."""
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    result.write_text(json.dumps({"rows": [ROW | {"num_requests": 1, "ratio": 1.0}]}))
    page.write_text("no part\n")
    words = ["report", str(result), "--page", str(page), "--plots", str(tmp_path / "plots")]
    done = _run("-m", "bench.serving_h200", *words)
    assert done.returncode == 1
    assert done.stderr.startswith("The bench failed: wanted <!-- serving -->")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cells", ","], "at least once, there is no cell in ','"),
        (["--cells", "closed:flat:1", "--requests", "0"], "argument --requests: want a whole number above 0, it is 0"),
        (["--cells", "closed:flat:1", "--tp", "1.5"], "argument --tp: want a whole number above 0, it is 1.5"),
        (["--cells", "closed:flat:1", "--seconds", "nan"], "argument --seconds: want a number above 0, it is nan"),
        (["--cells", "closed:flat:1", "--max-kv-gib", "x"], "argument --max-kv-gib: want a number above 0, it is x"),
        (["--cells", "closed:flat:1", "--deadline-s", "-1"], "argument --deadline-s: want a number above 0, it is -1"),
        (["--cells", "closed:flat:1", "--out", "bench"], "argument --out: want a file to write, bench can't be one"),
        (["--cells", "closed:flat:9"], "wanted 9 GiB for KV, there are 8: raise --max-kv-gib"),
        (
            ["--cells", "closed:flat:1", "--follow", "gone"],
            "gone: want a run with gone.tokens.jsonl beside it",
        ),
        (["--cells", "closed:flat:1", "--model", "gone"], "gone: want a text file, it can't be read"),
        (["--cells", "closed:flat:1", "--model", "ABSURD"], "has 0 for hidden_size, want a whole number from 1 on"),
    ],
)
def test_a_run_that_cannot_be_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    """Before an engine starts."""
    absurd = json.loads((ROOT / "bench/models/qwen3-30b-a3b.json").read_text()) | {"hidden_size": 0}
    (tmp_path / "absurd").write_text(json.dumps(absurd))
    words = [word.replace("ABSURD", str(tmp_path / "absurd")) for word in words]
    least = ["--system", "ours", "--model", "bench/models/qwen3-30b-a3b.json", "--out", str(tmp_path / "rows")]
    done = _run("-m", "bench.serving_h200", "run", *least, *words)
    assert done.returncode == (2 if "argument" in message else 1)
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("name", ["simulator.json", "profile-h200-lookahead.json"])
def test_a_profile_without_the_layers_that_are_read_is_refused(name: str) -> None:
    """Another result, or one in which each layer's experts were fetched ahead."""
    done = _run("-m", "bench.matrix.timeline", f"bench/results/{name}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"The bench failed: bench/results/{name}: want a profile of layers")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h200"], "--gpu wants another --out"),
        (["--again", "goodput", "--out", "gone"], "gone: want a text file, it can't be read"),
        (["--again", "goodput", "--out", "bench/results/serving-h200.json"], "serving-h200.json: want "),
        (["--out", "bench"], "argument --out: want a file to write, bench can't be one"),
    ],
)
def test_a_simulation_that_would_lose_something_is_refused(words: list[str], message: str) -> None:
    """A part of the table does not replace all of it, and another file's rows are no earlier ones."""
    done = _run("bench/simulator.py", *words)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench/shift.py", "--seeds", "0"], "argument --seeds: want a whole number above 0, it is 0"),
        (["bench/shift.py", "--away", "200"], "The bench failed: arena_bytes: the pool needs at least"),
        (["bench/adjuster.py", "--steps", "-1"], "argument --steps: "),
        (["bench/burst_cpu.py", "--repeats", "9" * 5000], "argument --repeats: want a whole number above 0"),
        (["bench/burst_cpu.py", "--out", "bench"], "argument --out: want a file to write, bench can't be one"),
        (["bench/burst_cpu.py", "--out", "README.md/x"], "argument --out: want a file to write"),
        (["bench/burst_cpu.py", "--model", "gone"], "gone/config.json: want a text file, it can't be read"),
        (["bench/demo.py", "--requests", "1.5"], "argument --requests: want a whole number above 0, it is 1.5"),
        (["-m", "bench.kernel_gpu", "run", "gone", "--out", "X"], "argument shapes: invalid choice: 'gone'"),
        ([*KERNEL, "--sizes", "1,x"], "argument --sizes: want whole numbers from 1 to 131072, such as 1,131072"),
        ([*KERNEL, "--sizes", "0"], "argument --sizes: want whole numbers from 1 to"),
        ([*KERNEL, "--configs", "gone"], "The bench failed: gone: want a text file, it can't be read"),
        ([*KERNEL, "--configs", "README.md"], "The bench failed: README.md: want a JSON object, it can't be read"),
        ([*KERNEL, "--configs", "bench/models/qwen3-30b-a3b.json"], "want a tune's configs of qwen3-30b, they can't"),
        (["-m", "bench.fetch_gpu", "--batches", "257"], "argument --batches: want whole numbers from 1 to 256"),
        (["-m", "bench.fetch_gpu", "--offloaded", "4,"], "argument --offloaded: want whole numbers from 0 to 64"),
        (["-m", "bench.simulation.plots", "--out", "x"], "unrecognized arguments: --out x"),
    ],
)
def test_what_no_bench_can_measure_is_refused_at_once(words: list[str], message: str) -> None:
    """Before a server starts, and with the result that is there kept."""
    done = _run(*words)
    assert done.returncode != 0
    assert message in (done.stderr or done.stdout).splitlines()[-1]


@pytest.mark.parametrize("words", [KERNEL, ["-m", "bench.fetch_gpu", "--out", "X"]])
def test_a_bench_that_needs_a_gpu_says_so(tmp_path: Path, words: list[str]) -> None:
    """One sentence, status 1, and nothing is written: CUDA shows none to this process."""
    out = tmp_path / "result.json"
    done = _run(*words[:-1], str(out), env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, out.exists()) == (1, False)
    assert done.stderr == "The bench failed: want an NVIDIA GPU, torch finds none; run it on a machine that has one\n"
