"""The systems of the serving matrix: stock vLLM and its offloaders, ours, and ours with parts left out.

`start_engine` starts one in this process. Workers are patched by their extension, the rest here before vLLM starts.
"""

import os
import shutil
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.serving.model_config import read_model_config
from bench.serving_gpu import ENVIRONMENT
from elasticmoe.runtime.simulator.served import find_dtype

GIB = 2**30
OFFLOADED = 10
"""Experts a layer whose bytes stock's own offloaders may free, as ours may by default."""
SPARE_GIB = 2.0
"""An offloader frees whole matrices or layers: KV for what it may free beyond its goal."""


@dataclass(frozen=True, slots=True)
class System:
    """What makes one system."""

    is_elastic: bool = False
    is_eager: bool = False
    policy: str | None = None
    """None: as the command line says."""
    fetch: str | None = None
    """None: as the runtime chooses, which is the device where there is a GPU."""
    has_own_kernel: bool = True
    lookahead: int = 0
    is_resident: bool = False
    """Whether experts never leave the device: the replay."""


EAGER = System(is_elastic=True, is_eager=True, fetch="host")
"""Ours as it was before fetches were driven by the device."""
SYSTEMS = {
    "stock-graphs": System(),
    "stock-eager": System(is_eager=True),
    "uva": System(),
    "prefetch": System(),
    "ours": System(is_elastic=True),
    "ours-lookahead": System(is_elastic=True, lookahead=1),
    "ours-eager": System(is_elastic=True, is_eager=True),
    "replay": System(is_elastic=True, is_resident=True),
    "ablation-fixed": replace(EAGER, policy="fixed", has_own_kernel=False),
    "ablation-pool": replace(EAGER, policy="threshold", has_own_kernel=False),
    "ablation-adjuster": replace(EAGER, policy="goodput", has_own_kernel=False),
    "ablation-kernel": replace(EAGER, policy="goodput"),
}


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model's config that decide about bytes; `experts_bytes` is of one rank."""

    num_layers: int
    num_experts: int
    vocab: int
    dtype: str
    experts_bytes: int

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one layer's routed experts."""
        return self.experts_bytes // self.num_layers


def read_model(config: Path, tp: int = 1) -> Model:
    """Return the sizes in a config.json."""
    text, served = read_model_config(config)
    num_experts, experts_bytes = served.shape.num_experts, served.all_expert_bytes // tp
    return Model(text["num_hidden_layers"], num_experts, text["vocab_size"], str(find_dtype(text)), experts_bytes)


def goal_bytes(model: Model) -> int:
    """Return the bytes of OFFLOADED experts of every layer."""
    return model.experts_bytes * OFFLOADED // model.num_experts


def prefetch_group(model: Model) -> tuple[int, int]:
    """Return the group size of vLLM's prefetch offloader, and the layers it frees net of the one that is its buffer."""
    wanted = -(-goal_bytes(model) // model.layer_bytes) + 1
    group = max(model.num_layers // wanted, 2)
    return group, model.num_layers // group - 1


def offload_flags(name: str, model: Model) -> dict[str, Any]:
    """Return the flags of stock's own offloaders."""
    if name == "uva":
        return {"cpu_offload_gb": goal_bytes(model) / GIB}
    if name == "prefetch":
        params = {"w13_weight", "w2_weight"}
        return {"offload_group_size": prefetch_group(model)[0], "offload_prefetch_step": 1, "offload_params": params}
    return {}


def freed_bytes(name: str, model: Model) -> int:
    """Return the bytes that stock's own offloader has freed on this engine's device, for KV to have."""
    if name == "prefetch":
        return prefetch_group(model)[1] * model.layer_bytes
    if name == "uva":
        from vllm.model_executor.offloader.base import get_offloader

        return int(get_offloader().cpu_offload_bytes)
    return 0


def memory_flags(args: Namespace, system: System, model: Model) -> dict[str, Any]:
    """Return the flags that give both sides the same bytes, for the largest room."""
    room = int(args.max_kv_gib * GIB)
    if not system.is_elastic:
        spare = goal_bytes(model) + int(SPARE_GIB * GIB) if args.system in ("uva", "prefetch") else 0
        return {"kv_cache_memory_bytes": room + spare}
    ours: dict[str, Any] = {"arena_bytes": room + model.experts_bytes, "policy": system.policy or args.policy}
    ours["lookahead"] = system.lookahead
    fetch = args.fetch or system.fetch
    return {"additional_config": {"elasticmoe": ours | ({"fetch": fetch} if fetch else {})}}


def start_engine(args: Namespace, model: Model) -> tuple[Any, float]:
    """Return vLLM's LLM in this process, and the seconds until it was ready."""
    os.environ.update(ENVIRONMENT)
    if args.limit is not None:
        os.environ["ELASTICMOE_LIMIT"] = str(args.limit)
    from vllm import LLM

    system = SYSTEMS[args.system]
    _install(args, system)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(args.model, Path(folder) / "config.json")
        start_s = time.perf_counter()
        llm = LLM(
            model=folder,
            dtype=model.dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=system.is_eager or args.eager,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            enable_prefix_caching=False,
            async_scheduling=True,
            block_size=16,
            tensor_parallel_size=args.tp,
            worker_extension_cls="bench.matrix.worker_extension.WorkerExtension",
            **memory_flags(args, system, model),
            **offload_flags(args.system, model),
        )
        return llm, time.perf_counter() - start_s


def _install(args: Namespace, system: System) -> None:
    if system.is_elastic and not system.has_own_kernel:
        from bench.serving_gpu import use_vllm_kernel

        use_vllm_kernel()
    if system.is_resident:
        from bench.serving.resident import keep_all_resident

        keep_all_resident()
    if args.bus_gb_s is not None:
        from bench.matrix.throttle import throttle

        throttle(args.bus_gb_s)
