"""A worker's side: takes a lease, maps the pool, and brings it back to the next coordinator if the first one dies.

Used by the engine's workers; one lease is one thread that sleeps.
"""

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from pathlib import Path
from typing import Final

from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.protocol import Ask, Granted, HandBack, Kept, Message, Received, Refused
from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.manifest import Manifest

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.2
REPLY_S: Final = 10.0
"""How long a coordinator may take to answer a pool that is handed back."""


class Lease:
    """A pool that this process may read until `close`; the mapping stays valid whatever happens to the coordinator."""

    def __init__(self, path: Path, manifest: Manifest, connection: socket.socket, fd: int) -> None:
        """Map the pool and start to watch the connection; owns both from here on."""
        self.manifest = manifest
        self.memory: mmap.mmap = shared.map_sealed(fd)
        """The pool's bytes, read-only."""
        self._path = path
        self._connection = connection
        self._fd = fd
        self._told = ""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="elasticmoe-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the lease; the mapping lives on as long as it is referenced."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # the connection has ended already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()
        os.close(self._fd)

    def _watch(self) -> None:
        """Wait until the coordinator is gone, then bring the pool to the next one, again and again."""
        while not self._is_closed.is_set():
            with contextlib.suppress(OSError):  # an end of the connection as well
                while self._connection.recv(1):
                    pass
            if self._is_closed.is_set():
                return
            self._tell("the coordinator is gone; serving goes on, and the pool goes to the next one")
            while not self._hand_back():
                if self._is_closed.wait(RETRY_S):
                    return
            self._tell("the pool was handed to a new coordinator")

    def _hand_back(self) -> bool:
        """Return whether a coordinator at the socket has taken the pool."""
        try:
            connection = protocol.connect(self._path)
        except OSError:
            return False
        connection.settimeout(REPLY_S)
        reply = _exchange(connection, HandBack(pool=self.manifest.pool), self._fd)
        if reply is not None and isinstance(reply.message, Kept):
            connection.settimeout(None)
            self._connection.close()
            self._connection = connection
            return True
        connection.close()
        if reply is not None and isinstance(reply.message, Refused):
            self._tell(f"the coordinator at {self._path} does not take the pool back: {reply.message.reason}")
        return False

    def _tell(self, text: str) -> None:
        """Log what is new."""
        if text != self._told:
            logger.warning("%s", text)
            self._told = text


def acquire(path: Path, wanted: Manifest, wait_s: float) -> Lease:
    """Return a lease of the wanted pool; waits as long as the coordinator reads, and `wait_s` for it to answer at all.

    Raises CoordinatorError when none answers, when it refuses, or when its pool is another one.
    """
    deadline_s = time.monotonic() + wait_s
    logger.info("asking the coordinator at %s for %s", path, wanted.pool)
    while True:
        try:
            connection = protocol.connect(path)
        except OSError as error:
            if time.monotonic() > deadline_s:
                message = (
                    f"no coordinator answers at {path} after {wait_s:g} s ({error}); "
                    f"start one: elasticmoe coordinator --socket {path} --model {wanted.pool.model}"
                )
                raise CoordinatorError(message) from error
        else:
            lease = _ask(path, wanted, connection)
            if lease is not None:
                return lease
        time.sleep(RETRY_S)


def _ask(path: Path, wanted: Manifest, connection: socket.socket) -> Lease | None:
    """Return the lease, None when the coordinator went away; the connection is closed unless there is a lease."""
    lease = None
    reply = None
    try:
        reply = _exchange(connection, Ask(pool=wanted.pool))
        if reply is not None:
            lease = Lease(path, wanted, connection, _checked(reply, wanted))
    finally:
        if lease is None:
            connection.close()
            if reply is not None and reply.fd is not None:
                os.close(reply.fd)
    return lease


def _exchange(connection: socket.socket, message: Message, *fds: int) -> Received | None:
    """Return the coordinator's reply, None when it went away."""
    try:
        protocol.send(connection, message, fds)
        return protocol.receive(connection)
    except OSError:
        return None


def _checked(reply: Received, wanted: Manifest) -> int:
    """Return the descriptor of the pool that was granted; raises CoordinatorError unless it is the wanted one."""
    match reply.message:
        case Refused(reason=reason):
            raise CoordinatorError(reason)
        case Granted(manifest=manifest) if reply.fd is not None:
            if manifest != wanted:
                message = f"want the pool {wanted}, the coordinator has {manifest}; restart it on the same checkpoint"
                raise CoordinatorError(message)
            shared.check_sealed(reply.fd, wanted.pool.memory_name, wanted.layout.pool_bytes)
            return reply.fd
        case _:
            message = f"want a pool from the coordinator, it said {reply.message.kind!r}; run the same release"
            raise CoordinatorError(message)
