"""vLLM's scheduler with the adjuster inside: short of blocks, it evicts experts before it preempts anyone.

Assembles the adjuster's input, ships its changes with each step's output, and reads the workers' counts back.
"""

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, StreamingUpdate

from elasticmoe.runtime.adjuster.adjuster import Adjuster, Demand
from elasticmoe.runtime.adjuster.decision_log import DecisionLog
from elasticmoe.runtime.contract.config import parse_config, settings_from_env
from elasticmoe.runtime.device.report import StepReport
from elasticmoe.runtime.engine import refusal
from elasticmoe.runtime.engine.block_pool import ElasticBlockPool
from elasticmoe.runtime.engine.geometry import page_tiers, pool_geometry, start_load
from elasticmoe.runtime.engine.limit_file import LimitFile
from elasticmoe.runtime.engine.metrics import Metrics
from elasticmoe.runtime.engine.setup import model_shape
from elasticmoe.runtime.engine.shortage import Allocation, short_blocks
from elasticmoe.runtime.engine.step_clock import Batch, StepClock
from elasticmoe.runtime.engine.turns import in_turn, may_start, next_preempted
from elasticmoe.runtime.units import MATRICES, HugeId, ceil_div

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _StockScheduler
else:
    _StockScheduler = object  # the mixin stands before either of vLLM's schedulers

logger = logging.getLogger("vllm.elasticmoe.scheduler")

REPORT_STEPS = 16
"""Steps between two reports of the workers' counts, fewer at first, when all is news; one without tokens brings what is
left at once."""
METRICS_INTERVAL_S = 0.1
_WAKES_SCHEDULER = "_elasticmoe_wakes_scheduler"


