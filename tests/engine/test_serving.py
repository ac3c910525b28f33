"""`elasticmoe serve` over HTTP: our series on /metrics, and the limit's file on an idle and on a busy engine."""

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.serving.server import Server, elastic_spec, find_group_members
from elasticmoe.runtime.contract import labels, names
from tests.engine.sizes import arena_bytes, read_shape

pytestmark = pytest.mark.vllm

LIMIT_S = 2.0
"""A new limit must reach the engine within this."""
END_S = 20.0
"""A server that is told to end must have ended within this; Kubernetes' default patience is 30 s."""
END_AT_ONCE_S = 5.0
FLAGS = ("--dtype", "float32", "--block-size", "16", "--max-model-len", "512", "--max-num-seqs", "32")


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answers, and the file that says its limit."""

    url: str
    pid: int
    scratch: Path
    limit_file: Path
    log: Path
    arena: int
    num_experts: int

    def samples(self) -> dict[tuple[str, str], float]:
        """Return every sample of ours by its name and its label's value."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        families = text_string_to_metric_families(text)
        samples = (s for family in families for s in family.samples if s.name.startswith("elasticmoe_"))
        return {(s.name, next(iter(s.labels.values()), "")): s.value for s in samples}

    def limit(self, kind: str = "requested") -> float:
        """Return the offload limit as /metrics has it."""
        return self.samples()[names.OFFLOAD_LIMIT, kind]

    def wait_for_limit(self, limit: int) -> float:
        """Return after how many seconds the limit is in force; fails after five."""
        start_s = time.monotonic()
        while self.limit() != limit:
            assert time.monotonic() - start_s < 5, f"limit {limit} not in force, it is {self.limit()}"
            time.sleep(0.05)
        return time.monotonic() - start_s

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return the answer to one completion request."""
        answer = httpx.post(f"{self.url}/v1/completions", json={"model": "tiny", **body}, timeout=120)
        answer.raise_for_status()
        parsed: dict[str, Any] = answer.json()
        return parsed


@pytest.fixture(scope="module")
def serving(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Give a server of the tiny model with a limit file that is not there yet."""
    folder = tmp_path_factory.mktemp("serving")
    arena = arena_bytes(tiny, 16, 80)
    limit_file = folder / "limit"
    limit = ("--elastic-limit-file", str(limit_file), "--elastic-policy", "threshold")
    own = ("--elastic-arena-bytes", str(arena), *limit)
    spec = replace(elastic_spec(tiny, folder / "log", (*FLAGS, *own)), env={"TMPDIR": str(folder)})
    with Server(spec) as server:
        server.wait_healthy(300, print)
        yield Serving(spec.base_url, server.pid, folder, limit_file, spec.log, arena, read_shape(tiny).num_experts)


def test_the_arena_labels_sum_to_its_size(serving: Serving) -> None:
    """elasticmoe_arena_bytes over all owners is the arena, up to the last part of a block."""
    owners = {owner: serving.samples()[names.ARENA_BYTES, owner] for owner in names.ARENA_OWNERS}
    assert serving.arena - 2**16 < sum(owners.values()) <= serving.arena


def test_every_series_is_there_from_the_start(serving: Serving) -> None:
    """All of design's series are exported before anything happened, with each kind of label."""
    have = {name for name, _ in serving.samples()}
    want = {value for key, value in vars(names).items() if key.isupper() and str(value).startswith("elasticmoe_")}
    assert want <= have
    assert serving.samples()[labels.EXPERTS_PER_LAYER, ""] == serving.num_experts


def test_an_idle_engine_takes_a_new_limit(serving: Serving) -> None:
    """A file that appears, and one that changes, is in force within two seconds without a request."""
    serving.limit_file.write_text("7\n")
    assert serving.wait_for_limit(7) < LIMIT_S
    serving.limit_file.write_text("3")
    assert serving.wait_for_limit(3) < LIMIT_S
    assert serving.limit("effective") == 3


