"""docs/limits.md lists exactly the flags that are refused, on vLLM's own configuration."""

import re
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticmoe.runtime.contract.config import RuntimeConfig
from elasticmoe.runtime.errors import ElasticMoEError

pytestmark = pytest.mark.vllm

ARENA_BYTES = 2**26
REFUSED = [
    ("--pipeline-parallel-size", "parallel_config.pipeline_parallel_size", 2),
    ("--data-parallel-size", "parallel_config.data_parallel_size", 2),
    ("--enable-expert-parallel", "parallel_config.enable_expert_parallel", True),
    ("--enable-eplb", "parallel_config.enable_eplb", True),
    ("--decode-context-parallel-size", "parallel_config.decode_context_parallel_size", 2),
    ("--prefill-context-parallel-size", "parallel_config.prefill_context_parallel_size", 2),
    ("--enable-dbo", "parallel_config.enable_dbo", True),
    ("--ubatch-size", "parallel_config.ubatch_size", 2),
    ("--enable-lora", "lora_config", SimpleNamespace()),
    ("--quantization", "model_config.quantization", "fp8"),
    ("--kv-cache-dtype", "cache_config.cache_dtype", "fp8"),
    ("--speculative-config", "speculative_config", SimpleNamespace(method="eagle")),
    ("--kv-transfer-config", "kv_transfer_config", SimpleNamespace()),
    ("--kv-offloading-size", "cache_config.kv_offloading_size", 1.0),
    ("--enable-sleep-mode", "model_config.enable_sleep_mode", True),
    ("--enable-return-routed-experts", "model_config.enable_return_routed_experts", True),
    ("--moe-backend", "kernel_config.moe_backend", "triton"),
    ("--cpu-offload-gb", "offload_config.uva.cpu_offload_gb", 1.0),
    ("--offload-group-size", "offload_config.prefetch.offload_group_size", 1),
    ("--num-gpu-blocks-override", "cache_config.num_gpu_blocks_override", 10),
    ("--kv-cache-memory-bytes", "cache_config.kv_cache_memory_bytes", ARENA_BYTES + 1),
    ("--scheduler-cls", "scheduler_config.scheduler_cls", "some.other.Scheduler"),
    ("--worker-cls", "parallel_config.worker_cls", "some.other.Worker"),
]


@pytest.fixture(scope="module")
def served(tiny: Path) -> Any:
    """Return vLLM's configuration of an engine that is served."""
    from vllm.engine.arg_utils import EngineArgs

    own = {"elasticmoe": {"arena_bytes": ARENA_BYTES}}
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True}
    return EngineArgs(model=str(tiny), additional_config=own, **flags).create_engine_config()


def test_the_document_lists_what_is_refused() -> None:
    """The first column of the flags' table names each refused flag and no other."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    table = text.split("## Flags")[1].split("\n\n")[0]
    first_column = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert set(re.findall(r"--[a-z][a-z-]+", first_column)) == {flag for flag, _, _ in REFUSED}


@pytest.mark.parametrize(("flag", "attribute", "value"), REFUSED)
def test_each_is_refused_by_name(
    served: Any, monkeypatch: pytest.MonkeyPatch, flag: str, attribute: str, value: object
) -> None:
    """What the flag sets in vLLM's configuration is refused in one line that names the flag; without it nothing is."""
    from elasticmoe.runtime.engine import setup

    config = RuntimeConfig(arena_bytes=ARENA_BYTES)
    setup.prepare(served, config)
    *parts, name = attribute.split(".")
    monkeypatch.setattr(reduce(getattr, parts, served), name, value)
    with pytest.raises(ElasticMoEError) as refused:
        setup.prepare(served, config)
    assert flag in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fetches_by_a_device_that_cannot_are_refused(served: Any) -> None:
    """On a CPU `fetch: device` is refused by name; left out, the host drives, eagerly."""
    from elasticmoe.runtime.engine import setup

    with pytest.raises(ElasticMoEError, match="fetch: device needs an NVIDIA GPU, this is cpu; use host"):
        setup.prepare(served, RuntimeConfig(arena_bytes=ARENA_BYTES, fetch="device"))
    assert setup.fetch_kind(RuntimeConfig(arena_bytes=ARENA_BYTES)) == "host"
    with pytest.raises(ElasticMoEError, match="lookahead: the host fetches what is routed to"):
        setup.prepare(served, RuntimeConfig(arena_bytes=ARENA_BYTES, lookahead=1))


def test_the_host_drives_fetches_as_if_eager_steps_were_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that vLLM derives from --enforce-eager follows, such as its own kernels in place of what a compiler fuses."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)  # it would have the same effect by itself
    flags: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True}
    own = {"elasticmoe": {"arena_bytes": ARENA_BYTES}}
    ours = EngineArgs(model=str(tiny), additional_config=own, **flags).create_engine_config()
    eager = EngineArgs(model=str(tiny), enforce_eager=True, **flags).create_engine_config()
    stock = EngineArgs(model=str(tiny), **flags).create_engine_config()
    parts = ("custom_ops", "mode", "cudagraph_mode", "ir_enable_torch_wrap", "cudagraph_capture_sizes")
    for part in parts:
        assert getattr(ours.compilation_config, part) == getattr(eager.compilation_config, part), part
    assert stock.compilation_config.custom_ops != eager.compilation_config.custom_ops
    assert ours.model_config.enforce_eager


def test_every_batch_is_warmed_where_no_graph_is_captured(served: Any) -> None:
    """From one token on, and no more than a step may have."""
    from elasticmoe.runtime.engine import setup

    sizes = setup.warm_sizes(served)
    assert sizes[0] == 1
    assert sizes[-1] <= served.scheduler_config.max_num_batched_tokens
