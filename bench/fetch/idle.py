"""Microseconds that a fetch takes which finds nothing to copy, by batch size: what an all-resident layer pays."""

import torch

from bench.fetch.setup import SHAPE, Experts
from bench.kernel.shapes import route
from bench.kernel.timing import median_us
from elasticmoe.kernels.fetch import fetch_needed

SIZES = (1, 16, 256, 1024, 8192)
CALLS = 20
REPEATS = 9


def idle_us(experts: Experts) -> dict[str, float]:
    """By number of tokens: one call in a graph of many, with every expert resident."""
    resident = torch.ones(SHAPE.num_experts, dtype=torch.bool, device="cuda")
    size, found = experts.pool.layout.matrix_bytes, {}
    for tokens in SIZES:
        ids = route(SHAPE, tokens, skewed=False, seed=0)[1]

        def call(ids: torch.Tensor = ids) -> None:
            fetch_needed(ids, experts.tables[0], resident, experts.masters(0), experts.storage, size)

        found[str(tokens)] = round(median_us([call] * CALLS, REPEATS), 2)
    return found
