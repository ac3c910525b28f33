"""Smaller rooms for KV in one engine: blocks are withdrawn before a cell and given back after it.

Of an elastic pool whole huge pages are withdrawn, so that none is trapped, and its policy does not see them.
"""

import time
from dataclasses import replace
from itertools import groupby
from typing import Any

from bench.serving.errors import BadScenario
from elasticmoe.runtime.adjuster.adjuster import Adjuster
from elasticmoe.runtime.adjuster.snapshot import Snapshot

SETTLE_S = 120.0


class Room:
    """Holds blocks of one scheduler's pool."""

    def __init__(self, scheduler: Any) -> None:
        """Hold nothing yet."""
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self.adjuster: Adjuster | None = getattr(scheduler, "adjuster", None)
        self.held: list[Any] = []
        if self.adjuster is not None:
            _hide(self)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all layers, on one rank."""
        if self.adjuster is not None:
            return self.adjuster.geometry.tiers.block_bytes
        config = self._scheduler.kv_cache_config
        return int(sum(tensor.size for tensor in config.kv_cache_tensors)) // int(config.num_blocks)

    @property
    def most_blocks(self) -> int:
        """Return the blocks of KV, vLLM's null block included, that the engine has with every expert resident."""
        if self.adjuster is None:
            return int(self._pool.num_gpu_blocks)
        geometry = self.adjuster.geometry
        return geometry.num_blocks - geometry.num_huge(0) * geometry.tiers.blocks_per_huge

    def leave(self, num_bytes: int) -> int:
        """Withdraw blocks until `num_bytes` are left for KV; returns how many blocks those are, the null block too."""
        self.give_back()
        wanted = num_bytes // self.block_bytes
        if not 1 < wanted <= self.most_blocks:
            message = f"wanted a room of {wanted} blocks, the engine has {self.most_blocks}: raise --max-kv-gib"
            raise BadScenario(message)
        num = self.most_blocks - wanted
        if self.adjuster is not None:
            self.held = self._take_huge(num)
        self.held += self._pool.get_new_blocks(num - len(self.held))
        return wanted

    def give_back(self) -> None:
        """Give every withdrawn block back."""
        held, self.held = self.held, []
        self._pool.free_blocks(held)

    def settle(self, core: Any) -> bool:
        """Take idle steps until the engine wants no more and none is under way; returns whether all is resident then.

        Gives up after SETTLE_S.
        """
        stop_s = time.perf_counter() + SETTLE_S
        while (self._scheduler.has_requests() or core.batch_queue) and time.perf_counter() < stop_s:
            core.step_fn()
        if self.adjuster is None:
            return True
        return self.num_resident == self.adjuster.geometry.num_layers * self.adjuster.geometry.num_experts

    @property
    def num_resident(self) -> int | None:
        """Return the experts on the device; None where all always are."""
        return None if self.adjuster is None else self.adjuster.table.num_resident

    def _take_huge(self, num: int) -> list[Any]:
        """Take blocks of wholly free huge pages, the last ones of the arena first, at most `num` blocks."""
        assert self.adjuster is not None, "huge pages of a pool that has none"
        pages, tiers = self.adjuster.table.pool, self.adjuster.geometry.tiers
        plain = sorted(pages.pick_plain(pages.num_free_blocks, None), reverse=True)
        whole = [b for b in (list(group) for _, group in groupby(plain, tiers.huge_of_block)) if _is_whole(b, tiers)]
        ids = [block for blocks in whole[: num // tiers.blocks_per_huge] for block in blocks]
        taken = [self._pool.blocks[block] for block in ids]
        for block in taken:
            self._pool.free_block_queue.remove(block)
            block.ref_cnt += 1
        return taken


def _is_whole(blocks: list[Any], tiers: Any) -> bool:
    return len(blocks) == int(tiers.blocks_per_huge)


def _hide(room: Room) -> None:
    """Have the policy see the pages that requests hold without the withdrawn ones."""
    stock = Adjuster.snapshot

    def snapshot(self: Adjuster, *args: Any, **kwargs: Any) -> Snapshot:
        snap = stock(self, *args, **kwargs)
        tiers = self.geometry.tiers
        return replace(snap, kv_pages=snap.kv_pages - len(room.held) * tiers.block_bytes / tiers.expert_bytes)

    Adjuster.snapshot = snapshot  # type: ignore[method-assign]
