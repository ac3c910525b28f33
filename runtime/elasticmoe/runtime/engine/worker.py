"""What our workers add to vLLM's: experts in the host pool and the arena, KV packed over the same arena.

Applies each step's page changes before its forward. Never decides anything.
"""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from elasticmoe.runtime.adjuster.adjuster import start_table
from elasticmoe.runtime.contract.config import RuntimeConfig, parse_config, settings_from_env
from elasticmoe.runtime.contract.report import MemoryReport
from elasticmoe.runtime.coordinator.client import Lease
from elasticmoe.runtime.device.experts import Experts
from elasticmoe.runtime.device.pinning import Pinning, pageable_warning, wait_for_all
from elasticmoe.runtime.device.report import PendingReport
from elasticmoe.runtime.engine import refusal
from elasticmoe.runtime.engine.geometry import page_tiers, pool_geometry, start_load
from elasticmoe.runtime.engine.next_gate import NextGate
from elasticmoe.runtime.engine.routed_experts import building
from elasticmoe.runtime.engine.setup import fetch_kind, model_shape, warm_sizes
from elasticmoe.runtime.engine.warm_pool import loading_into, open_pool, wanted_pool
from elasticmoe.runtime.pages.changes import PageDelta
from elasticmoe.runtime.pages.placement import Geometry
from elasticmoe.runtime.pages.tiers import Tiers
from elasticmoe.runtime.units import BlockId

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _StockRunner
    from vllm.v1.worker.gpu_worker import Worker as _StockWorker
else:
    _StockRunner = _StockWorker = object  # the mixins stand before the classes of whichever device it is

logger = logging.getLogger("vllm.elasticmoe.worker")


