"""The operator's own environment."""

import pytest

from elasticmoe.operator.errors import SettingsError
from elasticmoe.operator.settings import read_settings

IMAGES = {"ELASTICMOE_RUNTIME_IMAGE": "host:5000/a/runtime:1", "ELASTICMOE_COORDINATOR_IMAGE": "coordinator:2"}
DIGEST = "sha256:" + "a" * 64


def test_both_images_must_be_named() -> None:
    """The message names the variable and shows a value."""
    with pytest.raises(SettingsError, match=r"^ELASTICMOE_COORDINATOR_IMAGE: want an image such as .* set it$"):
        read_settings({"ELASTICMOE_RUNTIME_IMAGE": "runtime:1"})


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("host:5000/a/runtime:1", "host:5000/a/runtime:1"),
        ("host:5000/a/runtime", "host:5000/a/runtime:latest"),
        ("runtime", "runtime:latest"),
        (f"runtime@{DIGEST}", f"runtime@{DIGEST}"),
    ],
)
def test_an_image_is_named_as_everywhere(text: str, reference: str) -> None:
    """A registry's port is no tag; a digest stays."""
    settings = read_settings({**IMAGES, "ELASTICMOE_RUNTIME_IMAGE": text})
    assert settings.images.runtime.reference == reference


def test_namespace_and_pull_policy_have_defaults() -> None:
    """All namespaces; pull what is not there."""
    settings = read_settings(IMAGES)
    assert (settings.namespace, settings.images.runtime.pull_policy) == (None, "IfNotPresent")
    named = read_settings({**IMAGES, "ELASTICMOE_WATCH_NAMESPACE": "a", "ELASTICMOE_PULL_POLICY": "Never"})
    assert (named.namespace, named.images.coordinator.pull_policy) == ("a", "Never")
