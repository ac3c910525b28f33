"""What a step costs, learned from measured steps: T(tokens, misses) = compute + the copies that it does not hide.

A layer's copies are hidden beside a share of its compute, which is learned too. `StepModel` takes in samples; `StepFit`
is the frozen result that policies predict with. Shapes broadcast, so one call predicts many candidates.
"""

from dataclasses import dataclass
from math import expm1

import numpy as np

from elasticmoe.runtime.adjuster.misses import Floats, Misses, touched_share
from elasticmoe.runtime.adjuster.sample import StepSample
from elasticmoe.runtime.expert_load import log_spared

NUM_TERMS = 3
INSTANT_S = 1e-12
"""What a copy or a step takes at least, however fast it was measured: next to nothing, but a number to divide by."""
RIDGE = 1e-3
"""Weight of “a step costs the same whatever its batch” against what was measured."""

PRIOR_OVERLAP, PRIOR_OVERLAP_S = 0.5, 0.05
"""The first guess: half of compute hides copies, which only trying can show; and the seconds of compute it weighs."""
LEAST_TOLD = 1e-3
"""Share of layers that miss more than they hide, below which a sample says nothing of what they hide."""
PRIOR_MISSES = 32.0
"""What the first guess weighs that as many experts are missed as by independent routing."""
PRIOR_ANSWER = 256.0
"""Tokens of the one answer that is taken to have ended before any has."""
RECENT = 8
"""How much faster than the GPU's costs the traffic's ways fade: its prompts, and its misses for each one expected."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """What is known of a step's cost; nothing is predicted while `is_ready` is False."""

    num_steps: float = 0.0
    """Steps that the fit rests on, older ones counted less."""
    terms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of compute: each step, with all experts touched, each token."""
    mean_spared: float = 0.0
    """Log of the chance that a token is not routed to a given expert of a layer, over all experts."""
    num_layers: int = 1
    """MoE layers."""
    expert_s: float = 0.0
    """Seconds of one expert's copy to the GPU."""
    overlap: float = 0.0
    """Share of a layer's compute beside which its copies run; 0: every copy is waited for."""
    miss_factor: float = 1.0
    """Fetches measured for each one expected."""
    prompts_per_token: float = 0.0
    """Answers that end for each token that comes out: as many requests start for it, while many wait."""
    prompt_tokens: float = 0.0
    """Tokens of one prompt."""

    @property
    def is_ready(self) -> bool:
        """Return whether both compute and the bus were measured."""
        return sum(self.terms) > 0 and self.expert_s > 0

    def compute_s(self, tokens: Floats | float) -> Floats:
        """Return the seconds of compute of a step over so many tokens with every expert resident."""
        each_step, experts, each_token = self.terms
        return each_step + experts * touched_share(tokens, self.mean_spared) + each_token * tokens

    def compute_alone_s(self, tokens: float) -> float:
        """Return `compute_s` of one step; where a step is judged each time a request is short, numpy takes too long."""
        each_step, experts, each_token = self.terms
        return each_step - experts * expm1(tokens * self.mean_spared) + each_token * tokens

    def copy_s(self, misses: Misses) -> Floats:
        """Return the seconds of all copies of a step in which each layer misses so many experts."""
        return self.num_layers * self.expert_s * misses.mean

    def step_s(self, tokens: Floats, misses: Misses) -> Floats:
        """Return the seconds of a step over so many tokens in which each layer misses so many experts."""
        compute_s = self.compute_s(tokens)
        return compute_s + self.num_layers * self.expert_s * misses.beyond(self._room(compute_s))

    def room(self, tokens: Floats | float) -> Floats:
        """Return how many misses a layer hides in a step over so many tokens; 0 while nothing was measured."""
        return self._room(self.compute_s(tokens)) if self.is_ready else np.zeros_like(tokens)

    def _room(self, compute_s: Floats) -> Floats:
        return self.overlap / (self.num_layers * self.expert_s) * compute_s


