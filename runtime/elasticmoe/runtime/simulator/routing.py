"""Which experts a batch touches: the routing of a simulated model, known to the simulator and to nobody else.

The generator of published skew: logit = 0.8 g(expert) + 0.75 r(expert, request) + z(token), all normal; a token takes
the top k. A request has one of a few drawn r, so a batch is counts by r, and what it touches is one matrix product.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

RoutingName = Literal["flat", "skewed"]
FIXED_WEIGHT, REQUEST_WEIGHT = 0.8, 0.75
NUM_GROUPS = 32
"""Drawn r; requests are dealt to them in turn."""
BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Routing:
    """Chances of being selected by one token, by group of requests; flat [groups, layers * experts]."""

    num_layers: int
    num_experts: int
    selected: np.ndarray
    log_missed: np.ndarray
    """[groups, layers * experts] float32: log of the chance that one token leaves the expert alone."""

    @property
    def num_groups(self) -> int:
        """Return how many groups requests are dealt to."""
        return int(self.selected.shape[0])

    def touched(self, tokens_by_group: np.ndarray) -> np.ndarray:
        """Return [layers * experts] float32: the chance that a batch touches each expert."""
        missed: np.ndarray = np.exp(tokens_by_group.astype(np.float32) @ self.log_missed)
        return 1 - missed

    def expected_counts(self, tokens_by_group: np.ndarray) -> np.ndarray:
        """Return [layers, experts] float32: the tokens that each expert draws on average."""
        counts: np.ndarray = tokens_by_group.astype(np.float32) @ self.selected
        return counts.reshape(self.num_layers, self.num_experts)


def make_routing(name: RoutingName, num_layers: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    """Return the routing of a model; the same for the same seed."""
    if name == "flat":
        selected = np.full((1, num_layers * num_experts), top_k / num_experts)
    else:
        rng = np.random.default_rng(seed)
        fixed = FIXED_WEIGHT * rng.standard_normal((num_layers, num_experts))
        own = REQUEST_WEIGHT * rng.standard_normal((NUM_GROUPS, num_layers, num_experts))
        selected = _selection(fixed + own, top_k).reshape(NUM_GROUPS, -1)
    clipped = selected.clip(max=1 - 1e-7)
    return Routing(num_layers, num_experts, selected.astype(np.float32), np.log1p(-clipped).astype(np.float32))


def _selection(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Return the chance that each expert is among the top k when every logit gets normal noise of its own.

    The k-th logit hardly varies among many, so it is taken as the threshold that k experts pass on average.
    """
    low = np.full((*logits.shape[:-1], 1), -10.0)
    high = np.full_like(low, 10.0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        passing = _normal_cdf(logits - middle).sum(axis=-1, keepdims=True)
        low, high = np.where(passing > top_k, middle, low), np.where(passing > top_k, high, middle)
    return _normal_cdf(logits - low)


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    """Return the normal distribution's share below x: by a polynomial (error 1e-7), as numpy has no erf."""
    t = 1 / (1 + 0.2316419 * np.abs(x))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * poly
    return np.asarray(np.where(x >= 0, 1 - tail, tail))
