"""Messages and descriptors over real sockets."""

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticmoe.runtime.coordinator import protocol
from elasticmoe.runtime.coordinator.protocol import Ask, Granted, HandBack, Kept, Message, Refused
from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId

POOL = PoolId("a model", "", "float32", 1, 0)
LAYOUT = HostLayout(num_layers=1, num_experts=2, rows=3, cols=4, itemsize=4)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give the two ends of a connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def _frame(fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize(
    "message",
    [Ask(pool=POOL), HandBack(pool=POOL), Granted(manifest=Manifest(POOL, LAYOUT)), Kept(), Refused(reason="é")],
)
def test_a_message_arrives_as_it_was_sent(pair: Pair, message: Message) -> None:
    """Each kind, without a descriptor."""
    protocol.send(pair[0], message)
    assert protocol.receive(pair[1]) == protocol.Received(message, None)


def test_a_descriptor_rides_on_its_message(pair: Pair, tmp_path: Path) -> None:
    """It is the same file, not inherited by children, and the next message has none."""
    (tmp_path / "file").write_text("weights")
    with (tmp_path / "file").open() as file:
        protocol.send(pair[0], HandBack(pool=POOL), [file.fileno()])
    protocol.send(pair[0], Kept())
    received = protocol.receive(pair[1])
    assert received is not None
    assert received.fd is not None
    assert os.read(received.fd, 10) == b"weights"
    assert not os.get_inheritable(received.fd)
    os.close(received.fd)
    assert protocol.receive(pair[1]) == protocol.Received(Kept(), None)


def test_a_frame_is_a_length_and_json_with_a_version(pair: Pair) -> None:
    """What another implementation would have to write."""
    pair[0].sendall(_frame({"version": 1, "kind": "refused", "reason": "no"}))
    assert protocol.receive(pair[1]) == protocol.Received(Refused(reason="no"), None)
    assert protocol.encode(Kept()) == _frame({"version": 1, "kind": "kept"})


def test_a_frame_may_come_in_pieces(pair: Pair) -> None:
    """A stream has no message borders."""
    for byte in protocol.encode(Kept()):
        pair[0].sendall(bytes([byte]))
    assert protocol.receive(pair[1]) == protocol.Received(Kept(), None)


@pytest.mark.parametrize("cut", [0, 2, 10])
def test_an_end_is_none_wherever_it_comes(pair: Pair, cut: int) -> None:
    """Before a frame, inside its length, inside its body."""
    pair[0].sendall(protocol.encode(Refused(reason="not told to the end"))[:cut])
    pair[0].close()
    assert protocol.receive(pair[1]) is None


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (_frame({"version": 2, "kind": "kept"}), "the other end speaks protocol version 2, this one 1"),
        (_frame({"kind": "kept"}), "speaks protocol version None"),
        (_frame({"version": 1, "kind": "grab"}), "message 'grab'"),
        (_frame({"version": 1, "kind": "ask", "pool": {"model": "m"}}), "message 'ask', ask.pool.revision"),
        (_frame({"version": 1, "kind": "kept", "more": 1}), "message 'kept', kept.more"),
        (_frame([1]), "want a JSON object"),
        (struct.pack("!I", 3) + b"{{{", "want a JSON object"),
        (struct.pack("!I", 100_000) + b"[" * 100_000, "want a JSON object"),
        (struct.pack("!I", 2**20 + 1), "a frame of 1048577 bytes .* at most 1048576"),
    ],
)
def test_what_is_not_spoken_is_refused(pair: Pair, frame: bytes, message: str) -> None:
    """Another version, kind or shape of message is named."""
    pair[0].sendall(frame)
    with pytest.raises(CoordinatorError, match=message):
        protocol.receive(pair[1])


def test_the_descriptor_of_a_bad_message_is_closed(pair: Pair) -> None:
    """Refused messages leave no open files behind: the pipe's reader sees its end."""
    reader, writer = os.pipe()
    socket.send_fds(pair[0], [_frame({"version": 9})], [writer])
    os.close(writer)
    with pytest.raises(CoordinatorError, match="version 9"):
        protocol.receive(pair[1])
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_socket_may_have_a_long_path(tmp_path: Path) -> None:
    """Namespace and name of a deployment make paths beyond the 107 bytes that an address takes."""
    path = tmp_path / ("n" * 63) / ("d" * 63) / "pool.sock"
    path.parent.mkdir(parents=True)
    with protocol.listen(path) as listener, protocol.connect(path) as connection:
        accepted, _ = listener.accept()
        with accepted:
            protocol.send(connection, Kept())
            assert protocol.receive(accepted) == protocol.Received(Kept(), None)
    with pytest.raises(ConnectionRefusedError):
        protocol.connect(path)
    with pytest.raises(OSError, match="Address already in use"):
        protocol.listen(path)
