"""The Rimuru paper's case: one RTX 5090, Qwen1.5-MoE-A2.7B, ShareGPT at 10 requests a second, stock, fixed and elastic.

The paper gives peaks of 34/74/90 requests and about 2100/1300/1000 steps. It leaves open how many requests there are
and how much room stock has for KV: both are fitted, to stock's two figures alone. Also open, and assumed: answers end
at 512 tokens, the fixed split offloads a tenth of each layer (6 of 60 experts), the elastic one up to 10 more (its best
value, says the paper). All without CUDA graphs, as in the paper.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

from elasticmoe.runtime.contract.config import PolicyName, RuntimeConfig
from elasticmoe.runtime.simulator.hardware import RTX_5090
from elasticmoe.runtime.simulator.scheduler import Limits
from elasticmoe.runtime.simulator.served import read_served
from elasticmoe.runtime.simulator.simulation import Simulation
from elasticmoe.runtime.simulator.system import System
from elasticmoe.runtime.simulator.workload import sharegpt

MODEL = Path(__file__).resolve().parent.parent / "models" / "qwen1.5-moe-a2.7b.json"
RATE_S, MOST_ANSWER, NUM_FIXED, NUM_MORE = 10.0, 512, 6, 10
GRID_REQUESTS, GRID_GIB = range(180, 261, 20), (1.3, 1.4, 1.5, 1.6, 1.7)


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests at peak and steps, of the paper or of simulations (means over seeds)."""

    peak: float
    steps: float

    def distance(self, paper: "Figures") -> float:
        """Return the larger of the two relative deviations."""
        return max(abs(self.peak / paper.peak - 1), abs(self.steps / paper.steps - 1))


PAPER = {"stock": Figures(34, 2100), "fixed": Figures(74, 1300), "elastic": Figures(90, 1000)}
POLICIES: dict[str, tuple[PolicyName | None, int | None]] = {
    "stock": (None, None),
    "fixed": ("fixed", NUM_FIXED),
    "elastic": ("threshold", NUM_FIXED + NUM_MORE),
}


@dataclass(frozen=True, slots=True)
class Open:
    """What the paper leaves open."""

    num_requests: int
    kv_gib: float


FITTED = Open(180, 1.4)
"""What `fit` returns."""


def simulate(design: str, free: Open, num_seeds: int = 3) -> Figures:
    """Return a design's figures, means over seeds."""
    policy, limit = POLICIES[design]
    outcomes = []
    for seed in range(num_seeds):
        system = System(
            model=read_served(MODEL),
            gpu=RTX_5090,
            kv_bytes=int(free.kv_gib * 2**30),
            config=None if policy is None else RuntimeConfig(policy=policy),
            limit=limit,
            max_model_len=2048,
            limits=Limits(max_num_batched_tokens=2048),
            is_eager=True,
            seed=seed,
        )
        outcomes.append(Simulation(system, sharegpt(free.num_requests, RATE_S, MOST_ANSWER, seed)).run())
    return Figures(statistics.mean(one.peak for one in outcomes), statistics.mean(one.num_steps for one in outcomes))


def fit() -> Open:
    """Return the point of the grid at which stock comes closest to the paper's stock."""
    grid = [Open(num, gib) for num in GRID_REQUESTS for gib in GRID_GIB]
    return min(grid, key=lambda free: simulate("stock", free).distance(PAPER["stock"]))
