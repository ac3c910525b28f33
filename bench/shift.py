"""How fast residency follows a shift of the hot experts: online ranking with swaps, and an offline ranking beside it.

Routing is the calibrated generator of published skew (logit = 0.8 g + 0.75 r + z: fixed, per request, AR(1) per token)
for Qwen3-30B-A3B's shape, 32 requests at a time; halfway g is drawn anew. The adjuster is the engine's: counts arrive
every 16 steps, swaps keep to their bytes a step. No model runs. Run it with `.venv/bin/python bench/shift.py`; it
writes bench/results/shift.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.serving.arguments import count, new_file  # noqa: E402 -- found through the line above
from bench.serving.files import end_in_a_sentence  # noqa: E402 -- found through the line above
from bench.serving.meta import collect_meta  # noqa: E402 -- found through the line above
from elasticmoe.runtime.adjuster.adjuster import Adjuster, Demand  # noqa: E402
from elasticmoe.runtime.cli.staging import write_whole  # noqa: E402 -- found through the line above
from elasticmoe.runtime.contract.config import RuntimeConfig  # noqa: E402
from elasticmoe.runtime.expert_load import ExpertLoad  # noqa: E402
from elasticmoe.runtime.pages.placement import Geometry  # noqa: E402
from elasticmoe.runtime.pages.table import RESIDENT  # noqa: E402
from elasticmoe.runtime.pages.tiers import fit_tiers  # noqa: E402
from elasticmoe.runtime.units import MATRICES, BlockId  # noqa: E402

RESULT = ROOT / "bench" / "results" / "shift.json"
NUM_LAYERS, NUM_EXPERTS, TOP_K = 48, 128, 8
EXPERT_PAGE, BLOCK = 3 * 2**20, 3 * 2**19
FREE_PAGES = 12
REPORT_STEPS = 16
ANSWER_TOKENS = 200
WARMUP_STEPS = 400
PROFILE_STEPS = 200
LEVEL = 0.95


class Router:
    """The generator for a batch of requests, each of which ends after a while and makes room for another."""

    def __init__(self, batch: int, seed: int) -> None:
        """Draw the fixed part and the first requests."""
        self.random = np.random.default_rng(seed)
        self.own = self._normal(batch, NUM_LAYERS, NUM_EXPERTS)
        self.token = self._normal(batch, NUM_LAYERS, NUM_EXPERTS)
        self.redraw()

    def redraw(self) -> None:
        """Draw which experts are hot."""
        self.fixed = self._normal(NUM_LAYERS, NUM_EXPERTS)

    def route(self) -> np.ndarray:
        """[layers, experts] counts of one token of each request."""
        ended = np.flatnonzero(self.random.random(len(self.own)) < 1 / ANSWER_TOKENS)
        self.own[ended] = self._normal(len(ended), NUM_LAYERS, NUM_EXPERTS)
        self.token = 0.5 * self.token + np.float32(0.75**0.5) * self._normal(*self.token.shape)
        logits = 0.8 * self.fixed + 0.75 * self.own + self.token
        chosen = np.argpartition(-logits, TOP_K, axis=2)[:, :, :TOP_K]
        counts = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
        np.add.at(counts, (np.arange(NUM_LAYERS)[:, None], chosen.transpose(1, 0, 2).reshape(NUM_LAYERS, -1)), 1)
        return counts

    def _normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, dtype=np.float32)


class NoPort:
    """A KV side that takes note of nothing."""

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""


def make_adjuster(away: int, profile: np.ndarray) -> Adjuster:
    """An adjuster with so many experts of each layer away, placed by a profile, and a few pages free."""
    config = RuntimeConfig(policy="fixed")
    pages = MATRICES * (NUM_LAYERS * (NUM_EXPERTS - away) + 2 * away) + FREE_PAGES
    geometry = Geometry(fit_tiers(EXPERT_PAGE, BLOCK), 2 * pages + 4, NUM_LAYERS, NUM_EXPERTS, 2, request_blocks=1)
    load = ExpertLoad(NUM_LAYERS, NUM_EXPERTS, config.adjuster.half_life_tokens, TOP_K)
    load.seed(profile)
    return Adjuster(geometry, config, load, NoPort(), away)


@dataclass(frozen=True, slots=True)
class Row:
    """One run: shares of routed tokens that found their expert resident, and how long the way back took."""

    ranking: str
    seed: int
    before: float
    lowest: float
    after: float
    swaps_needed: int
    steps_by_budget: int
    steps_to_level: int | None
    is_within_twice: bool


def run(online: bool, seed: int, batch: int, away: int, num_steps: int) -> tuple[Row, list[float]]:  # noqa: FBT001
    """One run, and the resident share of every 16 steps."""
    router = Router(batch, seed)
    profile = np.sum([router.route() for _ in range(PROFILE_STEPS)], axis=0)
    adjuster = make_adjuster(away, profile)
    shares: list[float] = []
    waiting = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
    needed = 0
    for number in range(WARMUP_STEPS + 2 * num_steps):
        if number == WARMUP_STEPS + num_steps:
            router.redraw()
            needed = count_needed(router.fixed, adjuster.table.state, away)
        adjuster.begin_step()
        adjuster.drain()
        counts = router.route()
        shares.append(float(counts[adjuster.table.state == RESIDENT].sum() / counts.sum()))
        waiting += counts
        if online and number % REPORT_STEPS == REPORT_STEPS - 1:
            adjuster.load.add(waiting)
            waiting[:] = 0
        if online:
            adjuster.adjust(Demand(0, batch, 0))
    return summarize(shares[WARMUP_STEPS:], adjuster, online, seed, needed), windows(shares[WARMUP_STEPS:])


def count_needed(fixed: np.ndarray, state: np.ndarray, away: int) -> int:
    """Experts that are hot now, in the long run, and not resident."""
    hot = np.argsort(-fixed, axis=1)[:, : NUM_EXPERTS - away]
    return int((np.take_along_axis(state, hot, axis=1) != RESIDENT).sum())


def windows(shares: list[float]) -> list[float]:
    """Means of 16 steps each."""
    whole = len(shares) // REPORT_STEPS * REPORT_STEPS
    return [round(float(mean), 4) for mean in np.reshape(shares[:whole], (-1, REPORT_STEPS)).mean(axis=1)]


def summarize(shares: list[float], adjuster: Adjuster, online: bool, seed: int, needed: int) -> Row:  # noqa: FBT001
    """What a run shows; the share is taken as the mean of the last 16 steps."""
    half = len(shares) // 2
    before, then = float(np.mean(shares[:half])), np.array(shares[half:])
    smooth = np.convolve(then, np.full(REPORT_STEPS, 1 / REPORT_STEPS), mode="valid")
    is_back = smooth[REPORT_STEPS:] >= LEVEL * before  # not the first steps, which the mean has not followed yet
    steps = int(np.argmax(is_back)) + 2 * REPORT_STEPS if is_back.any() else None
    per_step = adjuster.config.adjuster.bytes_per_step // adjuster.expert_bytes
    budget = -(-needed // per_step)
    return Row(
        ranking="online" if online else "offline",
        seed=seed,
        before=round(before, 4),
        lowest=round(float(smooth.min()), 4),
        after=round(float(then[-len(then) // 4 :].mean()), 4),
        swaps_needed=needed,
        steps_by_budget=budget,
        steps_to_level=steps,
        is_within_twice=steps is not None and steps <= 2 * budget,
    )


def main() -> int:
    """Run both rankings for each seed and write the result; 0 when done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=count, default=32)
    parser.add_argument(
        "--away", type=count, default=32, help="experts of a layer that are not resident (default 32 of 128)"
    )
    parser.add_argument("--steps", type=count, default=800, help="steps before the shift, and after it (default 800)")
    parser.add_argument("--seeds", type=count, default=2)
    parser.add_argument("--output", type=new_file, default=RESULT)
    args = parser.parse_args()
    meta, rows, curves = asdict(collect_meta()), [], {}
    for seed in range(args.seeds):
        for online in (True, False):
            row, curve = run(online, seed, args.batch, args.away, args.steps)
            rows.append(asdict(row))
            curves[f"{row.ranking}, seed {seed}"] = curve
            print(row, flush=True)
    adjuster = RuntimeConfig().adjuster
    scenario = {
        "batch": args.batch,
        "away": args.away,
        "steps": args.steps,
        "layers": NUM_LAYERS,
        "experts": NUM_EXPERTS,
    }
    scenario |= {"half_life_tokens": adjuster.half_life_tokens, "bytes_per_step": adjuster.bytes_per_step}
    result = {"meta": meta, "scenario": scenario, "rows": rows, "share_by_16_steps": curves}
    write_whole(args.output, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(end_in_a_sentence(main))
