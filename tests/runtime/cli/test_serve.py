"""The command line of `elasticmoe serve`: what is ours, what goes to vLLM, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from elasticmoe.runtime.cli.serve import vllm_arguments
from elasticmoe.runtime.errors import ConfigError


def _additional(words: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(words[words.index("--additional-config") + 1])
    return parsed


def test_vllms_flags_pass_and_ours_become_configuration() -> None:
    """Its own words reach vLLM in order, our flags as additional_config; what differs by run becomes environment."""
    words, env = vllm_arguments(["M", "--port", "1", "--elastic-policy", "fixed", "--elastic-limit", "3", "-tp", "2"])
    assert words[:5] == ["M", "--port", "1", "-tp", "2"]
    assert _additional(words) == {"elasticmoe": {"policy": "fixed"}}
    assert env == {"ELASTICMOE_LIMIT": "3"}


def test_a_given_additional_config_is_kept() -> None:
    """Other keys of --additional-config stay, ours are joined with the flags, and a flag wins."""
    given = {"other": 1, "elasticmoe": {"policy": "fixed", "loading_depth": 4}}
    words, _ = vllm_arguments(["M", "--additional-config", json.dumps(given), "--elastic-loading-depth", "3"])
    assert words.count("--additional-config") == 1
    assert _additional(words) == {"other": 1, "elasticmoe": {"policy": "fixed", "loading_depth": "3"}}


def test_a_flag_may_set_one_key_of_a_section() -> None:
    """The section's other keys stay."""
    given = {"elasticmoe": {"slo": {"ttft_ms": 900, "tpot_ms": 70}}}
    words, _ = vllm_arguments(["M", "--additional-config", json.dumps(given), "--elastic-tpot-ms", "50"])
    assert _additional(words) == {"elasticmoe": {"slo": {"ttft_ms": 900, "tpot_ms": "50"}}}
    assert _additional(vllm_arguments(["M", "--elastic-tpot-ms", "50"])[0]) == {
        "elasticmoe": {"slo": {"tpot_ms": "50"}}
    }
    assert _additional(vllm_arguments(["M", "--elastic-ttft-ms", "800"])[0]) == {
        "elasticmoe": {"slo": {"ttft_ms": "800"}}
    }


@pytest.mark.parametrize(
    "words", [["--additional_config", '{"other": 1}', "--elastic_policy=fixed"], ['--additional_config={"other": 1}']]
)
def test_underscores_are_dashes(words: list[str]) -> None:
    """As vLLM takes a flag's underscores for dashes, so are ours taken, and values keep theirs."""
    got, _ = vllm_arguments(["my_model", *words])
    assert got[0] == "my_model"
    assert _additional(got)["other"] == 1
    assert not [word for word in got if word.startswith("--additional_config")]


def test_keys_after_a_dot_keep_their_underscores() -> None:
    """In vLLM's dotted flags only the flag's own name has dashes for underscores: what follows is the user's key."""
    got, _ = vllm_arguments(["M", "--hf_overrides.rope_theta=1e6", "--hf-overrides.head_dim", "64"])
    assert got[1:4] == ["--hf-overrides.rope_theta=1e6", "--hf-overrides.head_dim", "64"]


@pytest.mark.parametrize("line", ['additional-config: {"other": 1}', "additional_config:", '{"additional-config": {}}'])
def test_a_config_files_additional_config_is_not_lost(tmp_path: Path, line: str) -> None:
    """VLLM's own --config file may say anything but additional_config, which ours would silently replace."""
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\n")
    assert vllm_arguments(["M", "--config", str(file)])[0][:3] == ["M", "--config", str(file)]
    file.write_text(f"port: 1\n{line}\n")
    with pytest.raises(ConfigError, match=r"serve\.yaml: its additional_config"):
        vllm_arguments(["M", f"--config={file}"])
    file.write_bytes(b"\xff\n" + line.encode() + b"\n")
    with pytest.raises(ConfigError, match=r"serve\.yaml: its additional_config"):
        vllm_arguments(["M", f"--config={file}"])


@pytest.mark.parametrize("allowed", ["", "other"])
def test_a_plugin_that_vllm_may_not_load_is_no_elastic_pool(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    """Where VLLM_PLUGINS leaves us out, serving stock unasked is refused; listed among others we are served."""
    monkeypatch.setenv("VLLM_PLUGINS", "other,elasticmoe")
    vllm_arguments(["M"])
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    with pytest.raises(ConfigError, match="VLLM_PLUGINS="):
        vllm_arguments(["M"])


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--elastic-polcy", "fixed"], r"unknown flag --elastic-polcy"),
        (["--elastic-policy", "other"], r"elasticmoe\.policy.*'other'"),
        (["--elastic-limit", "-1"], r"ELASTICMOE_LIMIT.*'-1'"),
        (["--elastic-tpot-ms", "0"], r"elasticmoe\.slo\.tpot_ms: .*greater than 0, but it is '0'"),
        (["--elastic-ttft-ms", "0"], r"elasticmoe\.slo\.ttft_ms: .*greater than 0, but it is '0'"),
        (["--elastic-transport", "pigeon"], r"ELASTICMOE_TRANSPORT.*'pigeon'"),
        (["--additional-config", "[1]"], r"--additional-config: want a JSON object"),
        (["--additional-config", "[" * 100_000], r"--additional-config: want a JSON object, it is '\[{80}'$"),
        (["--additional-config", '{"elasticmoe": 3}'], r"elasticmoe: .*3"),
        (["--additional-config.other", "1"], r"--additional-config\.other"),
        (["--additional_config.other=1"], r"--additional-config\.other"),
    ],
)
def test_wrong_values_are_refused(words: list[str], what: str) -> None:
    """A flag that is unknown, or whose value can't be used, is refused by name."""
    with pytest.raises(ConfigError, match=what):
        vllm_arguments(["M", *words])


def test_graphs_are_left_to_the_configuration() -> None:
    """--enforce-eager is the user's: what drives fetches decides whether graphs are possible."""
    assert "--enforce-eager" not in vllm_arguments(["M"])[0]
    assert vllm_arguments(["M", "--enforce-eager"])[0].count("--enforce-eager") == 1
