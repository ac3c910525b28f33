"""`elasticmoe serve MODEL`: the OpenAI server of vLLM with the elastic pool; takes every flag of `vllm serve`.

Our own flags start with --elastic-. What vLLM hashes into its compile cache goes into additional_config, what differs
from run to run into the environment.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticmoe.runtime.cli import api_server
from elasticmoe.runtime.cli.model_argument import refuse_model
from elasticmoe.runtime.cli.supervise import hold_signals, supervise
from elasticmoe.runtime.contract import config as contract
from elasticmoe.runtime.contract.config import parse_config
from elasticmoe.runtime.contract.names import ENV_REFUSAL_FILE
from elasticmoe.runtime.errors import ConfigError

ENV_METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
LONGEST_SOCKET_FOLDER = 107 - len("/") - len(str(uuid.UUID(int=0)))
"""A Unix socket's path has 107 bytes at most, and vLLM names its sockets by UUIDs."""
USAGE = "elasticmoe serve MODEL [--elastic-… VALUE] [any flag of vllm serve]"


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of our own flags; whatever it doesn't know is vLLM's."""
    parser = argparse.ArgumentParser(prog="elasticmoe serve", usage=USAGE, allow_abbrev=False, add_help=False)
    add = parser.add_argument_group("elastic pool").add_argument
    add(
        "--elastic-arena-bytes",
        metavar="N",
        help="GPU bytes that experts and KV cache share (default: all that is left)",
    )
    add("--elastic-policy", metavar="NAME", help="who gets the pages: goodput (default), threshold or fixed")
    add("--elastic-tpot-ms", metavar="MS", help="time per token that goodput promises who starts (default 100)")
    add(
        "--elastic-ttft-ms",
        metavar="MS",
        help="time to the first token that goodput gives up tokens/s for (default none)",
    )
    add("--elastic-loading-depth", metavar="N", help="loading buffers (default 2)")
    add("--elastic-fetch", metavar="HOW", help="what drives fetches: device (default on a GPU) or host")
    add("--elastic-lookahead", metavar="N", help="layers ahead for which fetches are predicted: 0 (default) or 1")
    add("--elastic-limit", metavar="N", help="experts of a layer that may leave the GPU (default: the least, + 10)")
    add("--elastic-limit-file", metavar="PATH", help="file that says the limit; it may change while serving")
    add("--elastic-profile", metavar="PATH", help="offline ranking of the experts")
    add("--elastic-transport", metavar="NAME", help="where the experts' masters live: local (default) or map")
    add("--elastic-socket", metavar="PATH", help="the coordinator's Unix socket, for transport map")
    return parser


ENV_FLAGS = {
    "elastic_limit": contract.ENV_LIMIT,
    "elastic_limit_file": contract.ENV_LIMIT_FILE,
    "elastic_profile": contract.ENV_PROFILE,
    "elastic_transport": contract.ENV_TRANSPORT,
    "elastic_socket": contract.ENV_SOCKET,
}
CONFIG_FLAGS = {
    "elastic_arena_bytes": ("arena_bytes",),
    "elastic_policy": ("policy",),
    "elastic_tpot_ms": ("slo", "tpot_ms"),
    "elastic_ttft_ms": ("slo", "ttft_ms"),
    "elastic_loading_depth": ("loading_depth",),
    "elastic_fetch": ("fetch",),
    "elastic_lookahead": ("lookahead",),
}
"""Where a flag's value goes in the configuration: keys, each inside the one before."""


