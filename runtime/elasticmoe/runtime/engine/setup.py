"""Turns a vLLM configuration that asks for elasticmoe into one that runs it, or refuses it in one sentence.

Called by the plugin around vLLM's own platform check; decides nothing about memory.
"""

import os
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from elasticmoe.runtime.contract.config import RuntimeConfig, parse_config, settings_from_env
from elasticmoe.runtime.contract.model import ModelShape, parse_model_shape
from elasticmoe.runtime.errors import ConfigError, UnsupportedError

SCHEDULER = "elasticmoe.runtime.engine.scheduler.make_scheduler"
WORKERS = {"cpu": "elasticmoe.runtime.engine.cpu_worker.ElasticCPUWorker"}
GPU_WORKER = "elasticmoe.runtime.engine.gpu_worker.ElasticGPUWorker"
DEFAULT_CPU_KV_BYTES = 2**30
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def requested(vllm_config: VllmConfig) -> RuntimeConfig | None:
    """Return our configuration if this vLLM configuration asks for us."""
    if vllm_config.model_config is None:
        return None
    return parse_config(vllm_config.additional_config or {})


def model_shape(vllm_config: VllmConfig) -> ModelShape:
    """Return the sizes of the model's experts; raises UnsupportedError for a model that we don't page."""
    model = vllm_config.model_config
    return parse_model_shape(model.architectures, model.hf_text_config.to_dict())


def prepare(vllm_config: VllmConfig, config: RuntimeConfig) -> None:
    """Refuse what we can't serve, then put our scheduler, worker and arena in place."""
    refuse_unsupported(vllm_config)
    settings_from_env()
    shape = model_shape(vllm_config)
    _set_class(vllm_config.scheduler_config, "scheduler_cls", SCHEDULER, (None,), "--scheduler-cls")
    worker = WORKERS.get(current_platform.device_type, GPU_WORKER)
    _set_class(vllm_config.parallel_config, "worker_cls", worker, ("auto",), "--worker-cls")
    _set_arena(vllm_config, config, shape)
    if os.environ.setdefault(V2_RUNNER, "0") == "1":
        message = f"{V2_RUNNER}=1: elasticmoe drives vLLM's first model runner only; unset it"
        raise UnsupportedError(message)


def finish(vllm_config: VllmConfig, config: RuntimeConfig) -> None:
    """Run eagerly: fetches are driven by the host, which a captured graph can't do."""
    if config.arena_bytes is not None:  # vLLM's CPU platform puts VLLM_CPU_KVCACHE_SPACE, whole GiB, in its place
        vllm_config.cache_config.kv_cache_memory_bytes = config.arena_bytes
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError that names the first flag whose combination with us is not served."""
    for is_asked, flag, reason in _refusals(vllm_config):
        if is_asked:
            message = f"{flag} can't be combined with elasticmoe: {reason}"
            raise UnsupportedError(message)


def _refusals(vllm_config: VllmConfig) -> list[tuple[bool, str, str]]:
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    drafter = getattr(vllm_config.speculative_config, "method", "ngram")
    kv_dtype = cache.cache_dtype
    return [
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}",
            "one pool of block ids can't serve several stages; use --tensor-parallel-size",
        ),
        (parallel.data_parallel_size > 1, "--data-parallel-size", "run one server per replica instead"),
        (parallel.enable_expert_parallel, "--enable-expert-parallel", "leave it out: tensor parallelism splits experts"),
        (parallel.enable_eplb, "--enable-eplb", "it moves experts between GPUs by itself; leave it out"),
        (parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size", "leave it out"),
        (
            vllm_config.lora_config is not None,
            "--enable-lora",
            "adapters on experts need weights that stay in place; merge the adapter into the checkpoint",
        ),
        (
            model.quantization is not None,
            f"quantization {model.quantization} (--quantization or the checkpoint's config.json)",
            "its weights are not paged yet; use an unquantized checkpoint",
        ),
        (
            kv_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            f"--kv-cache-dtype {kv_dtype}",
            "KV cache and experts share pages of one dtype; leave it out",
        ),
        (drafter not in ("ngram", None), f"--speculative-config method {drafter}", "only ngram needs no second model"),
        (vllm_config.kv_transfer_config is not None, "--kv-transfer-config", "connectors don't know lent blocks"),
        (model.enable_sleep_mode, "--enable-sleep-mode", "sleeping drops the arena with the experts in it"),
        (model.enable_return_routed_experts, "--enable-return-routed-experts", "leave it out"),
        (_offloads(vllm_config), "--cpu-offload-gb or --offload-backend", "elasticmoe offloads experts by itself"),
        (cache.num_gpu_blocks_override is not None, "--num-gpu-blocks-override", "arena_bytes sets the size"),
    ]


def _offloads(vllm_config: VllmConfig) -> bool:
    offload = getattr(vllm_config, "offload_config", None)
    return offload is not None and (offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0)


def _set_class(part: Any, name: str, ours: str, defaults: tuple[str | None, ...], flag: str) -> None:  # noqa: ANN401 -- any config
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
