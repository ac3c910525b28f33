"""What a pool holds: model, revision, dtype, slice and layout, and the digest that tells two pools apart.

Coordinator and workers compare these before a pool changes hands. Never reads or maps anything.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.hostpool.layout import HostLayout

LAYOUT_VERSION: Final = 1
"""Changes with the order of matrices in the pool."""
ITEMSIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one weight for each dtype that a pool can have."""
_NAME_DIGITS: Final = 40


@dataclass(frozen=True, slots=True)
class PoolId:
    """Which experts, in which form; two pools of the same id are the same bytes."""

    model: str
    revision: str
    dtype: str
    tensor_parallel: int
    rank: int
    """Which of the `tensor_parallel` slices."""
    layout_version: int = LAYOUT_VERSION

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all fields, in hex."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def memory_name(self) -> str:
        """Return the name that the kernel keeps with the pool's memory, so that a descriptor says what it is."""
        return f"elasticmoe-{self.digest[:_NAME_DIGITS]}"

    def differences(self, other: "PoolId") -> list[str]:
        """Return one phrase for each field that differs: its name, ours, theirs."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name} {ours[name]!r}, not {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A pool's id and where its matrices lie; travels with the descriptor."""

    pool: PoolId
    layout: HostLayout


def plan_manifest(pool: PoolId, shape: ModelShape) -> Manifest:
    """Return the manifest of the pool with that id; raises ConfigError for a dtype or slice that can't be."""
    if pool.dtype not in ITEMSIZES:
        message = f"a pool's dtype is one of {', '.join(ITEMSIZES)}, not {pool.dtype!r}; serve with --dtype"
        raise ConfigError(message)
    if not 0 <= pool.rank < pool.tensor_parallel or shape.intermediate_size % pool.tensor_parallel:
        message = (
            f"slice {pool.rank} of {pool.tensor_parallel} of experts with {shape.intermediate_size} rows can't be; "
            "use a tensor parallel size that divides the rows"
        )
        raise ConfigError(message)
    layout = HostLayout(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        rows=shape.intermediate_size // pool.tensor_parallel,
        cols=shape.hidden_size,
        itemsize=ITEMSIZES[pool.dtype],
    )
    return Manifest(pool, layout)
