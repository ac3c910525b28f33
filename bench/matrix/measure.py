"""A cell's figures out of what its recorder saw. Pure."""

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.matrix.drive import Recorder, Served

TTFT_MS, TPOT_MS = 5000.0, 100.0
"""What a user is promised."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of them don't exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def ttft_ms(one: Served) -> float:
    """Return the milliseconds from arrival to the first token."""
    return 1000 * (one.first_s - one.arrived_s)


def tpot_ms(one: Served) -> float | None:
    """Return the mean milliseconds between tokens; None of a single one."""
    gaps = len(one.tokens) - 1
    return 1000 * (one.last_s - one.first_s) / gaps if gaps > 0 else None


def is_good(one: Served) -> bool:
    """Return whether the request got what is promised."""
    return ttft_ms(one) <= TTFT_MS and (tpot_ms(one) or 0.0) <= TPOT_MS


def figures(recorder: Recorder, wall_s: float) -> dict[str, Any]:
    """Return the part of a cell's row that any system has."""
    served = list(recorder.served.values())
    ttfts = [ttft_ms(one) for one in served]
    tpots = [tpot for tpot in map(tpot_ms, served) if tpot is not None]
    good = [one for one in served if is_good(one)]
    return {
        "num_requests": len(served),
        "num_tokens": sum(len(one.tokens) for one in served),
        "wall_s": wall_s,
        "tok_s": sum(len(one.tokens) for one in served) / wall_s,
        "ttft_ms": statistics.median(ttfts),
        "p99_ttft_ms": percentile(ttfts, 0.99),
        "tpot_ms": statistics.median(tpots) if tpots else None,
        "p99_tpot_ms": percentile(tpots, 0.99),
        "goodput_ok": len(good) / len(served),
        "goodput_tok_s": sum(len(one.tokens) for one in good) / wall_s,
        "preemptions": recorder.preemptions,
        "peak": recorder.peak,
        "steps": len(recorder.steps),
        "resident_min": recorder.resident_min,
    }


def company(steps: Sequence[Mapping[int, int]]) -> dict[int, str]:
    """Return for each request a digest of every batch that it was in, in order: equal ones were served alike."""
    chains: dict[int, bytes] = {}
    for step in steps:
        batch = hashlib.blake2b(repr(sorted(step.items())).encode(), digest_size=8).digest()
        for number in step:
            chains[number] = hashlib.blake2b(chains.get(number, b"") + batch, digest_size=8).digest()
    return {number: chain.hex() for number, chain in chains.items()}
