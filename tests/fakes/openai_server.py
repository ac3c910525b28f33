"""A small HTTP server that answers as vLLM's OpenAI server does, or fails in a chosen way. Used by tests/bench."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from types import TracebackType
from typing import Any, Self

TOKENS_PER_EVENT = 2
ANSWERED = "ANSWERED"  # stands for the number of requests so far in a script's metrics


@dataclass(slots=True)
class Script:
    """What the server does: answer, refuse with a status, send an error in the stream, break off, or keep silent."""

    status: int = 200
    is_error_in_stream: bool = False
    break_after_tokens: int | None = None
    is_silent: bool = False
    metrics: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)


class FakeOpenAIServer:
    """Serves on a free port while its `with` block runs; token i of an answer is the prompt's length plus i."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.closing = threading.Event()
        self._server = _Listener(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def silent_url() -> Iterator[str]:
    """Give a server's URL where nobody listens; the port is held, so that nobody begins to."""
    with socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


class _Listener(ThreadingHTTPServer):
    """The listening socket; its handlers find the fake through it."""

    request_queue_size = 256  # a burst connects all at once

    def __init__(self, fake: FakeOpenAIServer) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Listener

    def handle(self) -> None:
        """Serve the connection; a client may leave first, as one that was cancelled does."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""

    def do_GET(self) -> None:
        """/health and /metrics."""
        script = self.server.fake.script
        self._answer(200, script.metrics.replace(ANSWERED, str(len(script.bodies))).encode())

    def do_POST(self) -> None:
        """A completion or a chat completion, streamed."""
        script = self.server.fake.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.bodies.append(body)
        if script.is_silent:
            self.server.fake.closing.wait()
        elif script.status != 200:
            self._answer(script.status, b'{"error": {"message": "no such thing"}}')
        else:
            self._stream(script, body)

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, script: Script, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if script.is_error_in_stream:
            self._event({"error": {"message": "engine died"}})
            return
        first = len(body.get("prompt", ()))
        count, limit = body["max_tokens"], script.break_after_tokens
        for start in range(0, count if limit is None else limit, TOKENS_PER_EVENT):
            ids = list(range(first + start, first + min(start + TOKENS_PER_EVENT, count)))
            self._event(_chunk(body, ids, is_last=start + TOKENS_PER_EVENT >= count))
        if limit is None:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, payload: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(payload).encode() + b"\n\n")


def _chunk(body: dict[str, Any], ids: list[int], *, is_last: bool) -> dict[str, Any]:
    text = "".join(f"<{one}>" for one in ids)
    said: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"choices": [said | {"token_ids": ids, "finish_reason": "length" if is_last else None}]}
