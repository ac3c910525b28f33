"""The worker's host pool: its own for transport `local`; for `map` the node's, leased, and then no expert is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.coordinator.client import Lease, acquire
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId, plan_manifest

COORDINATOR_WAIT_S: Final = 120.0
"""How long a worker waits for a coordinator to answer; how long that reads then is its own affair."""


def wanted_pool(vllm_config: VllmConfig, shape: ModelShape) -> Manifest:
    """Return which pool this rank needs, and where its matrices lie; raises ConfigError for one that can't be."""
    model = vllm_config.model_config
    pool = PoolId(
        model=str(Path(model.model)),
        revision=model.revision or "",
        dtype=str(model.dtype).removeprefix("torch."),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        rank=get_tensor_model_parallel_rank(),
    )
    return plan_manifest(pool, shape)


def open_pool(wanted: Manifest, dtype: torch.dtype, socket: Path | None) -> tuple[HostPool, Lease | None]:
    """Return the rank's pool: full, with the lease that keeps it, where there is a coordinator's socket; else empty."""
    if socket is None:
        return HostPool(wanted.layout, dtype), None
    lease = acquire(socket, wanted, COORDINATOR_WAIT_S)
    return HostPool(wanted.layout, dtype, lease.memory), lease


@contextmanager
def loading_into(pool: HostPool) -> Iterator[None]:
    """Keep vLLM's loader, inside, from reading expert tensors if the pool is full already.

    Its filter for expert parallel skips the experts of other ranks before they are read: here, all of them.
    """
    stock = DefaultModelLoader._init_ep_weight_filter

    def skip_all_experts(loader: DefaultModelLoader, _: ModelConfig) -> None:
        loader.local_expert_ids = set()

    if pool.is_mapped:
        DefaultModelLoader._init_ep_weight_filter = skip_all_experts
    try:
        yield
    finally:
        DefaultModelLoader._init_ep_weight_filter = stock
