"""Sizes of the tiers for real models, and the arithmetic of ids and offsets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticmoe.runtime.errors import ConfigError
from elasticmoe.runtime.pages.tiers import ALIGN_BYTES, MAX_WASTE, Tiers, fit_tiers
from elasticmoe.runtime.units import BlockId, HugeId, PageId

MIB = 2**20

MODELS = {  # name: (E, S as vLLM uses it, k, m, S padded)
    "Qwen3-30B-A3B": (3 * MIB, 3 * MIB // 2, 1, 2, 3 * MIB // 2),
    "Qwen1.5-MoE-A2.7B": (11 * MIB // 2, 3 * MIB, 6, 11, 3 * MIB),
    "Qwen3-235B-A22B": (12 * MIB, 94 * 32 * 1024, 12, 49, 3_084_288),
    "DeepSeek-V3, 64-token blocks": (28 * MIB, 61 * 64 * 1152, 2, 13, 4_517_888),
    "a hybrid, S > E": (MIB, 4 * MIB, 4, 1, 4 * MIB),
    "a hybrid, E doesn't divide S": (2 * MIB, 5 * MIB, 5, 2, 5 * MIB),
    "one block is one page": (64, 64, 1, 1, 64),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_of_known_models(name: str) -> None:
    """The smallest huge page that wastes at most 1 % is taken, S padded a little where it must be."""
    expert_bytes, block_bytes, k, m, padded = MODELS[name]
    assert fit_tiers(expert_bytes, block_bytes) == Tiers(expert_bytes, padded, block_bytes, k, m)


def test_no_padding_where_sizes_divide() -> None:
    """Where k * E = m * S nothing is wasted, and a page offset is a multiple of E itself."""
    tiers = fit_tiers(11 * MIB // 2, 3 * MIB)
    assert (tiers.waste, tiers.huge_bytes, tiers.granule_bytes) == (0.0, 33 * MIB, 11 * MIB // 2)


def test_the_waste_is_padding_over_size() -> None:
    """Qwen3-235B: 49 blocks padded from 3,080,192 bytes to 3,084,288 waste 0.13 % of a huge page as KV."""
    assert fit_tiers(12 * MIB, 94 * 32 * 1024).waste == pytest.approx(1 - 3_080_192 / 3_084_288)


def test_where_nothing_fits_well_the_least_waste_is_taken() -> None:
    """Huge pages stay within 256 MiB: if none of them wastes as little as 1 %, the one that wastes least is taken."""
    tiers = fit_tiers(200 * MIB, 150 * MIB)
    assert (tiers.pages_per_huge, tiers.blocks_per_huge) == (1, 1)
    assert tiers.waste == pytest.approx(0.25)
    assert fit_tiers(90 * MIB, 50 * MIB).pages_per_huge == 2  # 3 blocks of 60 MiB waste less than 1 of 90


@pytest.mark.parametrize(
    ("expert_bytes", "block_bytes", "what"),
    [(0, 64, "an expert matrix"), (-16, 64, "an expert matrix"), (64, 24, "a KV block"), (64, 0, "a KV block")],
)
def test_sizes_that_vector_loads_cannot_take_are_refused(expert_bytes: int, block_bytes: int, what: str) -> None:
    """A size that is not a positive multiple of 16 bytes is refused by name."""
    with pytest.raises(ConfigError, match=f"{what} must be a multiple of 16 bytes"):
        fit_tiers(expert_bytes, block_bytes)


sizes = st.integers(1, 4096).map(lambda n: n * ALIGN_BYTES)


@given(expert_bytes=sizes, block_bytes=sizes)
def test_blocks_cover_the_expert_pages_of_a_huge_page(expert_bytes: int, block_bytes: int) -> None:
    """For any sizes: k * E <= H = m * S, S holds what vLLM asked for, all strides are aligned."""
    tiers = fit_tiers(expert_bytes, block_bytes)
    assert tiers.pages_per_huge * tiers.expert_bytes <= tiers.huge_bytes
    assert tiers.huge_bytes == tiers.blocks_per_huge * tiers.block_bytes
    assert tiers.block_bytes >= tiers.raw_block_bytes == block_bytes
    assert tiers.block_bytes % ALIGN_BYTES == 0
    smaller = range(-(-block_bytes // expert_bytes), tiers.pages_per_huge)
    assert all(k * expert_bytes % block_bytes for k in smaller), "a smaller huge page would have fitted exactly"


@given(expert_bytes=sizes, block_bytes=sizes, num_huge=st.integers(1, 4))
def test_page_offsets_never_overlap(expert_bytes: int, block_bytes: int, num_huge: int) -> None:
    """Pages lie one after the other inside their own huge page, at multiples of the granule, and so do blocks."""
    tiers = fit_tiers(expert_bytes, block_bytes)
    end = 0
    for huge in map(HugeId, range(num_huge)):
        for page in map(PageId, tiers.pages_of(huge)):
            offset = tiers.page_offset(page)
            assert tiers.huge_of_page(page) == huge
            assert offset % tiers.granule_bytes == 0
            assert offset >= end
            end = offset + tiers.expert_bytes
        assert huge * tiers.huge_bytes <= tiers.page_offset(PageId(tiers.pages_of(huge)[0]))
        assert end <= (huge + 1) * tiers.huge_bytes
        blocks = [BlockId(b) for b in tiers.blocks_of(huge)]
        assert {tiers.huge_of_block(b) for b in blocks} == {huge}
        assert blocks[0] * tiers.block_bytes == huge * tiers.huge_bytes


def test_the_offsets_of_qwen_1_5() -> None:
    """Page 7 is the second of huge page 1: 33 MiB + 5.5 MiB; block 12 is the second of the same huge page."""
    tiers = fit_tiers(11 * MIB // 2, 3 * MIB)
    assert tiers.page_offset(PageId(7)) == 33 * MIB + 11 * MIB // 2
    assert tiers.huge_of_page(PageId(7)) == tiers.huge_of_block(BlockId(12)) == 1
    assert list(tiers.pages_of(HugeId(1))) == [6, 7, 8, 9, 10, 11]
    assert list(tiers.blocks_of(HugeId(1))) == list(range(11, 22))


def test_the_waste_bound_of_the_design() -> None:
    """Padding is at most 1 % for every model of the table."""
    assert all(fit_tiers(e, s).waste <= MAX_WASTE for e, s, *_ in MODELS.values())
