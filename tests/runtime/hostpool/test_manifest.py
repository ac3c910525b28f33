"""Which pool is which."""

from dataclasses import replace

import pytest

from elasticmoe.runtime.contract.model import ModelShape
from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.hostpool.layout import HostLayout
from elasticmoe.runtime.hostpool.manifest import PoolId, plan_manifest

SHAPE = ModelShape(moe_layers=(0, 2), num_experts=4, top_k=2, hidden_size=16, intermediate_size=12)
POOL = PoolId("a-model", "main", "bfloat16", tensor_parallel=2, rank=1)


def test_every_field_changes_the_digest() -> None:
    """Model, revision, dtype, slice and layout version: another value is another pool, the same is the same."""
    others = [
        replace(POOL, model="b"),
        replace(POOL, revision="b"),
        replace(POOL, dtype="float32"),
        replace(POOL, tensor_parallel=4),
        replace(POOL, rank=0),
        replace(POOL, layout_version=2),
    ]
    assert len({pool.digest for pool in (POOL, *others)}) == 7
    assert replace(POOL).digest == POOL.digest
    assert len({pool.memory_name for pool in (POOL, *others)}) == 7


def test_the_memorys_name_fits_a_memfd() -> None:
    """The kernel takes names of up to 249 bytes."""
    assert len(replace(POOL, model="m" * 4000).memory_name) < 249


def test_differences_name_field_and_both_values() -> None:
    """One phrase for each field, none for equal ids."""
    assert POOL.differences(POOL) == []
    assert POOL.differences(replace(POOL, model="b", rank=0)) == ["model 'a-model', not 'b'", "rank 1, not 0"]


def test_a_slice_has_its_share_of_the_rows() -> None:
    """Tensor parallelism splits f alone."""
    manifest = plan_manifest(POOL, SHAPE)
    assert manifest.pool == POOL
    assert manifest.layout == HostLayout(num_layers=2, num_experts=4, rows=6, cols=16, itemsize=2)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (replace(POOL, dtype="int8"), r"dtype is one of float32, bfloat16, float16, not 'int8'"),
        (replace(POOL, rank=2), r"slice 2 of 2 .*12 rows"),
        (replace(POOL, rank=-1), r"slice -1 of 2"),
        (replace(POOL, tensor_parallel=5), r"slice 1 of 5"),
        (replace(POOL, tensor_parallel=0, rank=0), r"slice 0 of 0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(pool: PoolId, message: str) -> None:
    """An unknown dtype, or a slice that the rows don't divide into, is named."""
    with pytest.raises(ConfigError, match=message):
        plan_manifest(pool, SHAPE)
