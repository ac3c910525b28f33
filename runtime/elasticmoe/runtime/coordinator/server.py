"""The coordinator process: one per model and node, on a Unix socket; hands pools to workers while they are connected.

One thread a connection. What to do is decided by `leases`, done by `store`; this is where the two meet.
"""

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.leases import Answer, Leases
from elasticmoe.runtime.coordinator.protocol import Ask, Granted, HandBack, Kept, Received, Refused
from elasticmoe.runtime.coordinator.store import Pool, PoolStore
from elasticmoe.runtime.errors import CoordinatorError, ElasticMoEError
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """How one coordinator behaves."""

    socket: Path
    grace_s: float = 600.0
    """How long a pool is kept without a lease: longer than a worker's restart takes on a busy node."""
    adopt_wait_s: float = 5.0
    """How long nothing is read where a predecessor's socket was left: its workers may hand their pools back."""
    drain_s: float = 20.0
    """How long it stays, once told to end, while workers hold leases."""


class Coordinator:
    """Serves one checkpoint's pools until told to end."""

    def __init__(self, settings: Settings, store: PoolStore) -> None:
        """Take the socket; raises CoordinatorError if another coordinator has it, or it can't be made."""
        self._settings = settings
        self._store = store
        self._listener, had_predecessor = _take_socket(settings.socket)
        self._listener.settimeout(POLL_S)
        wait_s = settings.adopt_wait_s if had_predecessor else 0.0
        self._leases = Leases(settings.grace_s, time.monotonic() + wait_s)
        self._changed = threading.Condition()
        self._holders = itertools.count()

    @property
    def num_leases(self) -> int:
        """Return how many workers hold a pool."""
        return self._leases.num_leases

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`, then until the leases have ended or the drain is over.

        The socket file stays if leases do: it tells the next coordinator that there are workers with pools.
        """
        deadline_s = float("inf")
        while not stop.is_set() or (self.num_leases and time.monotonic() < deadline_s):
            if stop.is_set() and deadline_s == float("inf"):
                deadline_s = time.monotonic() + self._settings.drain_s
            self._accept()
            self._free_expired()
        if not self.num_leases:  # unlinked first: from then on the path is the next one's
            self._settings.socket.unlink(missing_ok=True)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(TimeoutError):
            connection, _ = self._listener.accept()
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _free_expired(self) -> None:
        with self._changed:
            for digest in self._leases.take_expired(time.monotonic()):
                self._store.free(digest)

    # One connection

    def _converse(self, connection: socket.socket) -> None:
        """Serve one worker until its connection ends, and its lease with it."""
        holder = next(self._holders)
        try:
            self._answer(connection, holder)
        except ElasticMoEError as error:
            logger.warning("refused worker %d: %s", holder, error)
            with contextlib.suppress(OSError):  # it is gone: nobody is left to be told
                protocol.send(connection, Refused(reason=str(error)))
        except OSError as error:
            logger.info("worker %d is gone: %s", holder, error)
        finally:
            connection.close()
            with self._changed:
                self._leases.end(holder, time.monotonic())

    def _answer(self, connection: socket.socket, holder: int) -> None:
        """Give the worker the lease that it wants, then wait until it is gone."""
        received = protocol.receive(connection)
        if received is None:
            return
        match received.message:
            case Ask(pool=wanted) if received.fd is None:
                pool = self._lease(holder, self._store.plan(wanted))
                protocol.send(connection, Granted(manifest=pool.manifest), [pool.fd])
            case HandBack(pool=held) if received.fd is not None:
                self._take_back(holder, held, received.fd)
                protocol.send(connection, Kept())
            case _:
                _refuse(received)
        if (more := protocol.receive(connection)) is not None:
            _refuse(more)

    def _lease(self, holder: int, manifest: Manifest) -> Pool:
        """Return the pool once there is one, with a lease of it; loads it if nobody else does."""
        digest = manifest.pool.digest
        with self._changed:
            while (answer := self._leases.ask(holder, digest, time.monotonic())) is not Answer.GRANT:
                if answer is Answer.WAIT:
                    self._changed.wait(POLL_S)
                else:
                    self._load(manifest)
            logger.info("worker %d holds a lease of %s", holder, manifest.pool)
            return self._store.get(digest)

    def _load(self, manifest: Manifest) -> None:
        """Load the pool while others may go on: called with the lock held, which is let go meanwhile."""
        pool = None
        self._changed.release()
        try:
            pool = self._store.load(manifest)
        finally:
            self._changed.acquire()
            self._settle(manifest.pool.digest, pool)
            self._changed.notify_all()

    def _settle(self, digest: str, pool: Pool | None) -> None:
        """Keep what was loaded, unless it failed or another was adopted meanwhile."""
        if pool is None:
            self._leases.failed(digest)
        elif self._leases.loaded(digest, time.monotonic()):
            self._store.keep(pool)
        else:
            os.close(pool.fd)

    def _take_back(self, holder: int, held: PoolId, fd: int) -> None:
        """Keep the worker's pool if there is none yet, and give the worker a lease either way."""
        is_kept = False
        try:
            pool = self._store.check_handed_back(self._store.plan(held), fd)
            with self._changed:
                is_kept = self._leases.hand_back(holder, held.digest)
                if is_kept:
                    self._store.adopt(pool)
                    self._changed.notify_all()
        finally:
            if not is_kept:
                os.close(fd)
        if is_kept:
            logger.info("adopted the pool that worker %d holds: %s", holder, held)
        else:
            logger.info("worker %d holds a pool that is here already: %s", holder, held)


def _refuse(received: Received) -> None:
    if received.fd is not None:
        os.close(received.fd)
    message = f"want one message, to ask or to hand back, this was another: {received.message.kind!r}"
    raise CoordinatorError(f"{message}; run the same release on both ends")


def _take_socket(path: Path) -> tuple[socket.socket, bool]:
    """Return a listener at the path, and whether a predecessor that is gone had left its socket there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        had_predecessor = path.is_socket()
        if had_predecessor:
            _check_dead(path)
            path.unlink()
        return protocol.listen(path), had_predecessor
    except OSError as error:
        message = f"the socket {path} can't be made ({error}); give --socket a path in a folder that can be written"
        raise CoordinatorError(message) from error


def _check_dead(path: Path) -> None:
    with contextlib.suppress(ConnectionRefusedError):
        protocol.connect(path).close()
        message = f"another coordinator serves {path}; stop it first, or give --socket another path"
        raise CoordinatorError(message)
