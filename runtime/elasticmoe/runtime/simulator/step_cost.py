"""What one step costs: compute by bytes and FLOPs, copies beside it, and what of them stays exposed.

Fitted to measured steps of one H200 (docs/simulator.md); every other GPU by its bandwidths.
"""

from dataclasses import dataclass

import numpy as np

from elasticmoe.runtime.simulator.hardware import Gpu
from elasticmoe.runtime.simulator.served import ServedModel

OVERLAP_POWER = 1.5
"""Memory and compute of a kernel overlap as (m^p + c^p)^(1/p): measured between 1 and 8192 tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step computes."""

    num_tokens: int
    num_requests: int
    kv_tokens: int
    """Tokens of KV that are read: those of all requests, as they are after the step."""
    attended: int = 0
    """Pairs of a new and an older token in prompts; decode is bound by reading KV."""

    @property
    def has_prompts(self) -> bool:
        """Return whether any request computes more than its next token."""
        return self.num_tokens > self.num_requests


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step."""

    compute_s: float
    """All but copies; looking for what is to be fetched included where the host does it."""
    copy_s: float
    """Copies of missed experts and of planned loads."""
    total_s: float

    @property
    def exposed_s(self) -> float:
        """Return the part of the copies that the step had to wait for."""
        return self.total_s - self.compute_s


@dataclass(frozen=True, slots=True)
class StepModel:
    """Prices steps of one model on one GPU: with CUDA graphs or without, fetches hidden behind compute or not.

    A layer's fetch starts when its tokens are routed, so it hides behind that layer's experts; one that `looks_ahead`
    starts a layer earlier, and hides behind a whole layer.
    """

    gpu: Gpu
    model: ServedModel
    is_eager: bool = False
    hides_fetches: bool = True
    looks_ahead: bool = False

    def cost(
        self, batch: Batch, distinct: np.ndarray, missed: np.ndarray, num_loads: int, *, may_miss: bool
    ) -> StepCost:
        """Return the cost of a step.

        `distinct` and `missed` are [MoE layers]: experts that are read, experts of those that must be copied first.
        `num_loads` experts are copied into pages for later steps; `may_miss`: some expert is not resident.
        """
        experts_s, layers_s, rest_s = self._compute(batch, distinct)
        launched_s = self._launched_s(batch)
        compute_s = float(np.maximum(layers_s, launched_s).sum()) + rest_s
        missed_s = missed * self.expert_s
        loads_s = num_loads * self.expert_s
        copy_s = float(missed_s.sum()) + loads_s
        if not may_miss and not num_loads:
            return StepCost(compute_s, 0.0, compute_s)
        if not self.hides_fetches:
            synced_s = compute_s + self.gpu.host_sync_s * len(layers_s)
            return StepCost(synced_s, copy_s, max(synced_s + float(missed_s.sum()), copy_s))
        hidden_s = np.minimum(missed_s, layers_s if self.looks_ahead else experts_s)
        joined_s = float(np.maximum(layers_s + missed_s - hidden_s, launched_s).sum()) + rest_s
        beside_s = min(float(hidden_s.sum()) + loads_s, compute_s)
        idle_s = self.gpu.fetch_idle_s * len(layers_s)
        return StepCost(compute_s, copy_s, max(joined_s + self.gpu.contention * beside_s, copy_s) + idle_s)

    @property
    def expert_s(self) -> float:
        """Return the seconds of one expert's copy."""
        return self.model.expert_bytes / self.gpu.copy_bytes_s

    def idle_cost(self, num_loads: int) -> StepCost:
        """Return the cost of a step without tokens: only its copies."""
        copy_s = num_loads * self.expert_s
        return StepCost(0.0, copy_s, copy_s)

    def experts_s(self, num_tokens: int, distinct: np.ndarray) -> np.ndarray:
        """Return the seconds that the experts of each layer take, launches aside; `distinct` [MoE layers] are read."""
        reach_s, flops_s = self._rates()
        weights = self.model.expert_bytes / self.model.itemsize * self.model.shape.top_k
        return _both(distinct * self.model.expert_bytes / reach_s, 2 * num_tokens * weights / flops_s)

    def _rates(self) -> tuple[float, float]:
        """Return the bytes and FLOPs a second that kernels reach."""
        return self.gpu.memory_bytes_s * self.gpu.memory_share, self.gpu.flops_s * self.gpu.flops_share

    def _launched_s(self, batch: Batch) -> float:
        """Return the seconds that the host needs to launch a layer, where no graph of the whole step does."""
        if self.is_eager:
            return self.model.num_launches * self.gpu.eager_launch_s
        return self.model.num_launches * self.gpu.prompt_launch_s if batch.has_prompts else 0.0

    def _compute(self, batch: Batch, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the seconds of each MoE layer's experts, of the whole layer, and of the rest.

        The rest: other layers, the output head, the step itself.
        """
        gpu, model = self.gpu, self.model
        reach_s, flops_s = self._rates()
        experts_s = self.experts_s(batch.num_tokens, distinct)
        dense_s = _both(
            np.array(model.dense_bytes / reach_s),
            2 * batch.num_tokens * model.dense_bytes / model.itemsize / flops_s,
        )
        kv_s = batch.kv_tokens * model.kv_bytes / reach_s
        pairs_s = 4 * batch.attended * model.attention_width * model.num_layers / flops_s
        per_layer_s = float(dense_s + kv_s + pairs_s) / model.num_layers + gpu.layer_s + self._link_s(batch)
        rest_s = per_layer_s * (model.num_layers - len(distinct)) + gpu.step_s + batch.num_requests * gpu.request_s
        return experts_s, experts_s + per_layer_s, rest_s

    def _link_s(self, batch: Batch) -> float:
        """Return the seconds of a layer's two all-reduces."""
        if self.model.num_gpus == 1:
            return 0.0
        num_bytes = batch.num_tokens * self.model.shape.hidden_size * self.model.itemsize
        return 2 * (self.gpu.link_s + num_bytes / self.gpu.link_bytes_s)


def _both(memory_s: np.ndarray, compute_s: float) -> np.ndarray:
    """Return the time of a kernel that reads for `memory_s` and computes for `compute_s`."""
    return np.asarray((memory_s**OVERLAP_POWER + compute_s**OVERLAP_POWER) ** (1 / OVERLAP_POWER))
