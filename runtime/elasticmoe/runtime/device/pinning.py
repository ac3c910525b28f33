"""Pins a host pool beside what else starts: the kernel and the driver are what takes its time."""

import time
from concurrent.futures import Future
from threading import Thread
from typing import NamedTuple

import torch

from elasticmoe.runtime.device.host_pool import HostPool


class Pinned(NamedTuple):
    """How it ended."""

    error: int
    """CUDA's code; 0: the pool is pinned."""
    seconds: float


class Pinning:
    """One pool's pinning, in a thread of its own.

    Its end must be waited for before the device reads from the pool, and before a graph is captured: CUDA lets nobody
    register memory meanwhile.
    """

    def __init__(self, pool: HostPool, device: torch.device) -> None:
        """Start to pin for the device."""
        self._pool = pool
        self._device = device
        self._end = Future[Pinned]()
        Thread(target=self._run, name="pinning", daemon=True).start()  # a start that fails waits for the pages at most

    def wait(self) -> Pinned:
        """Return how it ended, once it has; raises what it raised."""
        return self._end.result()

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # a thread starts with the first one
            started_s = time.perf_counter()
            error = self._pool.pin()
            self._end.set_result(Pinned(error, time.perf_counter() - started_s))
        except BaseException as fault:  # noqa: BLE001 -- whoever waits gets it
            self._end.set_exception(fault)
