"""The file through which processes that vLLM started tell `elasticmoe serve` why they refuse."""

from pathlib import Path

import pytest

from elasticmoe.runtime.contract.names import ENV_REFUSAL_FILE
from elasticmoe.runtime.engine.refusal import recorded
from elasticmoe.runtime.errors import ConfigError, UnsupportedError


def test_the_first_refusal_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several workers that refuse, the first one's sentence stays, whole; every error still passes."""
    path = tmp_path / "refusal"
    monkeypatch.setenv(ENV_REFUSAL_FILE, str(path))
    with pytest.raises(UnsupportedError, match="first"), recorded():
        raise UnsupportedError("the first, and longer, sentence")
    with pytest.raises(ConfigError, match="second"), recorded():
        raise ConfigError("the second")
    assert path.read_text(encoding="utf-8") == "the first, and longer, sentence"


def test_without_a_file_the_error_just_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of `elasticmoe serve` nobody asks for the sentence."""
    monkeypatch.delenv(ENV_REFUSAL_FILE, raising=False)
    with pytest.raises(ConfigError), recorded():
        raise ConfigError("wrong")
