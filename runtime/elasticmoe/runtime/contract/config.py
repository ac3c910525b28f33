"""The runtime's configuration: one pydantic model for `additional_config`, one value for what differs from run to run.

vLLM hashes `additional_config` into its compile cache key, so what changes between runs comes by environment.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elasticmoe.runtime.errors import ConfigError

CONFIG_KEY = "elasticmoe"
"""Our key in vLLM's additional_config."""

PolicyName = Literal["threshold", "fixed", "goodput"]
FetchKind = Literal["device", "host"]
Transport = Literal["local", "map"]

ENV_LIMIT = "ELASTICMOE_LIMIT"
ENV_LIMIT_FILE = "ELASTICMOE_LIMIT_FILE"
ENV_TRANSPORT = "ELASTICMOE_TRANSPORT"
ENV_SOCKET = "ELASTICMOE_SOCKET"
ENV_PROFILE = "ELASTICMOE_PROFILE"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Thresholds(_Strict):
    """Rimuru's constants, in expert pages and experts a step."""

    evict_below: int = Field(2, ge=0)
    grow_above: int = Field(9, ge=0)
    grow_most: int = Field(5, ge=1)


class Goodput(_Strict):
    """What the policy `goodput` asks of its own predictions."""

    margin: float = Field(0.03, ge=0)
    """Predicted gain in tokens/s, as a share, below which nothing is evicted."""
    slack: float = Field(0.03, ge=0, lt=1)
    """Share of the best predicted tokens/s that may be given up so that more requests run and fewer wait."""
    bus_share: float = Field(0.75, gt=0, le=1)
    """Share of the bus that missed fetches leave idle which bringing experts back may take."""
    half_life_steps: int = Field(1000, ge=1)
    """Steps after which a measurement counts half."""


class AdjusterConfig(_Strict):
    """How the adjuster decides."""

    thresholds: Thresholds = Thresholds()
    goodput: Goodput = Goodput()
    half_life_tokens: int = Field(4096, ge=1)
    swap_margin: float = Field(0.5, ge=0)
    """How much hotter than a resident expert, as a share, an offloaded one must be to take its pages."""
    bytes_per_step: int = Field(48 * 2**20, ge=0)
    """Bytes a step that swaps may copy on one rank; 0: no swaps."""


class Slo(_Strict):
    """What a user is promised."""

    tpot_ms: float = Field(100.0, gt=0, allow_inf_nan=False)
    ttft_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """None: no time to the first token is promised, and tokens/s alone say how far experts leave for who waits."""


class RuntimeConfig(_Strict):
    """What `additional_config["elasticmoe"]` may hold."""

    policy: PolicyName = "goodput"
    arena_bytes: int | None = Field(None, gt=0)
    fetch: FetchKind | None = None
    """What drives fetches; None: the device where it is a GPU that the host pool can be pinned for, else the host."""
    lookahead: int = Field(0, ge=0, le=1)
    """Layers ahead of the routing for which experts are fetched on a prediction: where the device drives fetches, and
    into a loading buffer of their own, so `loading_depth` must be more."""
    loading_depth: int = Field(2, ge=1)
    adjuster: AdjusterConfig = AdjusterConfig()
    slo: Slo = Slo()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What differs from run to run; both the scheduler and the workers read it from the environment."""

    limit: int | None = None
    """Experts of one layer that may leave the GPU; None: the least that fits, + 10."""
    limit_file: Path | None = None
    profile: Path | None = None
    socket: Path | None = None
    """The coordinator's, for transport `map`; None: transport `local`."""


def parse_config(additional_config: Mapping[str, Any]) -> RuntimeConfig | None:
    """Return the configuration that vLLM was given for us, or None if it was given none.

    Raises ConfigError that names the key, what it may be and what it was.
    """
    if CONFIG_KEY not in additional_config:
        return None
    try:
        return RuntimeConfig.model_validate(additional_config[CONFIG_KEY])
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, (CONFIG_KEY, *first["loc"])))
    if first["type"] == "extra_forbidden":
        return f"unknown key {where}; known ones here are {', '.join(_siblings(first['loc']))}"
    return f"{where}: {first['msg']}, but it is {first['input']!r}"


def _siblings(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RuntimeConfig
    for part in loc[:-1]:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type), f"{part} holds keys, but is {annotation}"
        model = annotation
    return sorted(model.model_fields)


def parse_limit(text: str, source: str) -> int:
    """Return an offload limit as the number that the text says; raises ConfigError naming its source."""
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        message = f"{source}: want the experts of a layer that may be offloaded, a whole number >= 0; it is {text!r}"
        raise ConfigError(message)
    return int(text)


def settings_from_env(env: Mapping[str, str] = os.environ) -> RunSettings:
    """Return the run's settings, an empty variable as an unset one; raises ConfigError that names the variable."""
    return RunSettings(
        limit=parse_limit(env[ENV_LIMIT], ENV_LIMIT) if env.get(ENV_LIMIT) else None,
        limit_file=Path(env[ENV_LIMIT_FILE]) if env.get(ENV_LIMIT_FILE) else None,
        profile=Path(env[ENV_PROFILE]) if env.get(ENV_PROFILE) else None,
        socket=_socket(env),
    )


def _socket(env: Mapping[str, str]) -> Path | None:
    transport, socket = env.get(ENV_TRANSPORT) or "local", env.get(ENV_SOCKET)
    if transport not in get_args(Transport):
        message = f"{ENV_TRANSPORT}: want one of {', '.join(get_args(Transport))}; it is {transport!r}"
        raise ConfigError(message)
    if (transport == "map") != bool(socket):
        message = (
            f"{ENV_TRANSPORT} is {transport!r} and {ENV_SOCKET} {socket or ''!r}: map needs the coordinator's "
            "socket, local has none; set both or neither"
        )
        raise ConfigError(message)
    return Path(socket) if socket else None
