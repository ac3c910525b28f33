"""Coordinators and workers as real processes: leases, kills, adoption, refusals."""

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from elasticmoe.runtime.contract import pool_names as names
from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.checkpoint import read_shape
from elasticmoe.runtime.coordinator.client import Lease, acquire
from elasticmoe.runtime.coordinator.protocol import Ask, HandBack, Kept, Message, Refused
from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId, plan_manifest
from tests.runtime.coordinator.processes import CoordinatorProcess, WorkerProcess, coordinator_command, wait_until


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
        lease = acquire(self.socket, manifest or self.manifest, 10)
        self._stack.callback(lease.close)
        return lease

    def say(self, message: Message, *fds: int) -> Message | None:
        """Return what the coordinator answers to one message."""
        with protocol.connect(self.socket) as connection:
            protocol.send(connection, message, fds)
            received = protocol.receive(connection)
        return received.message if received else None


@pytest.fixture
def node(tiny: Path, tmp_path: Path) -> Iterator[Node]:
    """Give a node with nothing on it; at its end all processes of it are gone."""
    with ExitStack() as stack:
        yield Node(stack, tmp_path / "run" / "pool.sock", tiny)


def test_a_killed_worker_leaves_a_warm_pool(node: Node) -> None:
    """Nothing is read before the first lease, and once only; a killed worker's lease ends, the next one attaches."""
    coordinator = node.coordinator()
    assert coordinator.metric(names.CHECKPOINT_BYTES_READ) == 0
    first = node.worker()
    assert int(first.first_line) >= node.pool_bytes
    read = coordinator.metric(names.CHECKPOINT_BYTES_READ)
    assert read == node.pool_bytes  # the checkpoint is float32 as well
    assert coordinator.metric(names.HOST_POOL_LEASES) == 1
    first.kill()
    coordinator.wait_for(names.HOST_POOL_LEASES, 0)
    second = node.worker()
    assert coordinator.metric(names.HOST_POOL_LEASES) == 1
    assert coordinator.metric(names.CHECKPOINT_BYTES_READ) == read
    assert coordinator.metric(names.HOST_POOL_BYTES) == node.pool_bytes
    assert second.pool_inodes() == coordinator.pool_inodes()


def test_a_killed_coordinators_pool_is_adopted(node: Node) -> None:
    """The worker hands it to the next one, which reads nothing and holds the same memory; new workers get it too."""
    first = node.coordinator()
    worker = node.worker()
    inodes = worker.pool_inodes()
    assert first.pool_inodes() == inodes
    first.kill()
    second = node.coordinator()
    new = node.worker()
    second.wait_for(names.HOST_POOL_LEASES, 2)
    assert worker.is_alive
    assert second.pool_inodes() == new.pool_inodes() == inodes
    assert second.metric(names.CHECKPOINT_BYTES_READ) == 0
    assert second.metric(names.HOST_POOLS_ADOPTED) == 1
    assert second.metric(names.HOST_POOL_BYTES) == node.pool_bytes
    second.kill()
    third = node.coordinator()
    third.wait_for(names.HOST_POOL_LEASES, 2)
    assert third.pool_inodes() == inodes
    assert third.metric(names.HOST_POOL_BYTES) == node.pool_bytes


def test_loading_takes_the_pool_and_little_more(node: Node) -> None:
    """The process grows by the pool, and by less than one layer on top."""
    coordinator = node.coordinator()
    before = coordinator.peak_bytes()
    node.acquire()
    assert coordinator.peak_bytes() - before < node.pool_bytes + node.manifest.layout.layer_bytes


def test_both_slices_of_two_ranks_are_pools_of_their_own(node: Node) -> None:
    """Each rank gets its half; together they are one whole pool."""
    coordinator = node.coordinator()
    halves = [node.worker(2, rank) for rank in (0, 1)]
    assert coordinator.metric(names.HOST_POOL_BYTES) == node.pool_bytes
    assert halves[0].pool_inodes() != halves[1].pool_inodes()


def test_workers_that_ask_at_once_share_one_load(node: Node) -> None:
    """The second waits for the first one's load."""
    coordinator = node.coordinator()
    first, second = protocol.connect(node.socket), protocol.connect(node.socket)
    with first, second:
        for connection in (first, second):
            protocol.send(connection, Ask(pool=node.manifest.pool))
        granted = [protocol.receive(connection) for connection in (first, second)]
        assert coordinator.metric(names.HOST_POOL_LEASES) == 2
        assert [reply.message.kind for reply in granted if reply] == ["granted", "granted"]
    assert coordinator.metric(names.CHECKPOINT_BYTES_READ) == node.pool_bytes


