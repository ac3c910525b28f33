"""Sends all requests of a burst at once, watches the server meanwhile, and waits until its experts are back.

Called by the demo and the benches, once per system and repeat.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.serving.client import Completion, OpenAIClient
from bench.serving.metrics import (
    CHANGES,
    PREEMPTIONS,
    RESIDENT,
    RUNNING,
    STEPS,
    TOKENS,
    TPOT_COUNT,
    TPOT_SUM,
    MetricsReader,
    Sampler,
    Snapshot,
)
from bench.serving.trace import Request

SAY_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Watch:
    """How a burst is watched: bounds and intervals in seconds."""

    request_timeout_s: float = 180.0
    sample_every_s: float = 0.1
    calm_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class BurstResult:
    """What a burst did: the completions in the order of the requests, and the server's series around them."""

    completions: tuple[Completion, ...]
    wall_s: float
    before: Snapshot
    samples: tuple[Snapshot, ...]
    after: Snapshot
    calm: Snapshot

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Generated tokens of each request."""
        return tuple(one.token_ids for one in self.completions)

    @property
    def tok_s(self) -> float:
        """Generated tokens per second, from the first request sent to the last one finished."""
        return sum(len(one.token_ids) for one in self.completions) / self.wall_s

    @property
    def requests_per_step(self) -> float:
        """The mean number of requests that a step made a token for (tokens, with speculation); 0 without steps.

        From the server's counters, which no busy machine can miss: a burst may be over before a sample falls into it.
        """
        steps = self._gained(STEPS)
        return self._gained(TOKENS) / steps if steps else 0.0

    @property
    def peak(self) -> Snapshot:
        """The sample with the fewest resident experts; among those the one with the most requests running."""
        return min(self.samples, key=lambda sample: (sample.get(RESIDENT), -sample.get(RUNNING)))

    @property
    def preemptions(self) -> int:
        """Requests stopped for want of KV during the burst."""
        return int(self._gained(PREEMPTIONS))

    @property
    def evictions(self) -> int:
        """Experts evicted from the start of the burst until it was calm again."""
        return int(self._gained(CHANGES, kind="evict"))

    @property
    def loads(self) -> int:
        """Experts brought back from the start of the burst until it was calm again."""
        return int(self._gained(CHANGES, kind="load"))

    @property
    def is_calm(self) -> bool:
        """Whether as many experts are resident as before the burst."""
        return has_recovered(self.before, self.calm)

    @property
    def calm_s(self) -> float:
        """Seconds from the last answer until calm, or until the wait was given up."""
        return self.calm.at_s - self.after.at_s

    @property
    def ttft_ms(self) -> float:
        """Median time to the first token."""
        return statistics.median(one.ttft_s for one in self.completions) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first, by the server's clock; a request of one token counts as 0.

        A client that shares few cores with a server may get all of an answer's events at one moment.
        """
        count = self._gained(TPOT_COUNT)
        return self._gained(TPOT_SUM) / count * 1e3 if count else 0.0

    def _gained(self, name: str, **labels: str) -> float:
        return self.calm.get(name, **labels) - self.before.get(name, **labels)


def has_recovered(before: Snapshot, now: Snapshot) -> bool:
    """Whether as many experts are resident as before; always so on a server without any."""
    return now.get(RESIDENT) >= before.get(RESIDENT)


def run_burst(
    base_url: str, model: str, requests: Sequence[Request], say: Callable[[str], None], watch: Watch
) -> BurstResult:
    """The result of one burst of all `requests` at once."""
    return asyncio.run(_run_burst(base_url, model, requests, say, watch))


async def _run_burst(
    base_url: str, model: str, requests: Sequence[Request], say: Callable[[str], None], watch: Watch
) -> BurstResult:
    with MetricsReader(base_url) as reader:
        async with OpenAIClient(base_url, model, watch.request_timeout_s) as client:
            before = reader.snapshot()
            started_s = time.monotonic()
            with Sampler(reader, watch.sample_every_s) as sampler:
                completions = await _send_all(client, requests, say)
                wall_s = time.monotonic() - started_s
        after = reader.snapshot()
        calm = await _wait_calm(reader, before, watch, say)
    return BurstResult(completions, wall_s, before, (*sampler.samples, after), after, calm)


async def _send_all(
    client: OpenAIClient, requests: Sequence[Request], say: Callable[[str], None]
) -> tuple[Completion, ...]:
    """The completions in the order of the requests; the first failure ends them all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.complete(one.prompt_ids, one.max_tokens)) for one in requests]
            await _wait_all(tasks, say)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return tuple(task.result() for task in tasks)


async def _wait_all(tasks: Sequence[asyncio.Task[Completion]], say: Callable[[str], None]) -> None:
    started_s, waiting = time.monotonic(), set(tasks)
    while waiting:
        _, waiting = await asyncio.wait(waiting, timeout=SAY_EVERY_S)
        if waiting:
            done = len(tasks) - len(waiting)
            say(f"{done} of {len(tasks)} requests are done after {time.monotonic() - started_s:.0f} s")


async def _wait_calm(reader: MetricsReader, before: Snapshot, watch: Watch, say: Callable[[str], None]) -> Snapshot:
    """The first snapshot with the experts back, or the last one before the wait was given up."""
    started_s = said_s = time.monotonic()
    while True:
        now = reader.snapshot()
        if has_recovered(before, now) or now.at_s - started_s > watch.calm_timeout_s:
            return now
        if now.at_s - said_s >= SAY_EVERY_S:
            say(f"{now.get(RESIDENT):.0f} of {before.get(RESIDENT):.0f} experts are back")
            said_s = now.at_s
        await asyncio.sleep(watch.sample_every_s)
