"""Tokens that each expert drew: decayed counts, routing probability and the ranking.

The scheduler feeds it the workers' routed counts; the adjuster and the placement at start read the ranking.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from elasticmoe.runtime.errors import ConfigError


class ExpertLoad:
    """Counts halve every `half_life_tokens` tokens, so that a shift in traffic re-ranks the experts.

    Shapes: [layers, experts]. Where two experts tie, the lower id ranks first.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life_tokens: int) -> None:
        """Start with no knowledge: every expert equally likely."""
        self._counts = np.zeros((num_layers, num_experts))
        self._half_life_tokens = half_life_tokens
        self._refresh()

    def seed(self, profile: np.ndarray, top_k: int) -> None:
        """Start from an offline profile, worth one half-life of tokens; `profile` is [layers, experts] counts."""
        share = profile / np.maximum(profile.sum(axis=1, keepdims=True), 1)
        self._counts = share * (self._half_life_tokens * top_k)
        self._refresh()

    def add(self, routed: np.ndarray, top_k: int) -> None:
        """Add [layers, experts] int counts of routed tokens, padding excluded."""
        tokens = routed.sum(axis=1, keepdims=True) / top_k
        self._counts = self._counts * 0.5 ** (tokens / self._half_life_tokens) + routed
        self._refresh()

    def _refresh(self) -> None:
        totals = self._counts.sum(axis=1, keepdims=True)
        uniform = np.full_like(self._counts, 1 / self._counts.shape[1])
        self.probability = np.divide(self._counts, totals, out=uniform, where=totals > 0)
        self.ranking = np.argsort(-self.probability, axis=1, kind="stable")


def read_profile(path: Path, num_layers: int, num_experts: int) -> np.ndarray:
    """Return the [layers, experts] counts of a profile file: JSON, `{"counts": [[tokens per expert] per layer]}`."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        counts = np.asarray(document["counts"], dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"profile {path}: want JSON with a table `counts`, but it can't be read ({error}); make it anew"
        raise ConfigError(message) from error
    if counts.shape != (num_layers, num_experts) or not np.isfinite(counts).all() or (counts < 0).any():
        message = (
            f"profile {path}: want {num_layers} layers of {num_experts} counts >= 0 for this model, "
            f"it has shape {counts.shape}; make it from this model's own requests"
        )
        raise ConfigError(message)
    return counts