def test_an_idle_pool_is_freed_and_loaded_again(node: Node) -> None:
    """After the grace period no memory is held; the next lease reads the checkpoint anew."""
    coordinator = node.coordinator("--grace-s", "0.5")
    acquire(node.socket, node.manifest, 10).close()
    coordinator.wait_for(names.HOST_POOL_BYTES, 0)
    assert coordinator.pool_inodes() == set()
    node.acquire()
    assert coordinator.metric(names.CHECKPOINT_BYTES_READ) == 2 * node.pool_bytes


def test_ending_leaves_no_socket(node: Node) -> None:
    """SIGTERM without leases: status 0, and the socket is gone."""
    coordinator = node.coordinator()
    assert coordinator.kill(signal.SIGTERM) == 0
    assert not node.socket.exists()


def test_ending_waits_for_leases_for_a_while(node: Node) -> None:
    """SIGTERM with a lease: it ends with the lease, or after the drain, when the socket stays as a sign."""
    coordinator = node.coordinator("--drain-s", "30")
    worker = node.worker()
    coordinator.process.send_signal(signal.SIGTERM)
    worker.kill()
    assert coordinator.process.wait(10) == 0
    assert not node.socket.exists()
    coordinator = node.coordinator("--drain-s", "0.5")
    node.worker()
    assert coordinator.kill(signal.SIGTERM) == 0
    assert node.socket.is_socket()


def test_a_second_coordinator_is_refused(node: Node) -> None:
    """The first one keeps the socket, and the second says so in one sentence."""
    node.coordinator()
    command = coordinator_command(node.socket, node.model)
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 2
    assert f"elasticmoe: another coordinator serves {node.socket}; stop it first" in second.stderr
    node.acquire()


def test_another_model_is_refused_by_name(node: Node) -> None:
    """A lease of another checkpoint, revision or dtype that can't be: one sentence with both."""
    node.coordinator()
    pool = node.manifest.pool
    wanted = [
        (replace(pool, model="other"), f"this coordinator serves model '{node.model}', not 'other'; use the socket"),
        (replace(pool, revision="v2"), "serves revision '', not 'v2'"),
        (replace(pool, layout_version=9), "serves layout_version 1, not 9"),
        (replace(pool, dtype="int4"), "not 'int4'"),
    ]
    for other, message in wanted:
        with pytest.raises(CoordinatorError, match=message):
            node.acquire(Manifest(other, node.manifest.layout))


def test_a_pool_of_other_sizes_is_refused_by_the_worker(node: Node) -> None:
    """A worker whose config.json differs from the coordinator's doesn't read the pool."""
    node.coordinator()
    other = Manifest(node.manifest.pool, replace(node.manifest.layout, num_layers=99))
    with pytest.raises(CoordinatorError, match=r"want the pool .*num_layers=99.*, the coordinator has .*restart it"):
        node.acquire(other)


