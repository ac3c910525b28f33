"""Coordinators and workers as real processes: leases, kills, adoption."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elasticmoe.runtime.contract import pool_names as names
from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.client import Lease, acquire
from elasticmoe.runtime.coordinator.protocol import Ask
from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool.manifest import Manifest
from tests.runtime.coordinator.node import PATIENCE_S, Node
from tests.runtime.coordinator.processes import CoordinatorProcess


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
    second = node.coordinator("--adopt-wait-s", "60")
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
    acquire(node.socket, node.manifest, PATIENCE_S).close()
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
    """SIGTERM with a lease: it serves on until that ends, or the drain is over, when the socket stays as a sign."""
    coordinator = node.coordinator("--drain-s", "600")
    worker = node.worker()
    coordinator.process.send_signal(signal.SIGTERM)
    for _ in range(2):  # one that does not wait sees the signal once it has taken the first, and takes no second
        acquire(node.socket, node.manifest, 5).close()
    worker.kill()
    assert coordinator.process.wait(60) == 0
    assert not node.socket.exists()
    coordinator = node.coordinator("--drain-s", "0.5")
    node.worker()
    assert coordinator.kill(signal.SIGTERM) == 0
    assert node.socket.is_socket()


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
            acquire(socket_path, manifest, PATIENCE_S)
        (model / weights.name).symlink_to(weights)
        acquire(socket_path, manifest, PATIENCE_S).close()
        assert coordinator.metric(names.CHECKPOINT_BYTES_READ) == node.pool_bytes


def test_a_worker_may_be_first(node: Node) -> None:
    """It waits for a coordinator that is only starting, also through one that goes away without a word."""
    node.socket.parent.mkdir()
    with protocol.listen(node.socket) as listener:
        leases: list[Lease] = []
        thread = threading.Thread(target=lambda: leases.append(acquire(node.socket, node.manifest, PATIENCE_S)))
        thread.start()
        listener.accept()[0].close()
    node.socket.unlink()
    node.coordinator()
    thread.join(PATIENCE_S)
    assert leases[0].manifest == node.manifest
    leases[0].close()


def test_a_lease_that_is_closed_while_nobody_answers_ends(node: Node) -> None:
    """Closing does not wait for a coordinator to come back."""
    coordinator = node.coordinator()
    lease = acquire(node.socket, node.manifest, PATIENCE_S)
    coordinator.kill()
    lease.close()
    assert len(lease.memory) >= node.pool_bytes
