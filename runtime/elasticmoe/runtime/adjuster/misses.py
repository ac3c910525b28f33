"""Experts that a step misses, and how many of them its layers have to wait for.

A layer's copies run beside a part of its own compute, so each layer hides its first few misses and waits for the rest:
what counts is how the misses lie over the layers. Shapes broadcast, so one call predicts many candidates.
"""

import math
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray
"""float64, of any shape."""

LOGISTIC = math.sqrt(3) / math.pi
"""Scale of a logistic variable, for each unit of its standard deviation."""
LEAST_SCALE = 1e-3
"""Of an expert: numbers of misses that are known still need a scale."""


@dataclass(frozen=True, slots=True)
class Misses:
    """Experts of one layer that a step misses: they vary between layers and steps."""

    mean: Floats
    variance: Floats

    def beyond(self, room: Floats | float) -> Floats:
        """Return how many of them, on average, are more than the `room` experts that a layer hides.

        E[max(0, misses - room)] = s log(1 + exp((mean - room) / s)) of a logistic variable with this mean and variance,
        s = sqrt(3 variance) / pi being its scale: nearly a normal one, and in closed form. At most the mean: the
        variable may be below 0, and misses aren't.
        """
        scale = self._scale()
        over: Floats = np.minimum(scale * np.logaddexp(0.0, (self.mean - room) / scale), self.mean)
        return over

    def saturation(self, room: float) -> Floats:
        """Return the share of layers that miss more than `room` experts, 1 if nothing is hidden.

        The derivative of `beyond` by the mean: of one more miss in each layer, so much is waited for.
        """
        if room <= 0:
            return np.ones_like(self.mean)
        odds = np.minimum((room - self.mean) / self._scale(), 700.0)  # e^710 is more than there is
        return np.asarray(1.0 / (1.0 + np.exp(odds)))

    def scaled(self, factor: float, most: Floats) -> "Misses":
        """Return `factor` times as many, at most `most`."""
        return Misses(np.minimum(most, factor * self.mean), factor * self.variance)

    def _scale(self) -> Floats:
        scale: Floats = np.maximum(LEAST_SCALE, LOGISTIC * np.sqrt(np.maximum(self.variance, 0.0)))
        return scale


def touched_share(tokens: Floats | float, spared: Floats | float) -> Floats:
    """Return the chance that any of `tokens` is routed to an expert that one token spares with chance e^`spared`."""
    touched: Floats = -np.expm1(tokens * spared)
    return touched


def expected_misses(spared: Floats, depth: Floats, tokens: Floats) -> Misses:
    """Return [..., n]: what a layer misses in a step over `tokens` [..., n] with its `depth` [n] coldest offloaded.

    `spared` [experts] is the log of the chance that one token is not routed to the layer's i-th coldest expert. Between
    two whole depths some layers have one more offloaded than the others.
    """
    coldest = spared[: int(max(depth.tolist())) + 1]
    share_away = np.minimum(np.maximum(depth[:, None] - np.arange(len(coldest)), 0.0), 1.0)
    missed = share_away * touched_share(tokens[..., None], coldest)
    mean = missed.sum(axis=-1)
    return Misses(mean, mean - np.einsum("...j,...j->...", missed, missed))
