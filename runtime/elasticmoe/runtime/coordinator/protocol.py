"""What coordinator and workers say over the Unix socket: frames of length-prefixed JSON with a version field.

A pool's descriptor rides on its frame as SCM_RIGHTS. One worker is one connection, and one lease while it lasts.
"""

import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from elasticmoe.runtime.errors import CoordinatorError
from elasticmoe.runtime.hostpool.manifest import Manifest, PoolId

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 2**20
_LENGTH: Final = struct.Struct("!I")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Ask(_Message):
    """Worker: I want this pool."""

    kind: Literal["ask"] = "ask"
    pool: PoolId


class HandBack(_Message):
    """Worker: I hold this pool, here is its descriptor; take it back."""

    kind: Literal["hand_back"] = "hand_back"
    pool: PoolId


class Granted(_Message):
    """Coordinator: here is the descriptor; the lease lasts as long as the connection."""

    kind: Literal["granted"] = "granted"
    manifest: Manifest


class Kept(_Message):
    """Coordinator: the pool was handed back; the lease lasts as long as the connection."""

    kind: Literal["kept"] = "kept"


class Refused(_Message):
    """Coordinator: no, and why, in one sentence."""

    kind: Literal["refused"] = "refused"
    reason: str


Message = Ask | HandBack | Granted | Kept | Refused
_MESSAGES: Final[TypeAdapter[Message]] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Received:
    """A message and the descriptor that came with it, which its receiver owns."""

    message: Message
    fd: int | None


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    body = json.dumps({"version": VERSION, **message.model_dump(mode="json")}).encode()
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Return the message of a frame without its length; raises CoordinatorError for one that we don't speak."""
    try:
        fields = json.loads(body)
        version = fields.pop("version", None)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        message = f"want a JSON object on the coordinator's socket, it was {body[:40]!r}; connect only elasticmoe"
        raise CoordinatorError(message) from error
    if version != VERSION:
        message = f"the other end speaks protocol version {version}, this one {VERSION}; run the same release"
        raise CoordinatorError(message)
    try:
        return _MESSAGES.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"message {fields.get('kind')!r}, {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CoordinatorError(message) from error


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message, and descriptors along with it."""
    frame = encode(message)
    sent = socket.send_fds(connection, [frame], list(fds)) if fds else 0
    if rest := frame[sent:]:  # an empty write would fail on an end that has answered and gone
        connection.sendall(rest)


def receive(connection: socket.socket) -> Received | None:
    """Return the next message, None when the other end is gone; a descriptor that comes with a bad one is closed."""
    head, fds = _receive_head(connection)
    try:
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME_BYTES:
            message = f"a frame of {length} bytes on the coordinator's socket, at most {MAX_FRAME_BYTES} are taken"
            raise CoordinatorError(message)
        body = _receive_exactly(connection, length)
        if body is None:
            return None
        received = Received(decode(body), fds.pop() if fds else None)
    finally:
        for fd in fds:
            os.close(fd)
    return received


def _receive_head(connection: socket.socket) -> tuple[bytes | None, list[int]]:
    """Return a frame's length, None when the other end is gone, and the descriptors that came with it."""
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    rest = _receive_exactly(connection, _LENGTH.size - len(head)) if head else None
    return (None if rest is None else head + rest), list(fds)


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    """Return that many bytes, None when the other end is gone before."""
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def connect(path: Path) -> socket.socket:
    """Return a connection to the socket at `path`; raises OSError when nobody listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


def listen(path: Path) -> socket.socket:
    """Return a listening socket at `path`, which must not exist; raises OSError when it can't be made."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short:
            listener.bind(short)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Give a path of under 108 bytes, the most that a socket's address takes, to the same place."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
