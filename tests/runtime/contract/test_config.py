"""additional_config, the environment, and what is said of a wrong value."""

from pathlib import Path
from typing import Any

import pytest

from elasticmoe.runtime.contract.config import (
    RunSettings,
    RuntimeConfig,
    Thresholds,
    parse_config,
    parse_limit,
    settings_from_env,
)
from elasticmoe.runtime.errors import ConfigError


def test_not_asked_for_is_none() -> None:
    """Without our key in additional_config there is no configuration, so vLLM is left alone."""
    assert parse_config({"other": {"policy": "threshold"}}) is None


def test_an_empty_section_is_all_defaults() -> None:
    """The defaults are Rimuru's thresholds, two loading buffers, and vLLM's own arena size."""
    config = parse_config({"elasticmoe": {}})
    assert config == RuntimeConfig()
    assert config.adjuster.thresholds == Thresholds(evict_below=2, grow_above=9, grow_most=5)
    assert (config.policy, config.fetch, config.loading_depth, config.arena_bytes) == ("goodput", None, 2, None)


def test_every_key_is_read() -> None:
    """Values given replace defaults, down to the thresholds."""
    given = {
        "policy": "fixed",
        "arena_bytes": 2**30,
        "fetch": "host",
        "lookahead": 0,
        "loading_depth": 3,
        "adjuster": {
            "thresholds": {"evict_below": 1, "grow_above": 6, "grow_most": 2},
            "goodput": {"margin": 0.1, "slack": 0.2, "bus_share": 0.9, "half_life_steps": 50},
            "half_life_tokens": 7,
            "swap_margin": 1.5,
            "bytes_per_step": 1000,
        },
        "slo": {"tpot_ms": 50.0, "ttft_ms": 2000.0},
    }
    config = parse_config({"elasticmoe": given})
    assert config is not None
    assert config.model_dump() == given


def test_no_time_to_the_first_token_is_promised_unasked() -> None:
    """Only where one is, tokens/s are given up for it; a time of nothing can't be kept."""
    assert RuntimeConfig().slo.ttft_ms is None
    with pytest.raises(ConfigError, match=r"elasticmoe\.slo\.ttft_ms: Input should be greater than 0, but it is 0"):
        parse_config({"elasticmoe": {"slo": {"ttft_ms": 0}}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"policcy": "fixed"},
            (
                "unknown key elasticmoe.policcy; known ones here are "
                "adjuster, arena_bytes, fetch, loading_depth, lookahead, policy, slo"
            ),
        ),
        (
            {"slo": {"tpot": 1}},
            "unknown key elasticmoe.slo.tpot; known ones here are tpot_ms, ttft_ms",
        ),
        (
            {"adjuster": {"thresholds": {"evict": 1}}},
            "unknown key elasticmoe.adjuster.thresholds.evict; known ones here are evict_below, grow_above, grow_most",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_known_ones(section: dict[str, Any], message: str) -> None:
    """The key is named with its path, and so are those that may stand there."""
    with pytest.raises(ConfigError) as error:
        parse_config({"elasticmoe": section})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"policy": "lru"}, "elasticmoe.policy: Input should be 'threshold', 'fixed' or 'goodput', but it is 'lru'"),
        ({"arena_bytes": 0}, "elasticmoe.arena_bytes: Input should be greater than 0, but it is 0"),
        ({"arena_bytes": "big"}, r"elasticmoe.arena_bytes: Input should be a valid integer.*, but it is 'big'"),
        ({"loading_depth": 0}, "elasticmoe.loading_depth: Input should be greater than or equal to 1, but it is 0"),
        ({"adjuster": {"half_life_tokens": 0}}, "elasticmoe.adjuster.half_life_tokens: .* but it is 0"),
        ({"adjuster": {"thresholds": {"grow_most": 0}}}, "elasticmoe.adjuster.thresholds.grow_most: .* but it is 0"),
        ({"adjuster": 3}, "elasticmoe.adjuster: Input should be a valid dictionary.*, but it is 3"),
        ("threshold", "elasticmoe: Input should be a valid dictionary.*, but it is 'threshold'"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(section: Any, message: str) -> None:  # noqa: ANN401 -- any value
    """The key, what it may be, what it was."""
    with pytest.raises(ConfigError, match=f"^{message}$"):
        parse_config({"elasticmoe": section})


@pytest.mark.parametrize(("text", "limit"), [("0", 0), ("12", 12), (" 7\n", 7)])
def test_a_limit_is_a_whole_number(text: str, limit: int) -> None:
    """Spaces and line ends around it are no matter."""
    assert parse_limit(text, "here") == limit


@pytest.mark.parametrize("text", ["", " ", "-1", "1.5", "ten", "1_0", "0x10", "1 2", "٣", "9" * 5000])
def test_a_limit_that_is_no_number_names_its_source(text: str) -> None:
    """Anything but plain digits is refused, with where it came from and what it was."""
    with pytest.raises(ConfigError, match=r"^limit file: want the experts of a layer .* whole number >= 0; it is "):
        parse_limit(text, "limit file")


def test_an_empty_environment_is_all_defaults() -> None:
    """Unset and empty variables are the same."""
    names = ("LIMIT", "LIMIT_FILE", "TRANSPORT", "PROFILE", "SOCKET")
    assert settings_from_env({}) == RunSettings()
    assert settings_from_env({f"ELASTICMOE_{name}": "" for name in names}) == RunSettings()


def test_the_environment_differs_from_run_to_run() -> None:
    """Limit, limit file and profile come by environment."""
    env = {
        "ELASTICMOE_LIMIT": "12",
        "ELASTICMOE_LIMIT_FILE": "/etc/limit",
        "ELASTICMOE_PROFILE": "profile.json",
        "ELASTICMOE_TRANSPORT": "local",
    }
    assert settings_from_env(env) == RunSettings(12, Path("/etc/limit"), Path("profile.json"))


def test_transport_map_comes_with_its_socket() -> None:
    """The coordinator's socket says where the pool is."""
    env = {"ELASTICMOE_TRANSPORT": "map", "ELASTICMOE_SOCKET": "/run/pool.sock"}
    assert settings_from_env(env) == RunSettings(socket=Path("/run/pool.sock"))


def test_the_processs_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the variables of this process are read."""
    monkeypatch.setenv("ELASTICMOE_LIMIT", "3")
    assert settings_from_env().limit == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ELASTICMOE_LIMIT", "lots", "ELASTICMOE_LIMIT: want the experts of a layer that may be offloaded, a whole "),
        ("ELASTICMOE_TRANSPORT", "push", "ELASTICMOE_TRANSPORT: want one of local, map; it is 'push'"),
        ("ELASTICMOE_TRANSPORT", "map", "ELASTICMOE_TRANSPORT is 'map' and ELASTICMOE_SOCKET '': map needs the coord"),
        ("ELASTICMOE_SOCKET", "/s", "ELASTICMOE_TRANSPORT is 'local' and ELASTICMOE_SOCKET '/s': map needs the coordi"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    """The variable, what it may be, what it was."""
    with pytest.raises(ConfigError, match=f"^{message}"):
        settings_from_env({name: value})
