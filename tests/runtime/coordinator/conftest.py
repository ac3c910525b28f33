"""A real checkpoint, and a node to run processes on."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticmoe.runtime.cli.main import main
from tests.runtime.coordinator.node import Node


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3-MoE checkpoint in float32."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert main(["make-model", "tiny", str(folder)]) == 0
    return folder


@pytest.fixture
def node(tiny: Path, tmp_path: Path) -> Iterator[Node]:
    """Give a node with nothing on it; at its end all processes of it are gone."""
    with ExitStack() as stack:
        yield Node(stack, tmp_path / "run" / "pool.sock", tiny)
