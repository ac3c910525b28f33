"""The requests that `elasticmoe profile` takes, and what is said of a line that is none."""

from pathlib import Path

import pytest

from elasticmoe.runtime.cli.main import main
from elasticmoe.runtime.cli.profile import read_requests
from elasticmoe.runtime.errors import ConfigError

CHAT = [{"role": "user", "content": "hello"}]


def write(tmp_path: Path, *lines: str) -> Path:
    """Return a file of these lines."""
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_prompts_and_chats_come_in_order(tmp_path: Path) -> None:
    """One a line, plain or as in OpenAI's batch files; empty lines are none."""
    chat = '{"messages": [{"role": "user", "content": "hello"}]}'
    path = write(tmp_path, '{"prompt": "one"}', "", chat, f'{{"custom_id": "a", "body": {chat}}}')
    assert list(read_requests(path)) == ["one", CHAT, CHAT]


@pytest.mark.parametrize(
    "line",
    ["[1]", "7", '{"prompt": ""}', '{"prompt": 3}', '{"messages": []}', '{"messages": ["x"]}', '{"body": 1}', "{}"],
)
def test_a_line_without_a_request_is_named(tmp_path: Path, line: str) -> None:
    """File, line, what it should hold and what it holds."""
    path = write(tmp_path, '{"prompt": "one"}', line)
    with pytest.raises(ConfigError, match=r"requests\.jsonl:2: want a `prompt` of text or a list of chat `messages`"):
        read_requests(path)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    """File and line."""
    with pytest.raises(ConfigError, match=r"requests\.jsonl:1: want one JSON object a line, but it can't be read"):
        read_requests(write(tmp_path, "hello"))
    with pytest.raises(ConfigError, match=r"requests\.jsonl:1: want one JSON object a line, but it can't be read"):
        read_requests(write(tmp_path, "[" * 100_000))


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    """There is nothing to count."""
    with pytest.raises(ConfigError, match="want at least one request, there is none"):
        read_requests(write(tmp_path, "", " "))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, or no text."""
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "nowhere.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        read_requests(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-tokens", "0"), "--max-tokens: want a number above 0, it is 0"),
        (("--limit", "-1"), "--limit: want a number above 0, it is -1"),
        (("-o", "/nowhere/out"), "--output /nowhere/out: want a file to write, there is no folder /nowhere"),
        (("-o", "/"), "--output /: want a file to write, that is a folder"),
    ],
)
def test_what_would_fail_in_the_end_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    """Before an engine starts and serves for nothing."""
    path = write(tmp_path, '{"prompt": "one"}')
    assert main(["profile", "nowhere", str(path), "-o", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
