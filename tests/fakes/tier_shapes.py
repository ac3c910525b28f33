"""Page sizes small enough to try every corner of: the ratios of real models, and odd ones."""

from elasticmoe.runtime.pages.tiers import Tiers, fit_tiers

TIER_SHAPES: tuple[Tiers, ...] = (
    fit_tiers(64, 32),  # k = 1, m = 2: Qwen3-30B-A3B
    fit_tiers(64, 64),  # k = 1, m = 1
    fit_tiers(176, 96),  # k = 6, m = 11: Qwen1.5-MoE-A2.7B
    fit_tiers(64, 256),  # k = 4, m = 1: a hybrid, S > E
    fit_tiers(64, 160),  # k = 5, m = 2: a hybrid whose blocks end inside a page
    Tiers(expert_bytes=96, block_bytes=80, raw_block_bytes=64, pages_per_huge=2, blocks_per_huge=3),  # padded both ways
    Tiers(expert_bytes=112, block_bytes=48, raw_block_bytes=48, pages_per_huge=3, blocks_per_huge=7),  # k = 3, m = 7
)