def test_a_wrong_pool_is_not_adopted(node: Node) -> None:
    """One that is another's by its digest, too small, or still open to writers: refused in one sentence, not kept."""
    coordinator = node.coordinator()
    pool, size = node.manifest.pool, node.pool_bytes
    other = _memory(replace(pool, revision="old").memory_name, size)
    small = _memory(pool.memory_name, size // 2)
    unsealed = shared.create(pool.memory_name, size)
    for fd, want in ((other, f"want the pool {pool.memory_name}"), (small, f"{size} bytes"), (unsealed, "sealed")):
        reply = node.say(HandBack(pool=pool), fd)
        assert isinstance(reply, Refused)
        assert want in reply.reason
        assert "\n" not in reply.reason
    assert coordinator.metric(names.HOST_POOL_BYTES) == 0
    assert coordinator.pool_inodes() == set()
    right = _memory(pool.memory_name, size)
    assert node.say(HandBack(pool=pool), right) == Kept()
    assert coordinator.metric(names.HOST_POOL_BYTES) == size


def _memory(name: str, num_bytes: int) -> int:
    fd = shared.create(name, num_bytes)
    shared.seal(fd)
    return fd


def test_a_pool_that_is_there_already_is_not_kept_twice(node: Node) -> None:
    """A worker that brings a second copy has a lease; the coordinator holds one memory."""
    coordinator = node.coordinator()
    node.acquire()
    before = coordinator.pool_inodes()
    assert (
        node.say(HandBack(pool=node.manifest.pool), _memory(node.manifest.pool.memory_name, node.pool_bytes)) == Kept()
    )
    assert coordinator.pool_inodes() == before
    assert coordinator.metric(names.HOST_POOLS_ADOPTED) == 0


def test_messages_out_of_order_are_refused(node: Node) -> None:
    """A coordinator's own words, a hand-back without a pool, an ask with one, a second message on a connection."""
    node.coordinator()
    pool = node.manifest.pool
    with (node.model / "config.json").open() as file:
        odd = [node.say(Kept()), node.say(HandBack(pool=pool)), node.say(Ask(pool=pool), file.fileno())]
    with protocol.connect(node.socket) as connection:
        for _ in range(2):
            protocol.send(connection, Ask(pool=pool))
        protocol.receive(connection)
        second = protocol.receive(connection)
    for reply in (*odd, second.message if second else None):
        assert isinstance(reply, Refused)
        assert "want one message" in reply.reason


def test_a_failed_load_is_told_and_tried_again(node: Node, tmp_path: Path) -> None:
    """A checkpoint without weights refuses the lease; once they are there, the same coordinator serves it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((node.model / "config.json").read_bytes())
    weights = next(node.model.glob("*.safetensors"))
    manifest = Manifest(replace(node.manifest.pool, model=str(model)), node.manifest.layout)
    socket_path = tmp_path / "other.sock"
    with CoordinatorProcess(socket_path, model) as coordinator:
        with pytest.raises(CoordinatorError, match="want a checkpoint of safetensors files"):
            acquire(socket_path, manifest, 10)
        (model / weights.name).symlink_to(weights)
        acquire(socket_path, manifest, 10).close()
        assert coordinator.metric(names.CHECKPOINT_BYTES_READ) == node.pool_bytes


def test_without_a_coordinator_a_worker_gives_up_with_the_command(node: Node) -> None:
    """After its patience: the socket, and how to start one."""
    with pytest.raises(CoordinatorError, match=rf"no coordinator answers at {node.socket} after 0\.3 s .*--model"):
        acquire(node.socket, node.manifest, 0.3)


def test_a_worker_may_be_first(node: Node) -> None:
    """It waits for a coordinator that is only starting, also through one that goes away without a word."""
    node.socket.parent.mkdir()
    with protocol.listen(node.socket) as listener:
        leases: list[Lease] = []
        thread = threading.Thread(target=lambda: leases.append(acquire(node.socket, node.manifest, 20)))
        thread.start()
        listener.accept()[0].close()
    node.socket.unlink()
    node.coordinator()
    thread.join(20)
    assert leases[0].manifest == node.manifest
    leases[0].close()


def test_a_coordinator_of_another_model_does_not_get_the_pool(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker says so once, reads on from its memory, and brings the pool to the right one when that comes."""
    first = node.coordinator()
    lease = node.acquire()
    before = bytes(lease.memory[:64])
    first.kill()
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((node.model / "config.json").read_bytes())
    with CoordinatorProcess(node.socket, other) as wrong:
        wait_until(lambda: "does not take the pool back" in caplog.text, lambda: caplog.text)
        assert wrong.metric(names.HOST_POOL_BYTES) == 0
    assert bytes(lease.memory[:64]) == before
    node.coordinator().wait_for(names.HOST_POOL_LEASES, 1)
    assert caplog.text.count("does not take the pool back") == 1


def test_a_lease_that_is_closed_while_nobody_answers_ends(node: Node) -> None:
    """Closing does not wait for a coordinator to come back."""
    coordinator = node.coordinator()
    lease = acquire(node.socket, node.manifest, 10)
    coordinator.kill()
    lease.close()
    assert len(lease.memory) >= node.pool_bytes


def test_strangers_on_the_socket_are_refused(node: Node) -> None:
    """A connection that is none of ours is told why; the coordinator goes on."""
    node.coordinator()
    with protocol.connect(node.socket) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        reply = protocol.receive(connection)
        assert reply is not None
        assert isinstance(reply.message, Refused)
        connection.shutdown(socket.SHUT_WR)
    node.acquire()
