"""The demo and the CPU bench from end to end, on servers faked in this process."""

import json
import sys
from pathlib import Path

import pytest

from bench import burst_cpu, demo
from tests.bench.fake_servers import ELASTIC_METRICS, STOCK_METRICS, make_starter

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a config only: the fakes read no weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run_demo(monkeypatch: pytest.MonkeyPatch, model: Path, elastic_metrics: str = ELASTIC_METRICS) -> int:
    """The demo's exit status."""
    monkeypatch.setattr(sys, "argv", ["demo", "--model", str(model), "--logs", str(model)])
    monkeypatch.setattr(demo, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(demo, "start_elastic", make_starter("elasticmoe", elastic_metrics))
    monkeypatch.setattr(demo, "start_stock", make_starter("stock vLLM", STOCK_METRICS))
    return demo.main()


def test_the_demo_tells_its_story(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every promise kept it shows both systems and ends well."""
    assert run_demo(monkeypatch, model) == 0
    story = capsys.readouterr().out
    assert "assistant: <0><1><2>" in story
    assert "kept    the tokens are those of stock vLLM: 288 of 288 requests equal" in story
    assert "10.0 against 1.0 on average: 10.0x" in story
    assert "BROKEN" not in story


def test_the_demo_fails_with_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool that never evicts is not what the demo promises."""
    still = ELASTIC_METRICS.replace('"evict"', '"nothing"')
    assert run_demo(monkeypatch, model, still) == 1
    assert "BROKEN  experts gave their pages to requests: 0 evicted" in capsys.readouterr().out


def test_the_demo_says_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that the burst doesn't suit is one sentence, not a traceback."""
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    assert run_demo(monkeypatch, model) == 1
    assert "The demo failed: wanted to hold 48 requests at once" in capsys.readouterr().out


def test_the_bench_writes_every_run(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Rows of both systems and all repeats, medians, and where it was measured."""
    out = model / "not there yet" / "result.json"
    words = ["burst_cpu", "--model", str(model), "--repeats", "2", "--requests", "50", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*words, "--logs", str(model)])
    monkeypatch.setattr(burst_cpu, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(burst_cpu, "start_elastic", make_starter("elasticmoe", ELASTIC_METRICS))
    monkeypatch.setattr(burst_cpu, "start_stock", make_starter("stock vLLM", STOCK_METRICS))
    assert burst_cpu.main() == 0
    result = json.loads(out.read_text())
    assert [(row["system"], row["repeat"]) for row in result["rows"]] == [
        ("elasticmoe", 0),
        ("elasticmoe", 1),
        ("stock", 0),
        ("stock", 1),
    ]
    assert [row["evictions"] for row in result["rows"]] == [50, 50, 0, 0]
    assert result["median"]["stock"]["preemptions"] == 50
    assert result["meta"]["packages"]
    assert result["scenario"]["load"]["num_requests"] == 50
