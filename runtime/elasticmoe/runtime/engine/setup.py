"""Turns a vLLM configuration that asks for elasticmoe into one that runs it, or refuses it in one sentence.

Called by the plugin around vLLM's own platform check; decides nothing about memory.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from elasticmoe.runtime.contract.config import (
    ENV_LIMIT,
    ENV_TRANSPORT,
    FetchKind,
    RunSettings,
    RuntimeConfig,
    parse_config,
    settings_from_env,
)
from elasticmoe.runtime.contract.model import ModelShape, parse_model_shape
from elasticmoe.runtime.errors import ConfigError, UnsupportedError
from elasticmoe.runtime.expert_load import read_profile

SCHEDULER = "elasticmoe.runtime.engine.scheduler.make_scheduler"
WORKERS = {"cpu": "elasticmoe.runtime.engine.cpu_worker.ElasticCPUWorker"}
GPU_WORKER = "elasticmoe.runtime.engine.gpu_worker.ElasticGPUWorker"
DEFAULT_CPU_KV_BYTES = 2**30
LOAD_FORMATS = ("auto", "hf", "safetensors")
"""vLLM's ways to load that leave experts unread when asked to."""
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def requested(vllm_config: VllmConfig) -> RuntimeConfig | None:
    """Return our configuration if this vLLM configuration asks for us."""
    given = vllm_config.additional_config
    if vllm_config.model_config is None or not isinstance(given, Mapping):  # vLLM takes any object that can be hashed
        return None
    return parse_config(given)


def model_shape(vllm_config: VllmConfig) -> ModelShape:
    """Return the sizes of the model's experts; raises UnsupportedError for a model that we don't page."""
    model = vllm_config.model_config
    return parse_model_shape(model.architectures, model.hf_text_config.to_dict())


def prepare(vllm_config: VllmConfig, config: RuntimeConfig) -> None:
    """Refuse what we can't serve, then put our scheduler, worker and arena in place."""
    refuse_unsupported(vllm_config)
    shape = model_shape(vllm_config)
    settings = settings_from_env()
    _check_settings(settings, shape)
    _check_depth(config, shape)
    _check_fetches(config)
    _check_loading(settings, str(vllm_config.load_config.load_format))
    _set_class(vllm_config.scheduler_config, "scheduler_cls", SCHEDULER, (None,), "--scheduler-cls")
    worker = WORKERS.get(current_platform.device_type, GPU_WORKER)
    _set_class(vllm_config.parallel_config, "worker_cls", worker, ("auto",), "--worker-cls")
    _set_arena(vllm_config, config, shape)
    if os.environ.setdefault(V2_RUNNER, "0") == "1":
        message = f"{V2_RUNNER}=1: elasticmoe drives vLLM's first model runner only; unset it"
        raise UnsupportedError(message)


def fetch_kind(config: RuntimeConfig) -> FetchKind:
    """Return what drives fetches; raises ConfigError where the device is asked to and is none that could."""
    can_drive = current_platform.is_cuda()
    if config.fetch == "device" and not can_drive:
        message = (
            f"fetch: device needs an NVIDIA GPU, this is {current_platform.device_name}; use host, or leave it out"
        )
        raise ConfigError(message)
    return config.fetch or ("device" if can_drive else "host")


def warm_sizes(vllm_config: VllmConfig) -> list[int]:
    """Return the batch sizes that launch every MoE kernel there may be, but for those that graphs are captured of."""
    from elasticmoe.kernels import config, launch

    shape, dtype = model_shape(vllm_config), vllm_config.model_config.dtype
    rows = shape.intermediate_size // vllm_config.parallel_config.tensor_parallel_size
    layer = config.Shape(shape.num_experts, shape.top_k, rows, shape.hidden_size, dtype)
    compilation = vllm_config.compilation_config
    has_graphs = compilation.cudagraph_mode.mixed_mode() != CUDAGraphMode.NONE
    captured = max(compilation.cudagraph_capture_sizes or [0]) if has_graphs else 0
    most = vllm_config.scheduler_config.max_num_batched_tokens
    device = torch.device(current_platform.device_type)
    return [size for size in launch.warm_sizes(layer, device, most) if size > captured]


def set_defaults(vllm_config: VllmConfig, config: RuntimeConfig) -> None:
    """Run eagerly where the host drives fetches: a captured graph can't wait for it.

    Early, as the flag --enforce-eager, so that all that vLLM derives from it follows.
    """
    if fetch_kind(config) == "host":
        vllm_config.model_config.enforce_eager = True
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def finish(vllm_config: VllmConfig, config: RuntimeConfig) -> None:
    """Set anew what vLLM's own check has set otherwise."""
    if config.arena_bytes is not None:  # vLLM's CPU platform puts VLLM_CPU_KVCACHE_SPACE, whole GiB, in its place
        vllm_config.cache_config.kv_cache_memory_bytes = config.arena_bytes


