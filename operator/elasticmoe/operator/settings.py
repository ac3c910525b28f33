"""The operator's own settings, from its environment; the chart sets them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from elasticmoe.operator.builders.pod import DefaultImages
from elasticmoe.operator.errors import SettingsError
from elasticmoe.operator.spec.model import Image

ENV_RUNTIME_IMAGE: Final = "ELASTICMOE_RUNTIME_IMAGE"
ENV_COORDINATOR_IMAGE: Final = "ELASTICMOE_COORDINATOR_IMAGE"
ENV_PULL_POLICY: Final = "ELASTICMOE_PULL_POLICY"
ENV_NAMESPACE: Final = "ELASTICMOE_WATCH_NAMESPACE"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator runs by default, and where it looks."""

    images: DefaultImages
    namespace: str | None
    """The only namespace to serve; None: all."""


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return the settings; raises SettingsError that names the variable."""
    images = DefaultImages(_image(env, ENV_RUNTIME_IMAGE), _image(env, ENV_COORDINATOR_IMAGE))
    return Settings(images, env.get(ENV_NAMESPACE) or None)


def _image(env: Mapping[str, str], variable: str) -> Image:
    reference = env.get(variable, "")
    if not reference:
        message = f"{variable}: want an image such as registry.example/elasticmoe-runtime:1.0, it is not set; set it"
        raise SettingsError(message)
    policy = env.get(ENV_PULL_POLICY) or "IfNotPresent"
    name, _, digest = reference.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # the colon is a registry's port
        repository, tag = name, "latest"
    return Image.model_validate({"repository": repository, "tag": tag, "digest": digest or None, "pullPolicy": policy})