class _NoPort:
    """The worker's page table has no KV side: the scheduler keeps the blocks."""

    def lend(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""

    def give_back(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing."""


class PackedKVMixin(_StockRunner):
    """A model runner whose KV cache is the arena: block b of every layer lies in [b * S, (b + 1) * S)."""

    elastic_storage: torch.Tensor | None = None

    def _allocate_kv_cache_tensors(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        tensors = kv_cache_config.kv_cache_tensors
        if not tensors or not tensors[0].block_stride:
            return dict(super()._allocate_kv_cache_tensors(kv_cache_config))
        self.elastic_storage = torch.zeros(tensors[0].size, dtype=torch.int8, device=self.device)
        return {name: self.elastic_storage for tensor in tensors for name in tensor.shared_by}


def packed(kv_cache_config: KVCacheConfig, tiers: Tiers) -> KVCacheConfig:
    """Return the configuration with every layer's KV at its own offset inside each block of S bytes."""
    page = tiers.raw_block_bytes // len(kv_cache_config.kv_cache_tensors)
    size = tiers.block_bytes * kv_cache_config.num_blocks
    tensors = [
        KVCacheTensor(size=size, shared_by=tensor.shared_by, offset=index * page, block_stride=tiers.block_bytes)
        for index, tensor in enumerate(kv_cache_config.kv_cache_tensors)
    ]
    return replace(kv_cache_config, kv_cache_tensors=tensors)


class ElasticWorkerMixin(_StockWorker):
    """Put before a vLLM worker class."""

    experts: Experts
    pin_s: float | None = None
    """Seconds that pinning the host pool took, beside what else starts; None without a GPU, or where it was refused."""
    pin_waited_s: float | None = None
    """Seconds of them that nothing else was left to do in."""
    _pinning: Pinning | None = None
    _lease: Lease | None = None
    _report: PendingReport | None = None
    """The counts of the forward that was run last, if they were asked for; they leave with its output."""

    @property
    def elastic_config(self) -> RuntimeConfig:
        """Return our part of the configuration."""
        config = parse_config(self.vllm_config.additional_config)
        assert config is not None, "our worker without our configuration"
        return config

    def init_device(self) -> None:
        """Start the device, then give its model runner the packed KV cache."""
        super().init_device()
        stock = type(self.model_runner)
        self.model_runner.__class__ = type(f"Elastic{stock.__name__}", (PackedKVMixin, stock), {})

    @refusal.recorded()
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, its routed experts into the host pool unless they are there already."""
        shape = model_shape(self.vllm_config)
        wanted = wanted_pool(self.vllm_config, shape)
        pool, self._lease = open_pool(wanted, self.model_config.dtype, settings_from_env().socket)
        fetch = fetch_kind(self.elastic_config)
        if self.device.type == "cuda":
            self._pinning = Pinning(pool, self.device)
        self.experts = Experts(pool, self.device, fetch)
        with building(self.experts, shape), loading_into(pool):
            super().load_model(*args, **kwargs)
        if self.elastic_config.lookahead:
            self.experts.predict_by(NextGate(self.model_runner.model))

    @refusal.recorded()
    def determine_available_memory(self) -> int:
        """Return the arena in the units that vLLM turns into blocks: whole blocks without their padding."""
        if not self.cache_config.kv_cache_memory_bytes:  # vLLM measures then, and captures graphs to do so
            self._end_pinning()
        arena_bytes = int(super().determine_available_memory())
        tiers = self._elastic_tiers()
        num_blocks = arena_bytes // tiers.block_bytes
        self._elastic_geometry(tiers, num_blocks).least_offload()
        return int(num_blocks * tiers.raw_block_bytes)

    @refusal.recorded()
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the arena, lay the KV cache over it and place the experts."""
        self._end_pinning()
        tiers = self._elastic_tiers()
        super().initialize_from_config(packed(kv_cache_config, tiers))
        geometry = self._elastic_geometry(tiers, kv_cache_config.num_blocks)
        config, settings = self.elastic_config, settings_from_env()
        load = start_load(model_shape(self.vllm_config), config, settings)
        table = start_table(geometry, config, geometry.effective_limit(settings.limit), load, _NoPort())
        storage = self.model_runner.elastic_storage
        assert storage is not None, "vLLM built its KV cache without the arena"
        self.experts.attach(storage.view(torch.uint8), tiers, table.entries())
        report = self._elastic_report(geometry, table.num_resident, table.num_loading_pages)
        for line in report.lines():
            logger.info("%s", line)

    def compile_or_warm_up_model(self) -> Any:
        """Launch every kernel once that a batch beyond the captured sizes may need, then let vLLM warm up and capture.

        Else the first prompt of a size would wait for its compiler.
        """
        if self.device.type == "cuda":
            for num_tokens in warm_sizes(self.vllm_config):
                self.model_runner._dummy_run(num_tokens, skip_eplb=True, remove_lora=False)
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Apply the step's page changes, then run it; an output that needs no sampling takes the counts along."""
        delta: PageDelta | None = getattr(scheduler_output, "elastic", None)
        if delta is not None:
            self.experts.apply(delta)
        self.experts.begin_step(scheduler_output.total_num_scheduled_tokens)
        try:
            output = super().execute_model(scheduler_output)
        finally:
            self.experts.end_step()
        self._report = self.experts.take_report() if delta is not None and delta.reports else None
        return self._with_counts(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and send the step's counts along if they were asked for."""
        return self._with_counts(super().sample_tokens(grammar_output))

    def shutdown(self) -> None:
        """End the lease of the host pool after vLLM's own end."""
        super().shutdown()
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    # Inside

    def _end_pinning(self) -> None:
        """Wait for the host pool's pinning, if it is under way; where it was refused on any rank, go on without."""
        if self._pinning is None:
            return
        started_s = time.perf_counter()
        pinning, self._pinning = self._pinning, None
        error, took_s = wait_for_all(pinning, get_world_group().cpu_group)
        if error:
            self._read_pageable(error)
            return
        self.pin_s, self.pin_waited_s = took_s, time.perf_counter() - started_s
        logger.info("%.1f s to pin the host pool, %.1f of them waited for", self.pin_s, self.pin_waited_s)

    def _read_pageable(self, error: int) -> None:
        """Serve from a pool that isn't pinned, without graphs: none is captured yet, and they can't wait for a host.

        A rank waits for the slowest in every layer: this one's pinned pages would hasten none, and are given back.
        """
        pool_bytes, config = self.experts.pool.layout.pool_bytes, self.elastic_config
        warning = pageable_warning(pool_bytes, error, config, fetch_kind(config))
        self.experts.pool.unpin()
        self.experts.drive("host")
        self.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        if self.rank == 0:
            logger.warning("%s", warning)

    def _with_counts(self, output: Any) -> Any:
        """Return the output with the counts on it; None, which says that sampling is still to come, leaves them."""
        if self._report is None or output is None:
            return output
        report, self._report = self._report, None
        return _with_report(output, report)

    def _elastic_tiers(self) -> Tiers:
        specs = self.model_runner.get_kv_cache_spec()
        return page_tiers(self.vllm_config, [spec.page_size_bytes for spec in specs.values()])

    def _elastic_geometry(self, tiers: Tiers, num_blocks: int) -> Geometry:
        return pool_geometry(self.vllm_config, self.elastic_config, tiers, num_blocks)

    def _elastic_report(self, geometry: Geometry, resident: int, loading_pages: int) -> MemoryReport:
        tiers = geometry.tiers
        return MemoryReport(
            arena_bytes=geometry.arena_bytes,
            expert_page_bytes=tiers.expert_bytes,
            block_bytes=tiers.block_bytes,
            huge_page_bytes=tiers.huge_bytes,
            waste_ratio=tiers.waste,
            num_blocks=geometry.num_blocks,
            num_experts=geometry.num_layers * geometry.num_experts,
            num_resident=resident,
            loading_bytes=loading_pages * tiers.expert_bytes,
            host_pool_bytes=self.experts.pool.layout.pool_bytes,
            is_pinned=self.experts.pool.is_pinned,
        )


def _with_report(output: ModelRunnerOutput | AsyncModelRunnerOutput, report: PendingReport) -> Any:
    """Return the output with the report on it, which is waited for no sooner than the output itself.

    vLLM pickles outputs with their extra attributes.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        wait: Callable[[], ModelRunnerOutput] = output.get_output
        output.get_output = lambda: _with_report(wait(), report)
        return output
    own = copy.copy(output)  # vLLM's output of a step without tokens is one constant
    own.elastic = report()
    return own
