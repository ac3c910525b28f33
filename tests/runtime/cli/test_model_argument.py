"""The models that `serve` and `profile` take, and what is said of the others before vLLM starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticmoe.runtime.cli.main import main
from elasticmoe.runtime.cli.model_argument import refuse_model
from elasticmoe.runtime.cli.serve import vllm_arguments
from elasticmoe.runtime.errors import CheckpointError, ConfigError, ElasticMoEError, UnsupportedError
from tests.runtime.simulator.models import TINY

ABSURD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_hidden_layers": 10**6}, "has 1000000 for num_hidden_layers, want a whole number from 0 on, 1000 at most"),
    ({"num_experts": 0}, "describes no routed experts"),
    ({"num_experts": 10**7}, "has 4 layers of 10000000 experts, want at most 262144 experts in all"),
    ({"hidden_size": -128}, "has -128 for hidden_size, want a whole number from 1 on"),
    ({"num_experts_per_tok": 17}, "has 17 experts a token of 16"),
    ({"moe_intermediate_size": "128"}, "has '128' for moe_intermediate_size"),
    ({"num_attention_heads": 129, "head_dim": None}, "has 129 heads for a hidden size of 128"),
)
PLAN = ("--gpu", "h200", "--usage", "day.csv")


def _write(folder: Path, change: dict[str, Any] | str) -> Path:
    """Return a folder with a config.json of this text, or of the tiny model with a change."""
    (folder / "config.json").write_text(change if isinstance(change, str) else json.dumps(TINY | change))
    return folder


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "gpt2", "org/name:Q4_K_M", "s3://bucket/a/b"])
def test_what_vllm_fetches_passes(model: str) -> None:
    """A hub's id or an address, which no folder is called here."""
    refuse_model(model, [])
    assert vllm_arguments([model])[0][0] == model


@pytest.mark.parametrize("model", ["/gone", "./gone", "../gone", "~/gone", "models/of/mine", "gone/", "", "a b/c"])
def test_a_path_to_nothing_is_refused(model: str) -> None:
    """What no hub's id looks like is a path."""
    with pytest.raises(ConfigError, match=rf"^model '{model}': want the folder .*, there is no such folder; name"):
        refuse_model(model, [])


def test_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is called like a hub's model."""
    (tmp_path / "weights.bin").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^model 'weights\.bin': want the folder .*, that is a file; name another$"):
        refuse_model("weights.bin", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json can't be read .*No such file"),
        ("{", "config.json can't be read"),
        ("[]", "config.json: want a JSON object, it is a list"),
        ("[" * 100_000, "config.json can't be read"),
    ],
)
def test_a_folder_without_a_config_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    """Its name may be that of a hub's model: a folder that is there is meant."""
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    if text is not None:
        _write(folder, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"^org/name/{message}.*; name the folder of a whole checkpoint$"):
        refuse_model("org/name", [])


@pytest.mark.parametrize(("change", "message"), ABSURD)
def test_sizes_that_no_model_has_are_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    """In the same sentence, at once."""
    folder = str(_write(tmp_path, change))
    for words in (["profile", folder, "x", "-o", str(tmp_path / "out")], ["plan", "--model", folder, *PLAN]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"elasticmoe: the model's config.json {message}")
        assert said.count("\n") == 1
    with pytest.raises(UnsupportedError, match=f"^the model's config.json {message}"):
        vllm_arguments([folder, "--port", "1"])


def test_serve_refuses_in_one_sentence(tmp_path: Path) -> None:
    """With status 2, and before vLLM says anything."""
    command = [sys.executable, "-m", "elasticmoe.runtime.cli.main", "serve", str(tmp_path / "gone"), "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"elasticmoe: model '{tmp_path / 'gone'}': want the folder of a checkpoint")


def test_profile_refuses_a_path_to_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `serve` does."""
    (tmp_path / "requests.jsonl").write_text('{"prompt": "one"}\n')
    words = ["profile", "./gone", str(tmp_path / "requests.jsonl"), "-o", str(tmp_path / "out")]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("elasticmoe: model './gone': want the folder of a checkpoint")


@pytest.mark.parametrize(
    "flags", [["--hf-overrides", "{}"], ["--hf-overrides.num_experts=8"], ["--hf-config-path", "x"], ["--config=x"]]
)
def test_what_a_flag_may_replace_is_left_to_vllm(tmp_path: Path, flags: list[str]) -> None:
    """The folder has to be there all the same."""
    folder = str(_write(tmp_path, {"num_experts": 0}))
    with pytest.raises(UnsupportedError):
        refuse_model(folder, ["--port", "1", "--configuration", "x"])
    refuse_model(folder, flags)
    with pytest.raises(ConfigError):
        refuse_model(folder + "/gone", flags)


@pytest.mark.parametrize("words", [["M"], ["--model", "M", "--port", "1"], ["--port", "1", "--model=M"]])
def test_the_model_is_found_where_vllm_finds_it(tmp_path: Path, words: list[str]) -> None:
    """The first word, or --model."""
    for model, is_there in ((str(tmp_path / "gone"), False), (str(_write(tmp_path, {})), True)):
        given = [word.replace("M", model) for word in words]
        if is_there:
            vllm_arguments(given)
        else:
            with pytest.raises(ElasticMoEError, match="there is no such folder"):
                vllm_arguments(given)
    vllm_arguments(["--port", "1"])
