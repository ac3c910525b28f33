"""A real checkpoint, and its experts as the safetensors library reads them."""

from pathlib import Path

import pytest

from elasticmoe.runtime.cli.main import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3-MoE checkpoint in float32."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert main(["make-model", "tiny", str(folder)]) == 0
    return folder
