"""Tokens that each expert drew: decayed counts, routing probability and the ranking.

The scheduler feeds it the workers' routed counts; the adjuster and the placement at start read the ranking.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from elasticmoe.runtime.errors import ConfigError

TIE = 1e-7
"""Tokens by which an expert is taken to be colder than the one before it, too few to tell others than equals apart."""


def log_spared(share: np.ndarray | float) -> np.ndarray:
    """Return the log of the chance that one token is not routed to an expert to which it is with chance `share`."""
    spared: np.ndarray = np.log1p(-np.minimum(share, 1 - 1e-9))
    return spared


class ExpertLoad:
    """Counts halve every `half_life_tokens` tokens, so that a shift in traffic re-ranks the experts.

    Shapes: [layers, experts]. Where two experts tie, the lower id ranks first. What is read is worked out when it is
    read, once per change.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life_tokens: int, top_k: int) -> None:
        """Start with no knowledge: every expert equally likely; a token goes to `top_k` experts of a layer."""
        self.top_k = top_k
        self.total = np.zeros((num_layers, num_experts), dtype=np.int64)
        """Tokens since start, none of them faded: what a profile is made of."""
        self._counts = np.zeros((num_layers, num_experts))
        self._half_life_tokens = half_life_tokens
        self._probability: np.ndarray | None = None
        self._heat: np.ndarray | None = None
        self._spared: np.ndarray | None = None
        self._coldest_spared: np.ndarray | None = None

    def seed(self, profile: np.ndarray) -> None:
        """Start from an offline profile, worth one half-life of tokens; `profile` is [layers, experts] counts."""
        totals = profile.sum(axis=1, keepdims=True)
        share = np.divide(profile, totals, out=np.zeros_like(self._counts), where=totals > 0)
        self._set(share * (self._half_life_tokens * self.top_k))

    def add(self, routed: np.ndarray) -> None:
        """Add [layers, experts] int counts of routed tokens, padding excluded."""
        self.total += routed
        tokens = routed.sum(axis=1, keepdims=True) / self.top_k
        self._set(self._counts * 0.5 ** (tokens / self._half_life_tokens) + routed)

    @property
    def probability(self) -> np.ndarray:
        """Return each expert's share of its layer's tokens; all equal in a layer that nothing is known of."""
        if self._probability is None:
            totals = self._counts.sum(axis=1, keepdims=True)
            uniform = np.full_like(self._counts, 1 / self._counts.shape[1])
            self._probability = np.divide(self._counts, totals, out=uniform, where=totals > 0)
        return self._probability

    @property
    def heat(self) -> np.ndarray:
        """Return the counts with ties told apart: in each layer no two are equal, of equals the lower id is hotter."""
        if self._heat is None:
            self._heat = self._counts - TIE * np.arange(self._counts.shape[1])
        return self._heat

    @property
    def ranking(self) -> np.ndarray:
        """Return each layer's expert ids, hottest first."""
        return np.argsort(-self.heat, axis=1)

    @property
    def spared(self) -> np.ndarray:
        """Return the log of each expert's chance not to be one of a token's."""
        if self._spared is None:
            self._spared = log_spared(self.top_k * self.probability)
        return self._spared

    @property
    def coldest_spared(self) -> np.ndarray:
        """Return [experts]: the same of a layer's i-th coldest expert, whose chance is the mean of the layers."""
        if self._coldest_spared is None:
            self._coldest_spared = log_spared(self.top_k * np.sort(self.probability, axis=1).mean(axis=0))
        return self._coldest_spared

    def _set(self, counts: np.ndarray) -> None:
        self._counts = counts
        self._probability = self._heat = self._spared = self._coldest_spared = None


def read_profile(path: Path, num_layers: int, num_experts: int) -> np.ndarray:
    """Return the [layers, experts] counts of a profile file: JSON, `{"counts": [[tokens per expert] per layer]}`."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        counts = np.asarray(document["counts"], dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        message = f"profile {path}: want JSON with a table `counts`, but it can't be read ({error}); make it anew"
        raise ConfigError(message) from error
    if counts.shape != (num_layers, num_experts):
        message = (
            f"profile {path}: want {num_layers} layers of {num_experts} counts for this model, it has a table of shape "
            f"{counts.shape}; make it from this model's own requests"
        )
        raise ConfigError(message)
    wrong = counts[~(np.isfinite(counts) & (counts >= 0))]
    if wrong.size:
        message = f"profile {path}: want counts >= 0, it holds {wrong[0]}; make it from this model's own requests"
        raise ConfigError(message)
    return counts