def vllm_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return vLLM's command line and the environment to set; raises ConfigError for a wrong value of ours."""
    own, rest = own_parser().parse_known_args([_dashed(word) for word in argv])
    for word in rest:
        if word.startswith("--elastic-"):
            message = f"unknown flag {word}; `elasticmoe serve --help` lists ours, all others go to vLLM"
            raise ConfigError(message)
    _refuse_hidden_config(rest)
    given, rest = _take_additional_config(rest)
    parse_config(given)
    merged = {**given, contract.CONFIG_KEY: _with_flags(given.get(contract.CONFIG_KEY, {}), own)}
    parse_config(merged)
    env = {name: getattr(own, flag) for flag, name in ENV_FLAGS.items() if getattr(own, flag) is not None}
    contract.settings_from_env({**os.environ, **env})
    _refuse_without_plugin(os.environ.get("VLLM_PLUGINS"))
    if (model := _find_model(rest)) is not None:
        refuse_model(model, rest)
    return [*rest, "--additional-config", json.dumps(merged)], env


def _find_model(words: list[str]) -> str | None:
    """Return the model that vLLM is told to serve: its first word or --model; None if only vLLM can tell."""
    if words and not words[0].startswith("-"):
        return words[0]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--model")
    model: str | None = parser.parse_known_args(words)[0].model
    return model


def _with_flags(config: dict[str, Any], own: argparse.Namespace) -> dict[str, Any]:
    """Return our configuration with the values of flags in the place of what it holds."""
    merged = dict(config)
    for flag, (*path, key) in CONFIG_FLAGS.items():
        if getattr(own, flag) is not None:
            section = merged
            for name in path:
                section[name] = dict(section.get(name, {}))
                section = section[name]
            section[key] = getattr(own, flag)
    return merged


def _refuse_without_plugin(allowed: str | None) -> None:
    """Raise ConfigError if vLLM was told to load other plugins only: it would serve without the elastic pool."""
    if allowed is not None and contract.CONFIG_KEY not in [name.strip() for name in allowed.split(",")]:
        message = f"VLLM_PLUGINS={allowed} keeps vLLM from loading elasticmoe: add elasticmoe to it, or unset it"
        raise ConfigError(message)


def _dashed(word: str) -> str:
    """Return a word with dashes in its flag, which vLLM takes with underscores too; keys after a dot keep theirs."""
    flag = re.split(r"[.=]", word, maxsplit=1)[0]
    return flag.replace("_", "-") + word.removeprefix(flag) if flag.startswith("--") else word


def _refuse_hidden_config(words: list[str]) -> None:
    """Raise ConfigError if vLLM's --config file has an additional_config, which the one that we give would replace."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config", type=Path)
    path = parser.parse_known_args(words)[0].config
    if path is None or not path.is_file():  # vLLM tells what is wrong with it
        return
    if re.search(
        r"""^[{"'\s]*additional[-_]config\b""", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    ):
        message = f"--config {path}: its additional_config would be replaced; give it as --additional-config instead"
        raise ConfigError(message)


def _take_additional_config(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Split vLLM's --additional-config (as JSON) off its command line."""
    if dotted := [word for word in words if word.startswith("--additional-config.")]:
        message = f"{dotted[0]}: it would replace elasticmoe's own part; give --additional-config as one JSON object"
        raise ConfigError(message)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--additional-config", default="{}")
    own, rest = parser.parse_known_args(words)
    try:
        given = json.loads(own.additional_config)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        message = f"--additional-config: want a JSON object, it is {own.additional_config[:80]!r}"
        raise ConfigError(message)
    return given, rest


def run(argv: Sequence[str]) -> int:
    """Serve until stopped; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        own_parser().print_help()
        print("\nAll other flags are those of `vllm serve`: see `vllm serve --help`.")
        return 0
    hold_signals()
    words, env = vllm_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="elasticmoe-") as scratch:
        env = {**os.environ, **env, ENV_REFUSAL_FILE: str(Path(scratch) / "refusal")}
        env.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        env.setdefault(ENV_METRICS_DIR, _made(Path(scratch) / "metrics"))
        if len(scratch) <= LONGEST_SOCKET_FOLDER:  # else in the system's folder, where a killed server leaves them
            env.setdefault("VLLM_RPC_BASE_PATH", scratch)
        command = [sys.executable, "-P", "-m", api_server.__name__, *words]  # -P: the current folder holds no modules
        return supervise(command, env)


def _made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)
