"""A GPU as the simulator sees it: bandwidths, compute and fixed costs. Three are described here, more come from JSON.

The H200's shares of its limits are fitted to measured kernels and whole runs (docs/simulator.md); the others keep them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from elasticmoe.runtime.errors import ConfigError

ABOVE_0 = ("memory_bytes_s", "flops_s", "copy_bytes_s", "num_gpus", "link_bytes_s", "memory_share", "flops_share")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, or several of them as one tensor-parallel group; rates are per GPU."""

    name: str
    memory_bytes_s: float
    """Bandwidth of the GPU's own memory."""
    flops_s: float
    """bf16 with fp32 sums, dense."""
    copy_bytes_s: float
    """Host to device, as a copy kernel reaches it."""
    num_gpus: int = 1
    memory_gib: float = 0.0
    """Memory of one GPU; 0: nobody asks."""
    link_bytes_s: float = 4e11
    """Between the GPUs of the group, for all-reduce."""
    link_s: float = 2e-5
    """Latency of one all-reduce."""
    memory_share: float = 0.86
    """Of the memory bandwidth that a kernel reaches."""
    flops_share: float = 0.57
    """Of the compute that a grouped GEMM reaches."""
    layer_s: float = 4.5e-5
    """Per layer and step: what its kernels cost besides their bytes and FLOPs."""
    step_s: float = 1e-3
    """Per step: sampling, scheduling and what else stands between two forwards."""
    request_s: float = 1e-5
    """Per request of a step: its sampling and bookkeeping."""
    eager_launch_s: float = 8e-5
    """Per kernel without CUDA graphs: the host needs so long to launch it."""
    prompt_launch_s: float = 5e-5
    """Per kernel of a step that computes prompts: only steps that don't are one CUDA graph."""
    fetch_idle_s: float = 4e-6
    """Per layer of a step that may have to fetch: looking whether there is anything."""
    host_sync_s: float = 3.5e-4
    """Per layer of a step that may have to fetch, where the host drives it: it must see the routing first."""
    contention: float = 0.08
    """Of the time that copies and compute share, what it adds: bandwidth, and late experts as launches of their own."""

    def __post_init__(self) -> None:
        """Refuse what no step could be priced with."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ABOVE_0 and not 0 < value < math.inf:
                raise ConfigError(f"GPU {self.name}: {field.name} must be above 0, it is {value}")
            if field.name != "name" and not 0 <= value < math.inf:
                raise ConfigError(f"GPU {self.name}: {field.name} must be 0 or more, it is {value}")


H200 = Gpu("h200", memory_bytes_s=4.8e12, flops_s=7.9e14, copy_bytes_s=5.1e10, memory_gib=139.8)
RTX_5090 = Gpu("rtx5090", memory_bytes_s=1.792e12, flops_s=2.095e14, copy_bytes_s=5.0e10, memory_gib=31.4)
RTX_4090_X2 = Gpu(
    "rtx4090x2",
    memory_bytes_s=1.008e12,
    flops_s=1.652e14,
    copy_bytes_s=2.4e10,
    num_gpus=2,
    memory_gib=23.6,
    link_bytes_s=1.2e10,  # through the host: these cards have no peer access
    link_s=4e-5,
)
GPUS = {gpu.name: gpu for gpu in (H200, RTX_5090, RTX_4090_X2)}


def parse_gpu(document: Mapping[str, Any], source: str) -> Gpu:
    """Return the GPU that a JSON object describes; raises ConfigError that names what is missing or wrong."""
    known = {field.name for field in fields(Gpu)}
    unknown = sorted(set(document) - known)
    if unknown:
        raise ConfigError(f"{source}: unknown keys {', '.join(unknown)}; known ones are {', '.join(sorted(known))}")
    wrong = [key for key, value in document.items() if key != "name" and not _is_number(value)]
    if wrong:
        raise ConfigError(f"{source}: want numbers for {', '.join(wrong)}")
    if not isinstance(document.get("num_gpus", 1), int):
        raise ConfigError(f"{source}: want a whole number for num_gpus, it is {document['num_gpus']}")
    try:
        return Gpu(**document)
    except TypeError as error:
        needed = "name, memory_bytes_s, flops_s, copy_bytes_s"
        raise ConfigError(f"{source}: want at least {needed}; it has {', '.join(document) or 'nothing'}") from error


def find_gpu(name: str) -> Gpu:
    """Return a described GPU by its name, or the one that a JSON file of that path describes."""
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        choice = ", ".join(GPUS)
        raise ConfigError(f"GPU {name!r}: want one of {choice}, or a JSON file that describes one ({error})") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: want a JSON object that describes a GPU, it is a {type(document).__name__}")
    return parse_gpu(document, str(path))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
