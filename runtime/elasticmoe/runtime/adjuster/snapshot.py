"""What the adjuster sees of one step: a frozen value, put together by the adjuster from what the scheduler tells it.

A policy sees this and no more. What a step costs it knows from `fit`, which is learned from StepSamples (sample.py),
so from what an engine measures; the simulator's own constants have no way in.
"""

from dataclasses import dataclass

import numpy as np

from elasticmoe.runtime.adjuster.step_model import StepFit
from elasticmoe.runtime.pages.table import OFFLOADED, RESIDENT


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One step's input, amounts in expert pages; the arrays are read, never written."""

    short_pages: int
    """R_b: what the request that just failed to get its blocks lacks."""
    free_pages: int
    """F_b: pages whose blocks are all free, unreferenced cached ones included."""
    waiting_pages: int
    """What the requests that wait will need to start."""
    num_waiting: int
    """Requests that wait and that the engine's own limits would let run beside those that do."""
    waited_s: float
    """Seconds that the first of them whose first token is still to come has waited; 0 without any."""
    num_running: int
    kv_pages: float
    """Blocks that requests hold, in pages' worth of bytes."""
    prompt_tokens: int
    """Tokens of prompts in the step that is scheduled, those of a request that is short of pages included."""
    step_budget_s: float
    """Seconds that this step may take before requests that run are late."""
    lost_tokens: int
    """Computed tokens that a preemption throws away if `short_pages` isn't covered; 0 where a request just waits."""
    limit: int
    """Experts of one layer that may leave the GPU (the effective limit)."""
    state: np.ndarray
    """[layers, experts] int8: pages.table's states."""
    num_slotted: np.ndarray
    """[layers] int64: experts of the layer that hold a slot."""
    buffer_depth: np.ndarray
    """[loading_depth] int64: slots of each loading buffer; layer l uses buffer l mod loading_depth."""
    probability: np.ndarray
    """[layers, experts] float64: share of the layer's routed tokens."""
    heat: np.ndarray
    """[layers, experts] float64: tokens that each expert drew, ties told apart."""
    spared: np.ndarray
    """[layers, experts] float64: log of each expert's chance not to be one of a token's."""
    coldest_spared: np.ndarray
    """[experts] float64: the same of the i-th coldest expert of a layer, whose chance is the mean of the layers."""
    fit: StepFit
    """What a step costs, as far as this engine has measured it."""

    @property
    def num_layers(self) -> int:
        """Return the number of MoE layers."""
        return int(self.state.shape[0])

    @property
    def num_experts(self) -> int:
        """Return the experts of one layer."""
        return int(self.state.shape[1])

    @property
    def depth(self) -> float:
        """Return the experts of a layer that hold a slot, mean of the layers."""
        return float(sum(self.num_slotted.tolist()) / self.num_layers)

    @property
    def num_offloaded(self) -> np.ndarray:
        """Return [layers] int64: experts of the layer that are only in host memory, not being loaded."""
        return np.asarray((self.state == OFFLOADED).sum(axis=1))

    @property
    def num_away(self) -> int:
        """Return the experts of all layers that are only in host memory, not being loaded."""
        return int(np.count_nonzero(self.state == OFFLOADED))

    def resident_heat(self) -> np.ndarray:
        """Return [layers, experts]: the heat of each resident expert, inf for others, so the least is the coldest."""
        return np.where(self.state == RESIDENT, self.heat, np.inf)

    def offloaded_heat(self) -> np.ndarray:
        """Return [layers, experts]: the heat of each offloaded expert, -inf for others, so the most is the hottest."""
        return np.where(self.state == OFFLOADED, self.heat, -np.inf)
