"""Serves a cell's requests in this process: sends them when they are due, steps the engine, and notes what happened.

Times are taken where the scheduler takes in a step's tokens, which is before vLLM makes outputs of them.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.matrix.workloads import Arrival

SERIES_S = 0.25
IDLE_S = 0.0005


@dataclass(slots=True)
class Served:
    """One request's life; times by the recorder's clock."""

    arrived_s: float
    tokens: list[int] = field(default_factory=list)
    choices: list[tuple[float, float]] = field(default_factory=list)
    """Each token's logprob, and how much lower the next best one's is, where the client asked for them."""
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class Recorder:
    """Watches one scheduler from `start` to `stop`."""

    scheduler: Any
    served: dict[int, Served] = field(default_factory=dict)
    steps: list[dict[int, int]] = field(default_factory=list)
    """Tokens by request number of every step that had any."""
    preemptions: int = 0
    peak: int = 0
    resident_min: int | None = None
    series: list[dict[str, Any]] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _gaps: list[float] = field(default_factory=list)
    _started_s: float = 0.0

    def start(self) -> None:
        """Put both methods' watchers on the scheduler."""
        self._started_s = time.perf_counter()
        stock_schedule, stock_update = self.scheduler.schedule, self.scheduler.update_from_output

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock_schedule(*args, **kwargs)
            self._scheduled(output)
            return output

        def update_from_output(*args: Any, **kwargs: Any) -> Any:
            outputs = stock_update(*args, **kwargs)
            self._updated(outputs)
            return outputs

        self.scheduler.schedule, self.scheduler.update_from_output = schedule, update_from_output

    def stop(self) -> None:
        """Take them off again."""
        del self.scheduler.schedule, self.scheduler.update_from_output

    def add(self, number: int, request_id: str, arrived_s: float) -> None:
        """Note a request that was sent, under vLLM's own id."""
        self._numbers[request_id] = number
        self.served[number] = Served(arrived_s)

    def tick(self, num_resident: int | None) -> None:
        """Add to the series what is due since the last time."""
        now_s = time.perf_counter() - self._started_s
        if now_s < SERIES_S * (len(self.series) + 1):
            return
        gaps, self._gaps = self._gaps, []
        tpot_ms = round(1000 * statistics.mean(gaps), 3) if gaps else None
        running = len(self.scheduler.running)
        self.series.append({"s": round(now_s, 3), "resident": num_resident, "running": running, "tpot_ms": tpot_ms})

    def _scheduled(self, output: Any) -> None:
        self.preemptions += len(output.preempted_req_ids or ())
        self.peak = max(self.peak, len(self.scheduler.running))
        if output.num_scheduled_tokens:
            self.steps.append({self._numbers[name]: num for name, num in output.num_scheduled_tokens.items()})
        adjuster = getattr(self.scheduler, "adjuster", None)
        if adjuster is not None:
            now = adjuster.table.num_resident
            self.resident_min = now if self.resident_min is None else min(self.resident_min, now)

    def _updated(self, outputs: Any) -> None:
        now_s = time.perf_counter()
        for output in (one for part in outputs.values() for one in part.outputs):
            if not output.new_token_ids:
                continue
            request = self.served[self._numbers[output.request_id]]
            if request.tokens:
                self._gaps.append((now_s - request.last_s) / len(output.new_token_ids))
            else:
                request.first_s = now_s
            request.last_s = now_s
            request.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                chosen, best, second = output.new_logprobs.logprobs.T
                request.choices += zip(chosen.tolist(), (best - second).tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class Client:
    """An engine in this process and the way to send requests to it."""

    llm: Any
    recorder: Recorder
    num_resident: Any
    """() → experts on the device, or None."""
    has_logprobs: bool = False
    """Whether to have each token's choice noted: it costs time."""

    @property
    def core(self) -> Any:
        """Return vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    def send(self, number: int, prompt: list[int], num_out: int, arrived_s: float) -> None:
        """Add one request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=num_out,
            ignore_eos=True,
            temperature=0,
            detokenize=False,
            logprobs=2 if self.has_logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        self.recorder.add(number, request_id, arrived_s)

    def step(self) -> bool:
        """Take one step if there is anything to do; returns whether there was."""
        if self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        elif self.recorder.scheduler.has_requests():
            self.core.step_fn()
        else:
            return False
        return True


def serve(client: Client, arrivals: Sequence[Arrival], prompts: Sequence[list[int]]) -> float:
    """Serve the requests to the end; returns the seconds from the first arrival to the last token."""
    recorder = client.recorder
    recorder.start()
    began_s = origin_s = time.perf_counter()
    pending, has_burst_ended = 0, False
    try:
        while pending < len(arrivals) or client.llm.llm_engine.has_unfinished_requests():
            if pending < len(arrivals) and arrivals[pending].is_after_burst and not has_burst_ended:
                has_burst_ended = not client.llm.llm_engine.has_unfinished_requests()
                origin_s = time.perf_counter()
            while pending < len(arrivals) and _is_due(arrivals[pending], origin_s, has_burst_ended=has_burst_ended):
                one = arrivals[pending]
                client.send(pending, prompts[pending], one.num_out, origin_s + one.at_s)
                pending += 1
            if not client.step():
                time.sleep(IDLE_S)
            recorder.tick(client.num_resident())
    finally:
        recorder.stop()
    return max(one.last_s for one in recorder.served.values()) - began_s


def _is_due(arrival: Arrival, origin_s: float, *, has_burst_ended: bool) -> bool:
    if arrival.is_after_burst and not has_burst_ended:
        return False
    return time.perf_counter() >= origin_s + arrival.at_s
