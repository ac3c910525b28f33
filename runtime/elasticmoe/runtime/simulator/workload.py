"""Requests to simulate: closed batches, traces of real services, a burst and calm. The same for the same seed."""

import csv
import math
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.simulator.requests import Arrival

TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SHARES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)
SHAREGPT_PROMPTS = (4, 5, 7, 10, 16, 25, 47, 105, 214, 321, 436, 617, 753, 901, 1005, 1023)
SHAREGPT_ANSWERS = (4, 4, 8, 11, 20, 37, 76, 139, 216, 287, 366, 505, 656, 859, 1428, 1857)
"""Quantiles, at those shares, of the tokens in first turns of ShareGPT that vLLM's own benchmark would take; counted
roughly, without a tokenizer, and so scaled to the means that are published for it."""
SHAREGPT_MEANS = (215.2, 198.3)


def sharegpt(num: int, rate_s: float, most_answer: int, seed: int = 0) -> tuple[Arrival, ...]:
    """Return Poisson arrivals with ShareGPT's lengths, answers cut at `most_answer` tokens.

    Lengths are the quantiles themselves, shuffled: seeds differ in order and arrivals only.
    """
    rng, now_s, arrivals = random.Random(seed), 0.0, []
    prompts = _quantiles(SHAREGPT_PROMPTS, num, SHAREGPT_MEANS[0], rng)
    answers = _quantiles(SHAREGPT_ANSWERS, num, SHAREGPT_MEANS[1], rng)
    for prompt, answer in zip(prompts, answers, strict=True):
        arrivals.append(Arrival(now_s, prompt, min(answer, most_answer)))
        now_s += rng.expovariate(rate_s)
    return tuple(arrivals)


def _quantiles(table: Sequence[int], num: int, mean: float, rng: random.Random) -> list[int]:
    values = np.interp((np.arange(num) + 0.5) / num, SHARES, table)
    scaled = [max(1, int(value)) for value in values * (mean / values.mean())]
    rng.shuffle(scaled)
    return scaled


def closed_batch(num: int = 256, seed: int = 0) -> tuple[Arrival, ...]:
    """Return requests that all come at once: lognormal, mean 168 in and 205 out with the default seed."""
    rng = random.Random(seed)
    lengths = [(_lognormal(rng, 4.6, 1.1, 2000), _lognormal(rng, 5.0, 0.8, 800)) for _ in range(num)]
    return tuple(Arrival(0.0, prompt, output) for prompt, output in lengths)


def burst_then_calm(burst: Sequence[Arrival], calm_s: float, rate_s: float, seed: int = 0) -> tuple[Arrival, ...]:
    """Return the burst, and beside and after it, until `calm_s`, a trickle of requests of its lengths."""
    rng, now_s, trickle = random.Random(seed), 0.0, []
    while (now_s := now_s + rng.expovariate(rate_s)) < calm_s:
        one = rng.choice(burst)
        trickle.append(Arrival(now_s, one.prompt_tokens, one.output_tokens))
    return (*burst, *trickle)


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """Return every request of an Azure trace in order, its first one at 0; raises ConfigError for another file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [tuple(row[name] for name in TRACE_COLUMNS) for row in csv.DictReader(file)]
            found = [(_seconds(at), int(prompt), int(output)) for at, prompt, output in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"trace {path}: want a CSV with the columns {', '.join(TRACE_COLUMNS)} ({error})") from error
    start_s = min((at for at, _, _ in found), default=0.0)
    return tuple(Arrival(at - start_s, max(1, prompt), max(1, output)) for at, prompt, output in sorted(found))


def excerpt(trace: Sequence[Arrival], first: int, num: int, stretch: float, max_tokens: int) -> tuple[Arrival, ...]:
    """Return `num` requests in a row from `first`, their gaps times `stretch`, prompts cut so that each one fits."""
    chosen = trace[first : first + num]
    start_s = chosen[0].at_s
    return tuple(_fit(one, (one.at_s - start_s) * stretch, max_tokens) for one in chosen)


def _fit(one: Arrival, at_s: float, max_tokens: int) -> Arrival:
    output = min(one.output_tokens, max_tokens // 2)
    return Arrival(at_s, min(one.prompt_tokens, max_tokens - output), output)


def _seconds(stamp: str) -> float:
    """Return a time stamp in seconds; seven digits of a fraction are one more than datetime takes."""
    whole, _, fraction = stamp.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + (float("0." + fraction) if fraction else 0.0)


def _lognormal(rng: random.Random, mu: float, sigma: float, most: int) -> int:
    return min(most, max(4, math.floor(rng.lognormvariate(mu, sigma))))
