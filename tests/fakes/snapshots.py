"""Snapshots for tests of policies: consistent by construction, every number open to change."""

import math
from typing import Any

import numpy as np

from elasticmoe.runtime.adjuster.snapshot import Snapshot
from elasticmoe.runtime.adjuster.step_model import StepFit
from elasticmoe.runtime.expert_load import log_spared
from elasticmoe.runtime.pages.table import RESIDENT


def make_snapshot(state: np.ndarray, *, loading_depth: int = 2, top_k: int = 1, **changes: Any) -> Snapshot:  # noqa: ANN401 -- any field
    """Return a snapshot with this [layers, experts] state, slots to match, and lower ids hotter."""
    num_layers, num_experts = state.shape
    slotted = (state != RESIDENT).sum(axis=1)
    order = np.asarray(changes.pop("ranking", np.tile(np.arange(num_experts), (num_layers, 1))))
    falling = np.linspace(2, 1, num_experts) / (1.5 * num_experts)
    probability = np.empty((num_layers, num_experts))
    np.put_along_axis(probability, order, np.tile(falling, (num_layers, 1)), axis=1)
    fields: dict[str, Any] = {
        "short_pages": 0,
        "free_pages": 5,
        "waiting_pages": 0,
        "num_waiting": 0,
        "waited_s": 0.0,
        "num_running": 1,
        "kv_pages": 10.0,
        "prompt_tokens": 0,
        "step_budget_s": math.inf,
        "lost_tokens": 0,
        "limit": num_experts,
        "state": state,
        "num_slotted": slotted,
        "buffer_depth": np.array([slotted[n::loading_depth].max() for n in range(min(loading_depth, num_layers))]),
        "probability": probability,
        "heat": -np.argsort(order, axis=1).astype(np.float64),
        "spared": log_spared(top_k * np.asarray(changes.get("probability", probability))),
        "coldest_spared": log_spared(np.take_along_axis(probability, order, axis=1).mean(axis=0)[::-1]),
        "fit": StepFit(),
    }
    return Snapshot(**(fields | changes))


def offloaded_tail(*num_offloaded: int, num_experts: int = 8) -> np.ndarray:
    """Return the state in which layer l has its last num_offloaded[l] experts offloaded."""
    columns = np.arange(num_experts)
    kept = num_experts - np.array(num_offloaded)[:, None]
    return np.where(columns < kept, RESIDENT, 0).astype(np.int8)