class Refusal(NamedTuple):
    """One combination that is not served: whether it is asked for, the flag that asks, and why not or what instead."""

    is_asked: bool
    flag: str
    reason: str


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError that names the first flag whose combination with us is not served."""
    for refusals in (_parallel_refusals, _model_refusals, _memory_refusals):
        for refusal in refusals(vllm_config):
            if refusal.is_asked:
                message = f"{refusal.flag} can't be combined with elasticmoe: {refusal.reason}"
                raise UnsupportedError(message)


def _parallel_refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    parallel = vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    why = "one pool of block ids can't serve several stages; use --tensor-parallel-size"
    yield Refusal(stages > 1, f"--pipeline-parallel-size {stages}", why)
    yield Refusal(parallel.data_parallel_size > 1, "--data-parallel-size", "run one server per replica instead")
    why = "leave it out: tensor parallelism splits experts"
    yield Refusal(parallel.enable_expert_parallel, "--enable-expert-parallel", why)
    yield Refusal(parallel.enable_eplb, "--enable-eplb", "it moves experts between GPUs by itself; leave it out")
    why = "it spreads a request's blocks over ranks; leave it out"
    yield Refusal(parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size", why)
    yield Refusal(parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size", why)
    why = "two batches at once would share the loading buffers; leave it out"
    yield Refusal(parallel.use_ubatching, "--enable-dbo or --ubatch-size", why)


def _model_refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    model = vllm_config.model_config
    why = "adapters on experts need weights that stay in place; merge the adapter into the checkpoint"
    yield Refusal(vllm_config.lora_config is not None, "--enable-lora", why)
    flag = f"quantization {model.quantization} (--quantization or the checkpoint's config.json)"
    why = "its weights are not paged yet; use an unquantized checkpoint"
    yield Refusal(model.quantization is not None, flag, why)
    drafter = getattr(vllm_config.speculative_config, "method", None)
    flag = f"--speculative-config method {drafter}"
    yield Refusal(drafter not in ("ngram", None), flag, "only ngram needs no second model")
    why = "sleeping drops the arena with the experts in it; leave it out"
    yield Refusal(model.enable_sleep_mode, "--enable-sleep-mode", why)
    why = "it reads the router where we do; leave it out"
    yield Refusal(model.enable_return_routed_experts, "--enable-return-routed-experts", why)
    backend = vllm_config.kernel_config.moe_backend
    why = "experts in pages have a kernel of their own; leave it out"
    yield Refusal(backend != "auto", f"--moe-backend {backend}", why)


def _memory_refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    cache, dtype = vllm_config.cache_config, str(vllm_config.model_config.dtype).removeprefix("torch.")
    why = "KV cache and experts share pages of one dtype; leave it out"
    yield Refusal(cache.cache_dtype not in ("auto", dtype), f"--kv-cache-dtype {cache.cache_dtype}", why)
    moves_kv = vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None
    why = "connectors don't know blocks that are lent to experts; leave it out"
    yield Refusal(moves_kv, "--kv-transfer-config or --kv-offloading-size", why)
    offload = vllm_config.offload_config
    offloads = offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    flag = "--cpu-offload-gb or --offload-group-size"
    yield Refusal(offloads, flag, "elasticmoe offloads experts by itself; leave it out")
    why = "arena_bytes sets the size; leave it out"
    yield Refusal(cache.num_gpu_blocks_override is not None, "--num-gpu-blocks-override", why)


def _check_settings(settings: RunSettings, shape: ModelShape) -> None:
    """Raise ConfigError for a setting that doesn't fit the model, before anything is loaded."""
    if settings.limit is not None and settings.limit > shape.num_experts:
        message = f"{ENV_LIMIT}: want at most {shape.num_experts} (experts of a layer); it is {settings.limit}"
        raise ConfigError(message)
    if settings.profile is not None:
        read_profile(settings.profile, shape.num_layers, shape.num_experts)


def _check_depth(config: RuntimeConfig, shape: ModelShape) -> None:
    """Raise ConfigError where every MoE layer would have a loading buffer of its own: no eviction would free a page."""
    if config.loading_depth >= shape.num_layers:
        message = (
            f"loading_depth: want less than the model's {shape.num_layers} MoE layers, which must share loading "
            f"buffers for evictions to free anything; it is {config.loading_depth}"
        )
        raise ConfigError(message)


def _check_fetches(config: RuntimeConfig) -> None:
    """Raise ConfigError where fetches can't be driven, or nothing be fetched ahead, as is asked."""
    kind = fetch_kind(config)
    if config.lookahead and kind == "host":
        raise ConfigError(
            "lookahead: the host fetches what is routed to, never ahead; leave it out or use fetch: device"
        )
    if config.lookahead and config.loading_depth <= config.lookahead:
        message = (
            f"lookahead: {config.lookahead} wants more loading buffers than loading_depth {config.loading_depth}, "
            "since the layer that computes still reads its own; raise loading_depth, or leave lookahead out"
        )
        raise ConfigError(message)


def _check_loading(settings: RunSettings, load_format: str) -> None:
    """Raise UnsupportedError for weights that a coordinator can't read."""
    if settings.socket is not None and load_format not in LOAD_FORMATS:
        message = (
            f"--load-format {load_format} can't be combined with {ENV_TRANSPORT}=map: the coordinator reads "
            f"safetensors files; use one of {', '.join(LOAD_FORMATS)}"
        )
        raise UnsupportedError(message)


def _set_class(part: Any, name: str, ours: str, defaults: tuple[str | None, ...], flag: str) -> None:
    current = getattr(part, name)
    if current not in (*defaults, ours):
        message = f"{flag} {current} can't be combined with elasticmoe, which needs its own; leave it out"
        raise UnsupportedError(message)
    setattr(part, name, ours)


def _set_arena(vllm_config: VllmConfig, config: RuntimeConfig, shape: ModelShape) -> None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    arena_bytes = config.arena_bytes
    if current_platform.device_type == "cpu" and arena_bytes is None and cache.kv_cache_memory_bytes is None:
        itemsize = vllm_config.model_config.dtype.itemsize
        arena_bytes = shape.expert_bytes_total(itemsize, parallel.tensor_parallel_size) + DEFAULT_CPU_KV_BYTES
    if arena_bytes is None:
        return
    if cache.kv_cache_memory_bytes not in (None, arena_bytes):
        message = (
            f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes} beside arena_bytes {arena_bytes}: "
            "the arena holds KV cache and experts, so give one of the two"
        )
        raise ConfigError(message)
    cache.kv_cache_memory_bytes = arena_bytes
