"""The streaming client against a fake server: tokens and times, refusals, streams that break off, silence."""

import asyncio

import pytest

from bench.serving.client import Completion, Delta, OpenAIClient, parse_event
from bench.serving.errors import RequestFailed
from tests.fakes.openai_server import FakeOpenAIServer, Script, silent_url


def complete(script: Script, timeout_s: float = 60.0) -> Completion:
    """Five tokens after a prompt of three."""

    async def ask(base_url: str) -> Completion:
        async with OpenAIClient(base_url, "tiny", timeout_s) as client:
            return await client.complete([7, 8, 9], 5)

    with FakeOpenAIServer(script) as server:
        return asyncio.run(ask(server.base_url))


def test_a_completion_has_the_tokens_of_all_events() -> None:
    """Token ids and text are joined in order; the times are in order too."""
    answer = complete(Script())
    assert answer.token_ids == (3, 4, 5, 6, 7)
    assert answer.text == "<3><4><5><6><7>"
    assert answer.finish_reason == "length"
    assert 0 < answer.ttft_s <= answer.elapsed_s


def test_a_completion_asks_for_greedy_tokens_with_their_ids() -> None:
    """The request is what makes two systems' tokens comparable."""
    script = Script()
    complete(script)
    assert script.bodies == [
        {
            "model": "tiny",
            "prompt": [7, 8, 9],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ]


def test_a_chat_hands_over_its_text_as_it_comes() -> None:
    """Each event's text goes to the callback."""

    async def ask(base_url: str, pieces: list[str]) -> Completion:
        async with OpenAIClient(base_url, "tiny", 60.0) as client:
            return await client.chat("hello", 5, pieces.append)

    pieces: list[str] = []
    with FakeOpenAIServer(Script()) as server:
        answer = asyncio.run(ask(server.base_url, pieces))
    assert pieces == ["<0><1>", "<2><3>", "<4>"]
    assert answer.text == "".join(pieces)


def test_a_refusal_is_told_with_its_status_and_reason() -> None:
    """A status other than 200 is an error that quotes the answer."""
    with pytest.raises(RequestFailed, match=r"got 404: .*no such thing"):
        complete(Script(status=404))


def test_an_error_in_the_stream_is_told() -> None:
    """An engine that dies after the first byte answered 200 before."""
    with pytest.raises(RequestFailed, match="engine died"):
        complete(Script(is_error_in_stream=True))


def test_a_stream_that_breaks_off_is_no_completion() -> None:
    """Without a finish reason the tokens so far don't count."""
    with pytest.raises(RequestFailed, match="ended after 4 tokens"):
        complete(Script(break_after_tokens=4))


def test_silence_ends_at_the_timeout() -> None:
    """A server that accepts and says nothing is given up on."""
    with pytest.raises(RequestFailed, match=r"within 0.2 s, none came"):
        complete(Script(is_silent=True), timeout_s=0.2)


def test_a_server_that_is_not_there_is_told() -> None:
    """A refused connection is this project's error, not httpx's."""

    async def ask(base_url: str) -> Completion:
        async with OpenAIClient(base_url, "tiny", 60.0) as client:
            return await client.complete([1], 1)

    with silent_url() as base_url, pytest.raises(RequestFailed, match="the connection failed"):
        asyncio.run(ask(base_url))


@pytest.mark.parametrize("line", ["", ": ping", "data: [DONE]", 'data: {"choices": [], "usage": {}}'])
def test_lines_without_tokens_bring_nothing(line: str) -> None:
    """Blank lines, comments, the end and the usage event."""
    assert parse_event(line) is None


def test_an_event_may_lack_text_and_ids() -> None:
    """The first chat event has a role only."""
    assert parse_event('data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}') == Delta()
