"""What a step costs, learned from measured steps: T(tokens, missed bytes) = max(compute, copy) + exposed remainder.

`StepModel` takes in samples; `StepFit` is the frozen result that policies predict with. Shapes broadcast, so one call
predicts many candidates.
"""

from dataclasses import dataclass

import numpy as np

from elasticmoe.runtime.adjuster.sample import StepSample

Floats = np.ndarray
"""float64, of any shape."""

NUM_TERMS = 3
RIDGE = 1e-3
"""Weight of “a step costs the same whatever its batch” against what was measured."""

PRIOR_REMAINDER, PRIOR_OVERLAP_S = 0.5, 0.05
"""The first guess: half of a copy is hidden, which only trying can show; and the seconds of overlap that it weighs."""
PRIOR_MISSES = 32.0
"""What the first guess weighs that as many experts are missed as by independent routing."""
RECENT = 8
"""How much faster than the GPU's costs the traffic's ways fade: its prompts, and its misses for each one expected."""


def touched_share(tokens: Floats, share: Floats) -> Floats:
    """Return the chance that any of `tokens` is routed to an expert that one token is routed to with chance `share`."""
    return np.asarray(-np.expm1(tokens * np.log1p(-np.minimum(share, 1 - 1e-9))))


@dataclass(frozen=True, slots=True)
class StepFit:
    """What is known of a step's cost; nothing is predicted while `is_ready` is False."""

    num_steps: float = 0.0
    """Steps that the fit rests on, older ones counted less."""
    terms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of compute: each step, with all experts touched, each token."""
    mean_share: float = 1.0
    """Chance that a token is routed to a given expert of a layer, over all experts: top_k / experts."""
    seconds_per_byte: float = 0.0
    """Of a copy to the GPU."""
    remainder: float = 1.0
    """Share of the shorter one of compute and copy that the other does not hide; 1: nothing overlaps."""
    miss_factor: float = 1.0
    """Fetches measured for each one expected."""
    prompts_per_token: float = 0.0
    """Steps that compute prompts, for each token that comes out."""
    prompt_tokens: float = 0.0
    """Tokens of prompts in such a step."""

    @property
    def is_ready(self) -> bool:
        """Return whether both compute and the bus were measured."""
        return sum(self.terms) > 0 and self.seconds_per_byte > 0

    def compute_s(self, tokens: Floats) -> Floats:
        """Return the seconds of compute of a step over so many tokens with every expert resident."""
        each_step, experts, each_token = self.terms
        touched = touched_share(tokens, np.asarray(self.mean_share))
        return np.asarray(each_step + experts * touched + each_token * tokens)

    def step_s(self, tokens: Floats, missed_bytes: Floats) -> Floats:
        """Return the seconds of a step over so many tokens that fetches so many bytes."""
        compute, copy = self.compute_s(tokens), missed_bytes * self.seconds_per_byte
        return np.asarray(np.maximum(compute, copy) + self.remainder * np.minimum(compute, copy))


def expected_misses(coldness: Floats, depth: Floats, tokens: Floats) -> Floats:
    """Return [n]: experts of one layer that a step over `tokens` [n] misses with its `depth` [n] coldest offloaded.

    `coldness` [experts] is the chance that one token is routed to the layer's i-th coldest expert.
    """
    coldest = coldness[: int(depth.max()) + 1]
    missed = np.zeros((len(depth), len(coldest) + 1))
    stays_away = np.log1p(-np.minimum(coldest, 1 - 1e-9))
    np.cumsum(-np.expm1(tokens[:, None] * stays_away), axis=1, out=missed[:, 1:])
    whole = np.minimum(depth.astype(np.int64), len(coldest) - 1)
    rows = np.arange(len(depth))
    below, above = missed[rows, whole], missed[rows, whole + 1]
    return np.asarray(below + (depth - whole) * (above - below))


class StepModel:
    """Sums of measurements in which older ones count less; all means are over steps."""

    def __init__(self, mean_share: float, half_life_steps: int) -> None:
        """Start knowing nothing; `mean_share` is top_k / experts."""
        self._mean_share = mean_share
        self._half_life_steps = half_life_steps
        self._steps = 0.0
        self._x = np.zeros(NUM_TERMS - 1)
        self._xx = np.zeros((NUM_TERMS - 1, NUM_TERMS - 1))
        self._y = 0.0
        self._xy = np.zeros(NUM_TERMS - 1)
        self._ratios = dict.fromkeys(("bus", "remainder", "misses", "prompts", "prompt_tokens"), (0.0, 0.0))
        self.fit = StepFit(mean_share=mean_share)

    def learn(self, sample: StepSample, missed_bytes: float, expected_missed: float) -> None:
        """Take in a sample, with the bytes of its missed fetches and the number of them that was to be expected."""
        keep = 0.5 ** (sample.num_steps / self._half_life_steps)
        self._fade(keep)
        self._ratio("bus", sample.copy_s, sample.copied_bytes)
        if sample.num_steps:
            self._regress(sample)
            self._overlap(sample, missed_bytes)
            self._ratio("misses", sample.num_missed, expected_missed)
            self._ratio("prompts", sample.num_prompt_steps, sample.num_new_tokens)
            self._ratio("prompt_tokens", sample.num_prompt_tokens, sample.num_prompt_steps)
        self.fit = self._solved()

    def _fade(self, keep: float) -> None:
        self._steps *= keep
        self._y *= keep
        self._x, self._xx, self._xy = self._x * keep, self._xx * keep, self._xy * keep
        for name, (above, below) in self._ratios.items():
            kept = keep if name in ("bus", "remainder") else keep**RECENT
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
        decoding = np.asarray(sample.num_requests / num)
        touched = prompts + (1 - prompts) * float(touched_share(decoding, np.asarray(self._mean_share)))
        x, y = np.array([touched, sample.num_tokens / num]), (sample.duration_s - sample.exposed_s) / num
        self._steps += num
        self._x += num * x
        self._xx += num * np.outer(x, x)
        self._y += num * y
        self._xy += num * x * y

    def _overlap(self, sample: StepSample, missed_bytes: float) -> None:
        compute, copy = sample.duration_s - sample.exposed_s, missed_bytes * self._known("bus", 0.0)
        self._ratio("remainder", max(0.0, sample.exposed_s - max(0.0, copy - compute)), min(compute, copy))

    def _solved(self) -> StepFit:
        return StepFit(
            num_steps=self._steps,
            terms=self._terms(),
            mean_share=self._mean_share,
            seconds_per_byte=self._known("bus", 0.0),
            remainder=min(1.0, self._believed("remainder", PRIOR_REMAINDER, PRIOR_OVERLAP_S)),
            miss_factor=self._believed("misses", 1.0, PRIOR_MISSES),
            prompts_per_token=self._known("prompts", 0.0),
            prompt_tokens=self._known("prompt_tokens", 0.0),
        )

    def _terms(self) -> tuple[float, float, float]:
        """Return the least squares' terms, none of them negative."""
        if not self._steps:
            return 0.0, 0.0, 0.0
        x, y = self._x / self._steps, self._y / self._steps
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