class StepModel:
    """Sums of measurements in which older ones count less; all means are over steps."""

    def __init__(self, mean_share: float, half_life_steps: int, num_layers: int, expert_bytes: int) -> None:
        """Start knowing nothing; `mean_share` is top_k / experts, `expert_bytes` are of one rank."""
        self._mean_spared = float(log_spared(mean_share))
        self._half_life_steps = half_life_steps
        self._num_layers = num_layers
        self._expert_bytes = expert_bytes
        self._steps = 0.0
        self._x = np.zeros(NUM_TERMS - 1)
        self._xx = np.zeros((NUM_TERMS - 1, NUM_TERMS - 1))
        self._y = 0.0
        self._xy = np.zeros(NUM_TERMS - 1)
        self._ratios = dict.fromkeys(("bus", "overlap", "misses", "prompts", "prompt_tokens"), (0.0, 0.0))
        self.fit = self._solved()

    def learn(self, sample: StepSample, expected: Misses) -> None:
        """Take in a sample; `expected` was to be missed by one layer in one of its steps, on average."""
        keep = 0.5 ** (sample.num_steps / self._half_life_steps)
        self._fade(keep)
        self._ratio("bus", sample.copy_s, sample.copied_bytes)
        self._ratio("prompts", len(sample.answers), sample.num_new_tokens)
        if sample.num_steps:
            self._regress(sample)
            self._overlap(sample, expected)
            self._ratio("misses", sample.num_missed, float(expected.mean) * self._num_layers * sample.num_steps)
            self._ratio("prompt_tokens", sample.num_prompt_tokens, sample.num_started)
        self.fit = self._solved()

    def _fade(self, keep: float) -> None:
        self._steps *= keep
        self._y *= keep
        self._x, self._xx, self._xy = self._x * keep, self._xx * keep, self._xy * keep
        for name, (above, below) in self._ratios.items():
            kept = keep if name in ("bus", "overlap") else keep**RECENT
            self._ratios[name] = (above * kept, below * kept)

    def _ratio(self, name: str, above: float, below: float) -> None:
        sums = self._ratios[name]
        self._ratios[name] = (sums[0] + above, sums[1] + below)

    def _known(self, name: str, unknown: float) -> float:
        above, below = self._ratios[name]
        return above / below if below > 0 else unknown

    def _believed(self, name: str, guess: float, weight: float) -> float:
        """Return a ratio that starts as a guess, as firm as `weight` of the unit below."""
        above, below = self._ratios[name]
        return (above + guess * weight) / (below + weight)

    def _regress(self, sample: StepSample) -> None:
        num = sample.num_steps
        prompts = sample.num_prompt_steps / num
        touched = prompts + (1 - prompts) * float(touched_share(sample.num_requests / num, self._mean_spared))
        x, y = np.array([touched, sample.num_tokens / num]), (sample.duration_s - sample.exposed_s) / num
        self._steps += num
        self._x += num * x
        self._xx += num * np.outer(x, x)
        self._y += num * y
        self._xy += num * x * y

    def _overlap(self, sample: StepSample, expected: Misses) -> None:
        """Correct the share of compute that hides copies by how far the hidden seconds are from what it predicts.

        Only layers that miss more than they hide tell: by so much a sample counts. Steps with prompts, whose compute is
        longer than the mean, count less.
        """
        compute_s, expert_s = sample.duration_s - sample.exposed_s, self._expert_s
        if compute_s <= INSTANT_S or not sample.num_missed or not expert_s:
            return
        layers = self._num_layers * sample.num_steps
        mean = sample.num_missed / layers
        variance = min(mean, float(expected.variance) * mean / max(float(expected.mean), 1e-9))
        misses, share = Misses(np.asarray(mean), np.asarray(variance)), self.fit.overlap
        room = share * compute_s / (layers * expert_s)
        predicted_s = layers * expert_s * (mean - float(misses.beyond(room)))
        hidden_s = max(0.0, sample.num_missed * expert_s - sample.exposed_s)
        told = float(misses.saturation(room))
        better = min(1.0, max(0.0, share + (hidden_s - predicted_s) / (compute_s * max(told, LEAST_TOLD))))
        weight = compute_s * (told * (1 - sample.num_prompt_steps / sample.num_steps)) ** 2
        self._ratio("overlap", better * weight, weight)

    @property
    def _expert_s(self) -> float:
        seconds = self._known("bus", 0.0) * self._expert_bytes
        return max(seconds, INSTANT_S) if seconds else 0.0

    def _solved(self) -> StepFit:
        return StepFit(
            num_steps=self._steps,
            terms=self._terms(),
            mean_spared=self._mean_spared,
            num_layers=self._num_layers,
            expert_s=self._expert_s,
            overlap=self._believed("overlap", PRIOR_OVERLAP, PRIOR_OVERLAP_S),
            miss_factor=self._believed("misses", 1.0, PRIOR_MISSES),
            prompts_per_token=self._believed("prompts", 1 / PRIOR_ANSWER, PRIOR_ANSWER),
            prompt_tokens=self._known("prompt_tokens", 0.0),
        )

    def _terms(self) -> tuple[float, float, float]:
        """Return the least squares' terms, none of them negative."""
        if not self._steps:
            return 0.0, 0.0, 0.0
        x, y = self._x / self._steps, max(0.0, self._y / self._steps)
        spread = self._xx / self._steps - np.outer(x, x)
        slopes = _positive_slopes(spread, self._xy / self._steps - x * y, RIDGE * x * x)
        explained = float(slopes @ x)
        if explained > y:
            slopes, explained = slopes * (y / explained), y
        return y - explained, float(slopes[0]), float(slopes[1])


def _positive_slopes(spread: Floats, along: Floats, ridge: Floats) -> Floats:
    """Return the slopes of two terms by ridge regression; where one would be negative it is 0, the other fits alone."""
    ridged = spread + np.diag(ridge + np.finfo(float).tiny)
    slopes = np.linalg.solve(ridged, along)
    if (slopes >= 0).all():
        return np.asarray(slopes)
    alone = np.maximum(along, 0) / np.diag(ridged)
    better = int(np.argmax(alone * np.maximum(along, 0)))
    return np.asarray(np.where(np.arange(len(alone)) == better, alone, 0.0))
