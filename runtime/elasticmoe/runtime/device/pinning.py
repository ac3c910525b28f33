"""Pins a host pool beside what else starts, and says how it is read where that is refused.

The kernel and the driver are what takes the time.
"""

import time
from concurrent.futures import Future
from threading import Thread
from typing import NamedTuple

import torch

from elasticmoe.runtime.contract.config import FetchKind, RuntimeConfig
from elasticmoe.runtime.device import cudart
from elasticmoe.runtime.device.host_pool import HostPool
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.units import mib

REMEDY = (
    "raise `ulimit -l` (of a container --ulimit memlock=-1, or let it have the capability IPC_LOCK) or free host memory"
)

FAULT = 2**31 - 1
"""Among the ranks, in the place of CUDA's code: a rank's pinning came to no end of its own."""


class Pinned(NamedTuple):
    """How it ended."""

    error: int
    """CUDA's code; 0: the pool is pinned."""
    seconds: float


class Pinning:
    """One pool's pinning, in a thread of its own, which calls CUDA past torch: see `cudart`.

    Its end must be waited for before the device reads from the pool, and before a graph is captured: CUDA lets nobody
    register memory meanwhile.
    """

    def __init__(self, pool: HostPool, device: torch.device) -> None:
        """Start to pin for the device."""
        self._pool = pool
        self._device = device
        self._end = Future[Pinned]()
        Thread(target=self._run, name="pinning", daemon=True).start()  # a start that fails waits for nothing of it

    def wait(self) -> Pinned:
        """Return how it ended, once it has; raises what it raised."""
        return self._end.result()

    def _run(self) -> None:
        try:
            if error := cudart.set_device(self._device.index):  # a thread starts with the first one
                message = f"want to pin host memory for {self._device}, which CUDA refused to choose (error {error})"
                raise RuntimeError(message)  # noqa: TRY301 -- as anything else that is wrong
            started_s = time.perf_counter()
            error = self._pool.pin()
            self._end.set_result(Pinned(error, time.perf_counter() - started_s))
        except BaseException as fault:  # noqa: BLE001 -- whoever waits gets it
            self._end.set_exception(fault)


def pageable_warning(pool_bytes: int, error: int, config: RuntimeConfig, fetch: FetchKind) -> str:
    """Return what is told where CUDA refused to pin a pool, for `error`, and the host drives fetches from it as it is.

    `fetch` was to drive them. Raises ConfigError where the configuration asks for what only a device does, which can't
    read pageable memory.
    """
    refused = f"pinning {mib(pool_bytes)} of host memory was refused (cudaHostRegister: CUDA error {error})"
    asks = "lookahead" if config.lookahead else f"fetch: {config.fetch}" if config.fetch == "device" else None
    if asks:
        message = f"{refused}, and {asks} has the device read it, which takes pinned memory: {REMEDY}, or leave "
        raise ConfigError(f"{message}{asks.partition(':')[0]} out, so that the host drives fetches")
    costs = "copies are slower and hold up the host"
    if fetch == "device":
        costs = f"the host drives the fetches, without CUDA graphs, and {costs}: expect fewer tokens/s"
    return f"{refused}, so it is served from pageable memory: {costs}; to have it pinned {REMEDY}"


def wait_for_all(pinning: Pinning, group: torch.distributed.ProcessGroup) -> Pinned:
    """Return how this rank's pinning took, with the largest error of the group's: all serve from pinned memory or none.

    Raises what this rank's raised, or RuntimeError where another's did: no rank is left to wait for it.
    """
    try:
        error, seconds = pinning.wait()
    except Exception:
        worst_error(FAULT, group)
        raise
    error = worst_error(error, group)
    if error == FAULT:
        raise RuntimeError("the host pool could not be pinned on another rank, whose own error tells why")
    return Pinned(error, seconds)


def worst_error(error: int, group: torch.distributed.ProcessGroup) -> int:
    """Return the largest error of the group's ranks; each has to ask, and waits for the last that does."""
    worst = torch.tensor([error])
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX, group)
    return int(worst)
