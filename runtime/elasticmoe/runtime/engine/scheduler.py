"""vLLM's scheduler with the adjuster inside: short of blocks, it evicts experts before it preempts anyone.

Assembles the adjuster's input, ships its changes with each step's output, and reads the workers' counts back.
"""

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from elasticmoe.runtime.adjuster.adjuster import Adjuster, Demand
from elasticmoe.runtime.contract.config import parse_config, settings_from_env
from elasticmoe.runtime.device.experts import StepReport
from elasticmoe.runtime.engine import refusal
from elasticmoe.runtime.engine.block_pool import ElasticBlockPool
from elasticmoe.runtime.engine.geometry import page_tiers, pool_geometry, start_load
from elasticmoe.runtime.engine.limit_file import LimitFile
from elasticmoe.runtime.engine.metrics import Metrics
from elasticmoe.runtime.engine.setup import model_shape
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.units import MATRICES, HugeId, ceil_div

logger = logging.getLogger("vllm.elasticmoe.scheduler")

REPORT_STEPS = 16
"""Steps between two reports of the workers' counts."""
METRICS_INTERVAL_S = 0.1


class ElasticMixin:
    """What our scheduler adds to vLLM's, synchronous or asynchronous."""

    def __init__(self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **rest: Any) -> None:  # noqa: ANN401
        """Build vLLM's scheduler, then put the page pool under its block pool."""
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **rest)
        with refusal.recorded():
            self._init_elastic(vllm_config, kv_cache_config)

    def _init_elastic(self: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:  # noqa: ANN401
        config = parse_config(vllm_config.additional_config)
        assert config is not None, "our scheduler without our configuration"
        settings = settings_from_env()
        tiers = page_tiers(vllm_config, _kv_page_bytes(kv_cache_config))
        geometry = pool_geometry(vllm_config, config, tiers, kv_cache_config.num_blocks)
        if settings.limit is not None and settings.limit > geometry.num_experts:
            message = f"limit {settings.limit}: want at most {geometry.num_experts}, the experts of a layer; lower it"
            raise ConfigError(message)
        shape = model_shape(vllm_config)
        self.top_k = shape.top_k
        self.pool = ElasticBlockPool.adopt(self.kv_cache_manager.block_pool)
        load = start_load(shape, config, settings)
        self.adjuster = Adjuster(geometry, config, load, self.pool, settings.limit)
        self.pool.connect(self.adjuster.table.pool)
        self.metrics = Metrics(MATRICES * tiers.expert_bytes)
        self._pending_limit: int | None = None
        self._wake: Callable[[], None] = lambda: None
        self._limit_file: LimitFile | None = None
        self._steps = 0
        self._observed_s = 0.0
        self._apply_limit(settings.limit)
        self._shadow_allocation(self.kv_cache_manager)
        if settings.limit_file is not None:
            self._watch(LimitFile(settings.limit_file, geometry.num_experts, self._on_limit))
        self._observe()

    # The limit

    def _watch(self: Any, limit_file: LimitFile) -> None:  # noqa: ANN401
        self._limit_file = limit_file
        limit = limit_file.poll()
        if limit is not None:
            self._apply_limit(limit)
        limit_file.start()

    def _on_limit(self: Any, limit: int) -> None:  # noqa: ANN401
        """Take a new limit from the watching thread; the next step applies it."""
        self._pending_limit = limit
        self._wake()

    def wake_by(self: Any, wake: Callable[[], None]) -> None:  # noqa: ANN401
        """Have `wake` called when an idle engine should take a step."""
        self._wake = wake
        if self._pending_limit is not None:
            wake()

    def _apply_limit(self: Any, limit: int | None) -> None:  # noqa: ANN401
        adjuster = self.adjuster
        adjuster.requested_limit = limit
        self.pool.kept_blocks = adjuster.geometry.num_kept_blocks(adjuster.limit)
        logger.info("offload limit: requested %s, effective %d experts a layer", limit, adjuster.limit)

    # vLLM's scheduler

    def schedule(self: Any, *args: Any, **kwargs: Any) -> SchedulerOutput:  # noqa: ANN401
        """Schedule a step and attach the page changes that it depends on."""
        limit, self._pending_limit = self._pending_limit, None
        if limit is not None:
            self._apply_limit(limit)
        self.adjuster.begin_step()
        output = super().schedule(*args, **kwargs)
        self.adjuster.adjust(self._demand())
        self._ship(output)
        self._observe()
        return output

    def _ship(self: Any, output: SchedulerOutput) -> None:  # noqa: ANN401
        delta = self.adjuster.drain()
        if output.total_num_scheduled_tokens:
            self._steps += 1
            if self._steps % REPORT_STEPS == 0:
                delta = replace(delta, reports=True)
        if delta:
            output.elastic = delta

    def update_from_output(self: Any, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:  # noqa: ANN401
        """Take the workers' counts, then let vLLM do its part."""
        report: StepReport | None = getattr(model_runner_output, "elastic", None)
        if report is not None:
            self.adjuster.load.add(report.routed, self.top_k)
            self.metrics.add_report(report)
        return super().update_from_output(scheduler_output, model_runner_output)

    def has_requests(self: Any) -> bool:  # noqa: ANN401
        """Return whether a step is due: for requests, a new limit, or experts that can come back."""
        return super().has_requests() or self._pending_limit is not None or self.adjuster.wants_step()

    def shutdown(self: Any) -> None:  # noqa: ANN401
        """Stop watching, then shut vLLM's scheduler down."""
        if self._limit_file is not None:
            self._limit_file.stop()
        super().shutdown()

    # Inside

    def _demand(self: Any) -> Demand:  # noqa: ANN401
        room = max(0, self.max_num_running_reqs - len(self.running))
        waiting = islice(chain(self.waiting, self.skipped_waiting), room)
        blocks = sum(ceil_div(request.num_tokens, self.block_size) for request in waiting)
        return Demand(waiting_blocks=blocks, num_running=len(self.running))

    def _observe(self: Any) -> None:  # noqa: ANN401
        now_s = time.monotonic()
        if self.running and now_s - self._observed_s < METRICS_INTERVAL_S:
            return
        self._observed_s = now_s
        self.metrics.observe(self.adjuster, self.pool.get_current_usage())

    def _shadow_allocation(self: Any, manager: KVCacheManager) -> None:  # noqa: ANN401
        """Have every failed allocation evict experts and try again before vLLM sees the failure."""
        stock, signature = manager.allocate_slots, inspect.signature(manager.allocate_slots)
        blocks_of = manager.coordinator.single_type_managers[0].req_to_blocks

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:  # noqa: ANN401
            held = blocks_of.get(request.request_id)
            queue = self.pool.free_block_queue
            queue.near = HugeId(held[-1].block_id // self.adjuster.geometry.tiers.blocks_per_huge) if held else None
            blocks = stock(request, *args, **kwargs)
            while blocks is None:
                bound = signature.bind(request, *args, **kwargs)
                bound.apply_defaults()
                if not self.adjuster.rescue(short_blocks(manager, **bound.arguments)):
                    return None
                blocks = stock(request, *args, **kwargs)
                self.adjuster.counts.rescued += blocks is not None
            return blocks

        manager.allocate_slots = allocate_slots


class ElasticScheduler(ElasticMixin, Scheduler):  # type: ignore[misc] -- vllm is untyped
    """vLLM's synchronous scheduler over the shared pool."""


class ElasticAsyncScheduler(ElasticMixin, AsyncScheduler):  # type: ignore[misc] -- vllm is untyped
    """vLLM's asynchronous scheduler over the shared pool."""


def make_scheduler(*, vllm_config: VllmConfig, **rest: Any) -> Scheduler:  # noqa: ANN401 -- vLLM's arguments, passed on
    """Return our scheduler in the kind that the engine's batches need."""
    _let_schedulers_wake_engines()
    kind = ElasticAsyncScheduler if vllm_config.scheduler_config.async_scheduling else ElasticScheduler
    return kind(vllm_config=vllm_config, **rest)


def short_blocks(  # noqa: PLR0913 -- vLLM's allocate_slots, whose two checks it repeats
    manager: KVCacheManager,
    *,
    request: Request,
    num_new_tokens: int,
    num_new_computed_tokens: int,
    new_computed_blocks: KVCacheBlocks | None,
    num_lookahead_tokens: int,
    num_external_computed_tokens: int,
    num_encoder_tokens: int,
    full_sequence_must_fit: bool,
    reserved_blocks: int,
    has_scheduled_reqs: bool,
    **_: object,
) -> int:
    """Return by how many blocks `allocate_slots` with these arguments falls short (the larger of its two checks)."""
    computed = new_computed_blocks or manager.empty_kv_cache_blocks
    local = request.num_computed_tokens + num_new_computed_tokens
    total = min(local + num_external_computed_tokens, manager.max_model_len)
    is_admission = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    watermark = manager.watermark_blocks if has_scheduled_reqs and is_admission else 0

    def need(num_tokens: int, main_tokens: int, *, is_capped: bool) -> int:
        return int(
            manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=num_tokens,
                new_computed_blocks=computed.blocks,
                num_encoder_tokens=num_encoder_tokens,
                total_computed_tokens=total,
                num_local_computed_tokens=local,
                num_tokens_main_model=main_tokens,
                apply_admission_cap=is_capped,
            )
        )

    main = total + num_new_tokens
    wanted = need(min(main + num_lookahead_tokens, manager.max_model_len), main, is_capped=False) + reserved_blocks
    if full_sequence_must_fit:
        full = min(request.num_tokens, manager.max_model_len)
        wanted = max(wanted, need(full, full, is_capped=True))
    return wanted + watermark - int(manager.block_pool.get_num_free_blocks())


def _kv_page_bytes(kv_cache_config: KVCacheConfig) -> list[int]:
    """Return the bytes of one block in each layer that has its own KV tensor."""
    size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    return [size] * len(kv_cache_config.kv_cache_tensors)


def _let_schedulers_wake_engines() -> None:
    """Give our scheduler a way to wake an idle engine, which blocks on an input queue that schedulers don't see."""
    stock = EngineCoreProc.run_busy_loop
    if getattr(stock, "is_elastic", False):
        return

    def run_busy_loop(self: EngineCoreProc) -> None:
        if isinstance(self.scheduler, ElasticMixin):
            self.scheduler.wake_by(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        stock(self)

    run_busy_loop.is_elastic = True  # type: ignore[attr-defined] -- our own mark, so as to wrap once
    EngineCoreProc.run_busy_loop = run_busy_loop
