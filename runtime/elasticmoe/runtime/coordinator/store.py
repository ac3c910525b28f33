"""The pools that a coordinator has: read from the checkpoint or taken over, kept as descriptors, freed.

Knows nothing of workers and leases. Safe to call from several threads.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.coordinator import checkpoint, loader
from elasticmoe.runtime.coordinator.metrics import Metrics
from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool import available, shared
from elasticmoe.runtime.hostpool.manifest import LAYOUT_VERSION, Manifest, PoolId, plan_manifest
from elasticmoe.runtime.units import mib

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool: what it is, and the descriptor of its sealed memory."""

    manifest: Manifest
    fd: int


class PoolStore:
    """Pools by digest; each digest has one descriptor, which the store closes when it frees the pool."""

    def __init__(self, model: str, revision: str, metrics: Metrics) -> None:
        """Serve the checkpoint in the folder `model`; raises CheckpointError or UnsupportedError if it can't be."""
        self._model = str(Path(model))  # without a last slash
        self._revision = revision
        self._shape: ModelShape = checkpoint.read_shape(Path(model))
        self._metrics = metrics
        self._pools: dict[str, Pool] = {}
        self._loading = threading.Lock()

    def plan(self, pool: PoolId) -> Manifest:
        """Return what a pool of this id is; raises CoordinatorError for an id of another model or release."""
        ours = replace(pool, model=self._model, revision=self._revision, layout_version=LAYOUT_VERSION)
        if differences := ours.differences(pool):
            message = f"this coordinator serves {'; '.join(differences)}; use the socket of the right one"
            raise CoordinatorError(message)
        return plan_manifest(pool, self._shape)

    def get(self, digest: str) -> Pool:
        """Return a pool that was kept."""
        return self._pools[digest]

    def load(self, manifest: Manifest) -> Pool:
        """Return a pool read from the checkpoint, sealed, not yet kept; one load at a time, so that memory adds up.

        Raises PoolTooSmallError or CheckpointError; then nothing is left of it.
        """
        with self._loading:
            start_s = time.monotonic()
            pool_bytes = manifest.layout.pool_bytes
            reads = loader.plan_reads(manifest, self._shape, checkpoint.read_places(Path(self._model)))
            available.require(pool_bytes, available.available_bytes(), available.free_hugetlb_bytes())
            fd = shared.create(manifest.pool.memory_name, pool_bytes)
            try:
                self._fill(fd, manifest, reads)
            except BaseException:
                os.close(fd)
                raise
            seconds = time.monotonic() - start_s
            self._metrics.load_seconds.set(seconds)
            logger.info("read %s of experts in %.1f s: %s", mib(pool_bytes), seconds, manifest.pool)
            return Pool(manifest, fd)

    def _fill(self, fd: int, manifest: Manifest, reads: list[loader.Read]) -> None:
        memory = shared.map_writable(fd)
        view = np.frombuffer(memory, np.uint8)
        loader.fill(view, reads, manifest.pool.dtype, self._metrics.bytes_read.inc)
        del view
        memory.close()
        shared.seal(fd)

    def check_handed_back(self, manifest: Manifest, fd: int) -> Pool:
        """Return a worker's descriptor as a pool, not yet kept; raises CoordinatorError if it is another pool."""
        shared.check_sealed(fd, manifest.pool.memory_name, manifest.layout.pool_bytes)
        return Pool(manifest, fd)

    def adopt(self, pool: Pool) -> None:
        """Take in a pool that a worker has handed back."""
        self.keep(pool)
        self._metrics.adopted.inc()

    def keep(self, pool: Pool) -> None:
        """Take a pool in; there must be none with its digest."""
        digest = pool.manifest.pool.digest
        assert digest not in self._pools, f"{digest} is kept twice"
        self._pools[digest] = pool
        self._metrics.pool_bytes.inc(pool.manifest.layout.pool_bytes)

    def free(self, digest: str) -> None:
        """Close a pool's descriptor; its memory goes with the last worker that maps it."""
        pool = self._pools.pop(digest)
        os.close(pool.fd)
        self._metrics.pool_bytes.dec(pool.manifest.layout.pool_bytes)
        logger.info("freed %s: %s", mib(pool.manifest.layout.pool_bytes), pool.manifest.pool)
