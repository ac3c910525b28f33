"""How many experts leave at start, and the arena below which nothing fits."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticmoe.runtime.errors import PoolTooSmallError
from elasticmoe.runtime.pages.placement import SLACK_EXPERTS, Geometry
from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers

SHAPES = [(64, 32), (64, 64), (176, 96), (64, 256), (96, 80), (64, 160)]

# k = 1, m = 2; 4 layers of 16 experts, so 192 pages, 2 buffers; a request of 10 blocks
SMALL = Geometry(fit_tiers(64, 32), 0, num_layers=4, num_experts=16, loading_depth=2, request_blocks=10)


def with_room(num_pages: int) -> Geometry:
    """Return SMALL with room for exactly so many expert pages beside a request and the null block."""
    return replace(SMALL, num_blocks=2 * num_pages + 11)


geometries = st.builds(
    Geometry,
    tiers=st.sampled_from(SHAPES).map(lambda sizes: fit_tiers(*sizes)),
    num_blocks=st.integers(1, 400),
    num_layers=st.integers(1, 6),
    num_experts=st.integers(1, 12),
    loading_depth=st.integers(1, 3),
    request_blocks=st.integers(1, 30),
)


def test_everything_stays_where_everything_fits() -> None:
    """With room for all 192 pages nothing is offloaded and no loading buffer is needed."""
    assert with_room(192).least_offload() == 0
    assert SMALL.num_pages(0) == 192


@pytest.mark.parametrize(("room", "least"), [(191, 1), (186, 1), (185, 2), (180, 2), (96, 16)])
def test_an_offloaded_expert_a_layer_frees_what_slots_leave(room: int, least: int) -> None:
    """One more in each of 4 layers frees 12 pages and costs 6 for a slot in each of 2 buffers."""
    assert with_room(room).least_offload() == least


def test_a_request_of_the_maximum_length_always_keeps_its_blocks() -> None:
    """What experts could hold leaves the null block and one request."""
    geometry = with_room(100)
    assert geometry.num_lendable == 100
    assert replace(geometry, request_blocks=11).num_lendable == 99


def test_huge_page_0_is_never_lendable() -> None:
    """A short request doesn't make the huge page of the null block lendable."""
    assert Geometry(fit_tiers(176, 96), 22, 1, 1, 1, request_blocks=1).num_lendable == 1


@given(geometry=geometries)
def test_the_least_that_fits_is_the_first_that_fits(geometry: Geometry) -> None:
    """least_offload agrees with trying 0, 1, 2, … one after the other."""
    fits = [n for n in range(geometry.num_experts + 1) if geometry.num_huge(n) <= geometry.num_lendable]
    if fits:
        assert geometry.least_offload() == fits[0]
    else:
        with pytest.raises(PoolTooSmallError):
            geometry.least_offload()


@given(geometry=geometries)
def test_the_need_that_the_error_states_is_exact(geometry: Geometry) -> None:
    """The arena that the error asks for is enough, and one byte or one block less is not."""
    tiny = replace(geometry, num_blocks=1)
    with pytest.raises(PoolTooSmallError) as error:
        tiny.least_offload()
    stated = re.search(r"at least (\d+) bytes", str(error.value))
    assert stated
    needed = int(stated[1])
    block_bytes = geometry.tiers.block_bytes
    assert replace(geometry, num_blocks=needed // block_bytes).least_offload() <= geometry.num_experts
    for less in ((needed - 1) // block_bytes, needed // block_bytes - 1):
        with pytest.raises(PoolTooSmallError):
            replace(geometry, num_blocks=less).least_offload()


def test_the_error_says_what_was_needed_and_what_there_was() -> None:
    """Numbers of both, and what to change."""
    with pytest.raises(PoolTooSmallError) as error:
        with_room(95).least_offload()
    assert str(error.value) == (
        "arena_bytes: the pool needs at least 6496 bytes (0.01 MiB for the experts of one layer per loading buffer, "
        "0.00 MiB for one request of the maximum length), there are 6432 (0.01 MiB); raise arena_bytes or lower "
        "--max-model-len"
    )


def test_the_start_leaves_headroom_if_it_can() -> None:
    """9 pages of headroom are worth 2 more experts a layer; where only the bare least fits, there is none."""
    assert (with_room(186).least_offload(), with_room(186).start_offload(9)) == (1, 3)
    assert with_room(96).start_offload(9) == 16


def test_a_pool_too_small_for_the_least_is_refused_at_start_too() -> None:
    """No headroom is no excuse."""
    with pytest.raises(PoolTooSmallError):
        with_room(95).start_offload(9)


@pytest.mark.parametrize(
    ("requested", "effective"), [(None, 2 + SLACK_EXPERTS), (0, 2), (2, 2), (5, 5), (16, 16), (99, 16)]
)
def test_the_effective_limit(requested: int | None, effective: int) -> None:
    """The requested limit, but never less than must leave nor more than there are; default: the least + 10."""
    assert with_room(185).effective_limit(requested) == effective


def test_the_default_limit_stays_within_the_layer() -> None:
    """Least + 10 is cut to the number of experts."""
    assert with_room(130).effective_limit(None) == 16


def test_kept_blocks_are_those_of_the_limit() -> None:
    """With every layer at the limit 4 · 12 residents and 2 · 4 slots keep 168 pages, so 336 blocks."""
    assert with_room(192).num_kept_blocks(4) == 336


def test_the_arena_is_its_blocks() -> None:
    """Bytes are blocks times S, padding included."""
    tiers = Tiers(expert_bytes=96, block_bytes=80, raw_block_bytes=64, pages_per_huge=2, blocks_per_huge=3)
    assert Geometry(tiers, 7, 1, 1, 1, 1).arena_bytes == 560
