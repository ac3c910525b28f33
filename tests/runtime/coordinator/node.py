"""One node of processes and the socket between them."""

from contextlib import ExitStack
from pathlib import Path

from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.checkpoint import read_shape
from elasticmoe.runtime.coordinator.client import Lease, acquire
from elasticmoe.runtime.coordinator.protocol import Message
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId, plan_manifest
from tests.runtime.coordinator.processes import CoordinatorProcess, WorkerProcess

PATIENCE_S = 60.0
"""How long a worker waits for a coordinator that a test has started."""


class Node:
    """One node's coordinators and workers, and the socket between them."""

    def __init__(self, stack: ExitStack, socket_path: Path, model: Path) -> None:
        """Start nothing yet; the stack ends what is started."""
        self.socket = socket_path
        self.model = model
        self.manifest = plan_manifest(PoolId(str(model), "", "float32", 1, 0), read_shape(model))
        self._stack = stack

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of the whole pool."""
        return self.manifest.layout.pool_bytes

    def coordinator(self, *flags: str) -> CoordinatorProcess:
        """Start a coordinator."""
        return self._stack.enter_context(CoordinatorProcess(self.socket, self.model, *flags))

    def worker(self, tp: int = 1, rank: int = 0) -> WorkerProcess:
        """Start a worker, which has mapped the pool when this returns."""
        return self._stack.enter_context(WorkerProcess(self.socket, self.model, tp, rank))

    def acquire(self, manifest: Manifest | None = None) -> Lease:
        """Take a lease in this process."""
        lease = acquire(self.socket, manifest or self.manifest, PATIENCE_S)
        self._stack.callback(lease.close)
        return lease

    def say(self, message: Message, *fds: int) -> Message | None:
        """Return what the coordinator answers to one message."""
        with protocol.connect(self.socket) as connection:
            protocol.send(connection, message, fds)
            received = protocol.receive(connection)
        return received.message if received else None
