"""An OpenAI client that streams, keeps the token ids, and times the first token.

Called by the burst and the demo. Every wait is bounded; it retries nothing.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from bench.serving.errors import RequestFailed

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of a stream brought."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request: its tokens, and when they came (seconds)."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    ttft_s: float
    elapsed_s: float


@dataclass(slots=True)
class _Stream:
    """Collects the deltas of one request."""

    started_s: float
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    first_s: float | None = None

    def add(self, delta: Delta, now_s: float) -> None:
        """Append a delta that arrived at `now_s`."""
        if delta.token_ids and self.first_s is None:
            self.first_s = now_s
        self.token_ids += delta.token_ids
        self.texts.append(delta.text)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def finish(self, now_s: float) -> Completion:
        """The completion, or RequestFailed if the stream broke off before its end."""
        if self.finish_reason is None or self.first_s is None:
            raise RequestFailed(
                f"wanted a finished stream, it ended after {len(self.token_ids)} tokens: see the server's log"
            )
        return Completion(
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            ttft_s=self.first_s - self.started_s,
            elapsed_s=now_s - self.started_s,
        )


def parse_event(line: str) -> Delta | None:
    """The delta in one line of a server-sent event stream; None for a line that brings none."""
    if not line.startswith("data:"):
        return None
    payload = line.removeprefix("data:").strip()
    if payload == DONE:
        return None
    event: dict[str, Any] = json.loads(payload)
    if "error" in event:
        raise RequestFailed(f"wanted tokens, the stream brought an error: {event['error']}")
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return Delta(tuple(choice.get("token_ids") or ()), text, choice.get("finish_reason"))


class OpenAIClient:
    """Requests to one server; an async context manager that owns its connections."""

    def __init__(self, base_url: str, model: str, timeout_s: float) -> None:
        """`timeout_s` bounds each request as a whole."""
        self._model = model
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def complete(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Exactly `max_tokens` greedy tokens after a prompt of token ids."""
        body = {"prompt": list(prompt_ids), "max_tokens": max_tokens, "ignore_eos": True}
        return await self._post("/v1/completions", body, lambda _: None)

    async def chat(self, content: str, max_tokens: int, on_text: Callable[[str], None]) -> Completion:
        """A greedy answer to one user message; each piece of text goes to `on_text` as it comes."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "ignore_eos": True}
        return await self._post("/v1/chat/completions", body, on_text)

    async def _post(self, path: str, body: dict[str, Any], on_text: Callable[[str], None]) -> Completion:
        whole = body | {"model": self._model, "temperature": 0, "stream": True, "return_token_ids": True}
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._stream(path, whole, on_text)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RequestFailed(
                f"wanted an answer of {path} within {self._timeout_s:g} s, none came: see the server's log"
            ) from error
        except httpx.HTTPError as error:
            raise RequestFailed(
                f"wanted an answer of {path}, the connection failed: {error!r}; see the server's log"
            ) from error

    async def _stream(self, path: str, body: dict[str, Any], on_text: Callable[[str], None]) -> Completion:
        stream = _Stream(time.monotonic())
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                answer = (await response.aread()).decode(errors="replace")
                raise RequestFailed(f"wanted 200 from {path}, got {response.status_code}: {answer[:500]}")
            async for line in response.aiter_lines():
                delta = parse_event(line)
                if delta is not None:
                    stream.add(delta, time.monotonic())
                    on_text(delta.text)
        return stream.finish(time.monotonic())