def test_a_busy_engine_takes_a_new_limit(serving: Serving) -> None:
    """Under a load that lasts until then, a changed file is in force within two seconds; all answers are the same.

    The log tells when: vLLM's own server answers no scrape for seconds while its engine is busy.
    """
    reached = threading.Event()

    def ask_on(first_s: float) -> list[str]:
        time.sleep(first_s)
        texts = []
        while not reached.is_set():
            answer = serving.complete(prompt=[[5, 6, 7, 8]], max_tokens=400, temperature=0, ignore_eos=True)
            texts.append(answer["choices"][0]["text"])
        return texts

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask_on, 0.1 * place) for place in range(4)]  # apart: never do all end in one step
        time.sleep(0.5)
        serving.limit_file.write_text("9")
        try:
            _wait_for(lambda: "offload limit: requested 9, effective 9" in serving.log.read_text(), LIMIT_S)
        finally:
            reached.set()
        texts = [text for answers in asked for text in answers.result()]
    serving.wait_for_limit(9)
    assert len(texts) >= 4
    assert len(set(texts)) == 1


@pytest.mark.parametrize("content", ["", "many", "-1", "3.5", "100000", None])
def test_a_wrong_limit_file_changes_nothing(serving: Serving, content: str | None) -> None:
    """A file that is empty, no number, out of range or gone leaves the limit, and a wrong one is warned of by name."""
    serving.limit_file.write_text("4")
    serving.wait_for_limit(4)
    before = serving.log.read_text().count("the limit stays as it was")
    if content is None:
        serving.limit_file.unlink()
    else:
        serving.limit_file.write_text(content)
    time.sleep(1.5)
    assert serving.limit() == 4
    log = serving.log.read_text()
    assert log.count("the limit stays as it was") - before == (1 if content else 0)
    assert not content or str(serving.limit_file) in log


def test_vllms_flags_pass_through(serving: Serving) -> None:
    """VLLM's own flags hold: the served name and the context length are what its command line said."""
    models = httpx.get(f"{serving.url}/v1/models", timeout=10).json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("tiny", 512)]


@pytest.mark.parametrize("begun", ["elasticmoe.runtime.cli.api_server", "spawn_main", "VLLM::EngineCore"])
def test_a_server_told_to_end_while_it_starts_leaves_nothing(tiny: Path, tmp_path: Path, begun: str) -> None:
    """SIGTERM ends it at once, also while it waits for its engine and hears nothing; no file of its own stays."""
    with TemporaryDirectory() as scratch:  # its path is short enough for sockets, tmp_path's is not
        spec = replace(elastic_spec(tiny, tmp_path / "log", FLAGS), env={"TMPDIR": scratch})
        with Server(spec) as server:
            _wait_for(lambda: any(begun in _command(pid) for pid in find_group_members(server.pid)), 60)
            assert any(Path(scratch).glob("elasticmoe-*"))
            os.kill(server.pid, signal.SIGTERM)
            _wait_for(lambda: not find_group_members(server.pid), END_AT_ONCE_S)
        left = [path for path in Path(scratch).iterdir() if path.is_socket() or path.name.startswith("elasticmoe-")]
        assert not left


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def test_a_server_told_to_end_while_it_streams_ends(serving: Serving) -> None:
    """SIGTERM to the first process amid streaming answers ends all processes in time (the last test: it ends them)."""
    body = {"model": "tiny", "prompt": [5] * 8, "max_tokens": 450, "ignore_eos": True, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(32) as pool, contextlib.ExitStack() as streams:

        def start(_: int) -> None:
            answer = streams.enter_context(httpx.stream("POST", f"{serving.url}/v1/completions", json=body, timeout=60))
            next(answer.iter_lines())

        list(pool.map(start, range(32)))
        os.kill(serving.pid, signal.SIGTERM)
        _wait_for(lambda: not find_group_members(serving.pid), END_S)
    assert not list(serving.scratch.glob("elasticmoe-*"))


def _wait_for(is_so: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain"
        time.sleep(0.05)
