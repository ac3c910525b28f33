"""`elasticmoe plan` from its command line to its answers."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from elasticmoe.runtime.cli.main import main
from tests.runtime.simulator.models import TINY

ROWS = "".join(f"{n * 60},{1.0 if n < 30 else 0.2},{20},{20 if n < 30 else 0}\n" for n in range(100))
CALM = "".join(f"{n * 60},0.2,5,0\n" for n in range(10))
LENGTHS = ("--prompt-tokens", "60", "--answer-tokens", "40", "--max-model-len", "256")
KV_GIB = ("--kv-gib", "0.0012")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return a command line for a tiny model on a described GPU."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "day.csv").write_text("time,kv_usage,running,waiting\n" + ROWS)
    return ["plan", "--model", str(tmp_path), "--gpu", "h200", "--usage", str(tmp_path / "day.csv"), *LENGTHS]


def test_the_table_says_whether_it_helps(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict, a limit to start with, stock beside every limit that was tried; progress is on stderr."""
    assert main([*arguments, *KV_GIB]) == 0
    shown = capsys.readouterr()
    assert "The pool would help: memory holds requests up 30% of the time" in shown.out
    assert re.search(r"Start with --elastic-limit \d+ --elastic-tpot-ms 100\.", shown.out)
    assert "stock vLLM" in shown.out
    assert shown.out.count(" <\n") + shown.out.endswith(" <") == 1
    assert "plan: simulating 40 requests at once on stock vLLM" in shown.err


def test_a_promise_that_nothing_keeps_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the flags that ask for it."""
    assert main([*arguments, *KV_GIB, "--tpot-ms", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert "None of these limits keeps 0.001 ms a token for 99 of 100 requests; the one marked comes nearest." in shown
    assert main([*arguments, *KV_GIB, "--tpot-ms", "250"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Start with --elastic-limit \d+ --elastic-tpot-ms 250\.", shown)
    assert "None of these limits" not in shown


def test_a_promised_time_to_the_first_token_is_among_the_flags(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where it was given."""
    assert main([*arguments, *KV_GIB, "--ttft-ms", "800"]) == 0
    assert re.search(r"--elastic-limit \d+ --elastic-tpot-ms 100 --elastic-ttft-ms 800\.", capsys.readouterr().out)


def test_json_holds_the_same(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON document on stdout."""
    assert main([*arguments, *KV_GIB, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["advice"]["helps"] is True
    assert plan["advice"]["limit"] in [one["limit"] for one in plan["advice"]["sweep"]]
    assert plan["usage"]["short_share"] == pytest.approx(0.3)


def test_a_calm_day_needs_no_pool(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is simulated, no limit is named; the plot shows the day alone."""
    (tmp_path / "day.csv").write_text("time,kv_usage,running,waiting\n" + CALM)
    plot = tmp_path / "plan.svg"
    assert main([*arguments, *KV_GIB, "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "The pool would not help: KV is 20% full at the peak" in shown.out
    assert "--elastic-limit" not in shown.out
    assert len(ET.parse(plot).findall(".//{*}polyline")) == 2  # noqa: S314  # our own file


def test_the_plot_shows_day_and_sweep(arguments: list[str], tmp_path: Path) -> None:
    """KV use, waiting requests, and tokens/s of pool and stock by limit."""
    plot = tmp_path / "plan.svg"
    assert main([*arguments, *KV_GIB, "--plot", str(plot)]) == 0
    assert len(ET.parse(plot).findall(".//{*}polyline")) == 4  # noqa: S314  # our own file


def test_room_for_kv_follows_from_the_gpu(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nine tenths of its memory less weights and a GiB, where it isn't told."""
    assert main(arguments) == 0
    assert "KV 124.8 GiB a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kv-gib", "0"), "--kv-gib: want a number above 0 and at most 1000000000, it is 0.0"),
        (("--kv-gib", "1e300"), "--kv-gib: want a number above 0 and at most 1000000000, it is 1e+300"),
        (("--answer-tokens", "-1"), "--answer-tokens: want a number above 0 and at most 1000000000, it is -1"),
        (("--max-num-seqs", "9" * 20), "--max-num-seqs: want a number above 0 and at most 1000000000, it is 9999"),
        (("--tpot-ms", "nan"), "--tpot-ms: want a number above 0 and at most 1000000000, it is nan"),
        (("--ttft-ms", "0"), "--ttft-ms: want a number above 0 and at most 1000000000, it is 0.0"),
        (("--tpot-ms", "inf"), "--tpot-ms: want a number above 0 and at most 1000000000, it is inf"),
        (("--plot", "/"), "--plot /: want a file to write, that is a folder; name another"),
        (("--plot", "/nowhere/a.svg"), "--plot /nowhere/a.svg: want a file to write, there is no folder /nowhere"),
        (("--kv-gib", "400"), "have 13107584 blocks of KV, want at most 10000000; check "),
        (("--gpu", "toaster"), "GPU 'toaster': want one of h200"),
        (("--kv-gib", "0.0001"), "one request of 256 tokens needs"),
        (("--max-model-len", "50"), "don't fit 50 at most"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    """On stderr, with status 2."""
    assert main([*arguments, *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_weights_that_fill_the_gpu_are_told(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --kv-gib and without room there is nothing to plan with."""
    gpu = {"name": "small", "memory_bytes_s": 1e12, "flops_s": 1e14, "copy_bytes_s": 1e10, "memory_gib": 1}
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    assert main([*arguments, "--gpu", str(tmp_path / "gpu.json")]) == 2
    assert "--kv-gib: small has 1 GiB a GPU" in capsys.readouterr().err


def test_a_plot_that_fails_takes_nothing_with_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What was simulated is printed before the file that can't be written is told."""
    assert main([*arguments, *KV_GIB, "--plot", "/dev/full"]) == 2
    shown = capsys.readouterr()
    assert "The pool would help" in shown.out
    assert "No space left on device" in shown.err.splitlines()[-1]
