"""What a coordinator does not give or take, with real processes."""

import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from elasticmoe.runtime.contract import pool_names as names
from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.client import acquire
from elasticmoe.runtime.coordinator.protocol import Ask, HandBack, Kept, Refused
from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool import shared
from elasticmoe.runtime.hostpool.manifest import Manifest
from tests.runtime.coordinator.node import Node
from tests.runtime.coordinator.processes import CoordinatorProcess, coordinator_command, wait_until


def test_a_second_coordinator_is_refused(node: Node) -> None:
    """The first one keeps the socket, and the second says so in one sentence."""
    node.coordinator()
    command = coordinator_command(node.socket, node.model)
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
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


def test_without_a_coordinator_a_worker_gives_up_with_the_command(node: Node) -> None:
    """After its patience: the socket, and how to start one."""
    with pytest.raises(CoordinatorError, match=rf"no coordinator answers at {node.socket} after 0\.3 s .*--model"):
        acquire(node.socket, node.manifest, 0.3)


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