class ElasticMixin(_StockScheduler):
    """What our scheduler adds to vLLM's, synchronous or asynchronous."""

    def __init__(self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **rest: Any) -> None:
        """Build vLLM's scheduler, then put the page pool under its block pool."""
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **rest)
        self._init_elastic(vllm_config, kv_cache_config)

    @refusal.recorded()
    def _init_elastic(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        config = parse_config(vllm_config.additional_config)
        assert config is not None, "our scheduler without our configuration"
        settings = settings_from_env()
        tiers = page_tiers(vllm_config, _kv_page_bytes(kv_cache_config))
        geometry = pool_geometry(vllm_config, config, tiers, kv_cache_config.num_blocks)
        self.pool = ElasticBlockPool.adopt(self.kv_cache_manager.block_pool)
        load = start_load(model_shape(vllm_config), config, settings)
        self.adjuster = Adjuster(geometry, config, load, self.pool, settings.limit)
        self.pool.connect(self.adjuster.table.pool)
        self.metrics = Metrics(MATRICES * tiers.expert_bytes)
        self._new_limits: deque[int] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._limit_file: LimitFile | None = None
        self._step_tokens = self._prompt_tokens = self._asked_tokens = 0
        self._unreported = 0
        self._report_steps = 1
        self._clock = StepClock()
        self._log = DecisionLog()
        self._observed_s = 0.0
        self._apply_limit(settings.limit)
        self._shadow_allocation(self.kv_cache_manager)
        if settings.limit_file is not None:
            self._watch(LimitFile(settings.limit_file, geometry.num_experts, self._on_limit))
        self._observe()

    # The limit

    def _watch(self, limit_file: LimitFile) -> None:
        self._limit_file = limit_file
        limit = limit_file.poll()
        if limit is not None:
            self._apply_limit(limit)
        limit_file.start()

    def _on_limit(self, limit: int) -> None:
        """Take a new limit from the watching thread; the next step applies it."""
        self._new_limits.append(limit)
        self._wake()

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when an idle engine should take a step."""
        self._wake = wake
        if self._new_limits:
            wake()

    def _apply_limit(self, limit: int | None) -> None:
        adjuster = self.adjuster
        adjuster.requested_limit = limit
        self.pool.kept_blocks = adjuster.geometry.num_kept_blocks(adjuster.limit)
        reachable = adjuster.geometry.num_blocks - self.pool.kept_blocks  # --watermark is a share of what KV could have
        self.kv_cache_manager.watermark_blocks = int(self.scheduler_config.watermark * reachable)
        logger.info("offload limit: requested %s, effective %d experts a layer", limit, adjuster.limit)

    # vLLM's scheduler

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step and attach the page changes that it depends on."""
        while self._new_limits:
            self._apply_limit(self._new_limits.popleft())
        self._step_tokens = self._prompt_tokens = 0
        self._clock.begin(time.monotonic())
        self.adjuster.begin_step()
        output = super().schedule(*args, **kwargs)
        self._step_tokens = output.total_num_scheduled_tokens
        self.adjuster.adjust(self._demand())
        self._tell()
        self._ship(output)
        self._observe()
        return output

    def _tell(self) -> None:
        decisions = self.adjuster.decisions
        self.metrics.add_decisions(decisions)
        if line := self._log.line(decisions, self.adjuster.table, time.monotonic()):
            logger.info("%s", line)

    def _ship(self, output: SchedulerOutput) -> None:
        delta = self.adjuster.drain()
        has_tokens = output.total_num_scheduled_tokens > 0
        self._unreported += has_tokens or bool(delta.loads)
        if self._unreported >= (self._report_steps if has_tokens else 1):
            self._unreported = 0
            self._report_steps = min(REPORT_STEPS, 2 * self._report_steps)
            delta = replace(delta, reports=True)
        if delta:
            output.elastic = delta

    def add_request(self, request: Request) -> None:
        """Note when the request came, by the clock that its waiting is told by, then let vLLM queue it."""
        request.elastic_came_s = time.monotonic()  # arrival_time is wall clock, which may be set
        session = self.requests.get(request.request_id)
        super().add_request(request)
        if session is not None and session.streaming_queue and session.streaming_queue[-1] is not None:
            session.streaming_queue[-1].elastic_came_s = request.elastic_came_s  # its turn comes after earlier inputs'

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Let vLLM go on to a session's next input, whose first token is waited for from when it came."""
        session.elastic_came_s = getattr(update, "elastic_came_s", None) or time.monotonic()
        super()._update_request_as_session(session, update)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Take the workers' counts, then let vLLM do its part."""
        report: StepReport | None = getattr(model_runner_output, "elastic", None)
        num_new_tokens = sum(map(len, model_runner_output.sampled_token_ids))
        self._clock.end(Batch.of(scheduler_output), num_new_tokens, time.monotonic())
        if report is not None:
            self.adjuster.load.add(report.routed)
            self.adjuster.learn(self._clock.take(report))
            self.metrics.add_report(report)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _handle_stopped_request(self, request: Request) -> bool:
        """Count an answer that has come to its end; one that was aborted says nothing of how long answers are."""
        self._clock.end_answer(request.num_output_tokens)
        is_finished: bool = super()._handle_stopped_request(request)
        return is_finished

    def has_requests(self) -> bool:
        """Return whether a step is due: for requests, a new limit, or experts that can come back.

        Paused with requests waiting, nothing comes back: the pages are theirs, and the pause waits for no step.
        """
        if super().has_requests() or self._new_limits:
            return True
        return not self._num_waiting and self.adjuster.wants_step()

    def shutdown(self) -> None:
        """Stop watching, then shut vLLM's scheduler down."""
        if self._limit_file is not None:
            self._limit_file.stop()
        super().shutdown()

    # Inside

    @property
    def _num_waiting(self) -> int:
        """Return how many requests wait for us, not for the next input of a session that is being served."""
        num_idle: int = self.num_waiting_for_streaming_input
        return len(self.waiting) + len(self.skipped_waiting) - num_idle

    def _demand(self) -> Demand:
        room = max(0, self.max_num_running_reqs - len(self.running) - self.num_waiting_for_streaming_input)
        asked = in_turn(self.policy, self.skipped_waiting, self.waiting)
        waiting = list(islice((one for one in asked if may_start(one, self.finished_recving_kv_req_ids)), room))
        blocks = sum(ceil_div(request.num_tokens, self.block_size) for request in waiting)
        first = next((one for one in waiting if not one.num_output_tokens), None)
        waited_s = 0.0 if first is None else time.monotonic() - first.elastic_came_s
        return Demand(
            waiting_blocks=blocks,
            num_running=len(self.running),
            num_waiting=len(waiting),
            num_tokens=self._step_tokens,
            prompt_tokens=self._prompt_tokens,
            waited_s=waited_s,
            asked_tokens=self._asked_tokens,
        )

    def _observe(self) -> None:
        now_s = time.monotonic()
        if self.running and now_s - self._observed_s < METRICS_INTERVAL_S:
            return
        self._observed_s = now_s
        has_requests = bool(self.running or self._num_waiting)
        self.metrics.observe(self.adjuster, self.pool.get_current_usage(), has_requests=has_requests)

    def _shadow_allocation(self, manager: KVCacheManager) -> None:
        """Have every failed allocation evict experts and try again before vLLM sees the failure."""
        stock, signature = manager.allocate_slots, inspect.signature(manager.allocate_slots)
        blocks_of = manager.coordinator.single_type_managers[0].req_to_blocks

        def allocate_slots(request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
            prompt_tokens = num_new_tokens if num_new_tokens - len(request.spec_token_ids) > 1 else 0
            self._step_tokens += num_new_tokens
            self._prompt_tokens += prompt_tokens
            held = blocks_of.get(request.request_id)
            queue = self.pool.free_block_queue
            queue.near = HugeId(held[-1].block_id // self.adjuster.geometry.tiers.blocks_per_huge) if held else None
            args = (num_new_tokens, *args)
            blocks = stock(request, *args, **kwargs)
            while blocks is None:
                call = Allocation.of(signature, request, *args, **kwargs)
                loser = None if call.is_admission else next_preempted(self.policy, self.running)
                lost_tokens = 0 if loser is None else loser.num_computed_tokens
                self._asked_tokens = num_new_tokens
                is_rescued = self.adjuster.rescue(short_blocks(manager, call), self._demand(), lost_tokens)
                self._asked_tokens = 0
                if not is_rescued:
                    self._step_tokens -= num_new_tokens
                    self._prompt_tokens -= prompt_tokens
                    return None
                blocks = stock(request, *args, **kwargs)
            return blocks

        manager.allocate_slots = allocate_slots


class ElasticScheduler(ElasticMixin, Scheduler):
    """vLLM's synchronous scheduler over the shared pool."""


class ElasticAsyncScheduler(ElasticMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler over the shared pool."""


def make_scheduler(*, vllm_config: VllmConfig, **rest: Any) -> Scheduler:
    """Return our scheduler in the kind that the engine's batches need."""
    _let_schedulers_wake_engines()
    kind = ElasticAsyncScheduler if vllm_config.scheduler_config.async_scheduling else ElasticScheduler
    return kind(vllm_config=vllm_config, **rest)


def _kv_page_bytes(kv_cache_config: KVCacheConfig) -> list[int]:
    """Return the bytes of one block in each layer that has its own KV tensor."""
    size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    return [size] * len(kv_cache_config.kv_cache_tensors)


def _let_schedulers_wake_engines() -> None:
    """Give our scheduler a way to wake an idle engine, which blocks on an input queue that schedulers don't see."""
    stock = EngineCoreProc.run_busy_loop
    if getattr(stock, _WAKES_SCHEDULER, False):
        return

    def run_busy_loop(self: EngineCoreProc) -> None:
        if isinstance(self.scheduler, ElasticMixin):
            self.scheduler.wake_by(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        stock(self)

    setattr(run_busy_loop, _WAKES_SCHEDULER, True)
    EngineCoreProc.run_busy_loop = run_busy_loop
