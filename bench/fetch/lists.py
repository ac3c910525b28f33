"""Microseconds that a layer's list takes to make, by batch size: the MoE waits for it, predicted or not."""

import torch

from bench.fetch.setup import SHAPE, Experts
from bench.kernel.shapes import route
from bench.kernel.timing import median_us
from elasticmoe.kernels.fetch import list_needed

SIZES = (1, 16, 256, 1024, 8192)
CALLS = 20
REPEATS = 9


def list_us(experts: Experts) -> dict[str, float]:
    """By number of tokens: one call in a graph of many, with every other expert offloaded."""
    resident = torch.arange(SHAPE.num_experts, device="cuda") % 2 == 0
    found = {}
    for tokens in SIZES:
        ids = route(SHAPE, tokens, skewed=False, seed=0)[1]

        def call(ids: torch.Tensor = ids) -> object:
            return list_needed(ids, experts.tables[0], resident, experts.buffers[0])

        found[str(tokens)] = round(median_us([call] * CALLS, REPEATS), 2)
    return found
