"""Snapshots of a server's /metrics, and a sampler that takes them all through a burst.

Called by the burst. Only the series that a bench reads are kept.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.serving.errors import RequestFailed

CONSTANT_LABELS = frozenset({"engine", "model_name", "pid"})
ARENA = "elasticmoe_arena_bytes"
RESIDENT = "elasticmoe_resident_experts"
CHANGES = "elasticmoe_adjuster_changes_total"
RUNNING = "vllm:num_requests_running"
PREEMPTIONS = "vllm:num_preemptions_total"
TOKENS = "vllm:generation_tokens_total"
STEPS = "vllm:iteration_tokens_total_count"
TPOT_SUM, TPOT_COUNT = (f"vllm:request_time_per_output_token_seconds_{part}" for part in ("sum", "count"))
PREFIXES = ("elasticmoe_", RUNNING, PREEMPTIONS, TOKENS, STEPS, TPOT_SUM, TPOT_COUNT)


def series(name: str, **labels: str) -> str:
    """The key of a series in a snapshot: its name and its labels in order."""
    if not labels:
        return name
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values of a server's series at one moment (`at_s`, monotonic)."""

    at_s: float
    values: Mapping[str, float]

    def get(self, name: str, **labels: str) -> float:
        """The value of a series; 0 where the server does not have it, as stock vLLM with ours."""
        return self.values.get(series(name, **labels), 0.0)

    def arena(self) -> dict[str, int]:
        """Bytes of the arena by owner; empty on a server without one."""
        start = ARENA + '{owner="'
        found = {key: value for key, value in self.values.items() if key.startswith(start)}
        return {key.removeprefix(start).removesuffix('"}'): int(value) for key, value in found.items()}


def parse(text: str, at_s: float) -> Snapshot:
    """The kept series of an exposition text; the labels that are the same on all of them are dropped."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(PREFIXES))
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in CONSTANT_LABELS}
            key = series(sample.name, **labels)
            values[key] = values.get(key, 0.0) + sample.value
    return Snapshot(at_s, values)


class MetricsReader:
    """Reads one server's /metrics; a context manager that owns its connections."""

    def __init__(self, base_url: str, timeout_s: float = 30.0) -> None:
        """`timeout_s` bounds each read; each has a connection of its own, since a server may close one that idles."""
        once = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False, limits=once)

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self._http.close()

    def snapshot(self) -> Snapshot:
        """The series as they are now."""
        try:
            response = self._http.get("/metrics/", follow_redirects=True)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise RequestFailed(
                f"wanted the server's /metrics, reading it failed: {error!r}; see the server's log"
            ) from error
        return parse(response.text, time.monotonic())


class Sampler:
    """Takes a snapshot every `interval_s` while its `with` block runs.

    In a thread: a loop that has hundreds of answers to read comes to everything else too late.
    """

    def __init__(self, reader: MetricsReader, interval_s: float) -> None:
        """Samples pile up in `samples`, oldest first."""
        self.samples: list[Snapshot] = []
        self._reader = reader
        self._interval_s = interval_s
        self._is_done = threading.Event()
        self._threads = ThreadPoolExecutor(1, "sampler")
        self._sampling: Future[None] | None = None

    def _run(self) -> None:
        while not self._is_done.is_set():
            self.samples.append(self._reader.snapshot())
            self._is_done.wait(self._interval_s)

    def __enter__(self) -> Self:
        """Start sampling."""
        self._sampling = self._threads.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling; a read that failed meanwhile is raised here."""
        assert self._sampling is not None
        self._is_done.set()
        self._threads.shutdown()
        self._sampling.result()
