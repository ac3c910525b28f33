"""What a snapshot's engine would serve at another depth of offloading, by its own measurements.

Depth is the number of experts that every layer has offloaded, on average; the coldest go first. Called by `goodput`.
"""

from dataclasses import dataclass

import numpy as np

from elasticmoe.runtime.adjuster.misses import Floats, Misses, expected_misses
from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.units import MATRICES


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests that would run and seconds of a step, for each depth; all [n]."""

    requests: Floats
    step_s: Floats
    """Of the mean step: some compute prompts too."""
    decode_s: Floats
    """Of a step that computes no prompt."""

    @property
    def tokens_per_s(self) -> Floats:
        """Return the tokens that come out a second."""
        return np.asarray(self.requests / self.step_s)

    @property
    def decoded_per_s(self) -> Floats:
        """Return the tokens that come out a second while no prompt is computed."""
        return np.asarray(self.requests / self.decode_s)


def forecast(snap: Snapshot, depth: Floats) -> Forecast:
    """Return what to expect at each depth [n]; `snap.fit` must be ready and a request must run."""
    fit = snap.fit
    requests = _requests(snap, depth)
    prompts = requests * fit.prompts_per_token
    tokens = np.array((requests, requests + fit.prompt_tokens * np.maximum(1.0, prompts)))  # [without, with prompts]
    decode_s, prompt_s = fit.step_s(tokens, misses_at(snap, depth, tokens))
    prompts = np.minimum(1.0, prompts)
    return Forecast(requests, (1.0 - prompts) * decode_s + prompts * prompt_s, decode_s)


def _requests(snap: Snapshot, depth: Floats) -> Floats:
    """Return the requests that would run: as many as want to, while their pages last.

    Whoever is short of pages now counts as one of them, with what it lacks: a waiting request is one more.
    """
    num_wanting = snap.num_running + (snap.short_pages > 0 and not snap.lost_tokens)
    pages_each = max((snap.kv_pages + snap.short_pages) / num_wanting, 1e-9)
    gained = MATRICES * (snap.num_layers - len(snap.buffer_depth)) * (depth - snap.depth)
    room = np.maximum(1.0, (snap.kv_pages + snap.free_pages + gained) / pages_each)
    requests: Floats = np.minimum(float(snap.num_running + snap.num_waiting), room)
    return requests


def misses_at(snap: Snapshot, depth: Floats, tokens: Floats) -> Misses:
    """Return [..., n]: what a layer would miss in a step over `tokens` [..., n] because it is routed to and absent."""
    return expected_misses(snap.coldest_spared, depth, tokens).scaled(snap.fit.miss_factor, depth)
