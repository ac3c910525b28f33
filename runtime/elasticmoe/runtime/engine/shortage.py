"""By how many blocks one call of vLLM's `allocate_slots` falls short: its own two checks, worked out again.

Called by the scheduler after such a call failed; changes nothing.
"""

import inspect
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Allocation:
    """The arguments of `allocate_slots` that its checks read, by vLLM's names."""

    request: Request
    num_new_tokens: int
    num_new_computed_tokens: int
    new_computed_blocks: KVCacheBlocks | None
    num_lookahead_tokens: int
    num_external_computed_tokens: int
    num_encoder_tokens: int
    full_sequence_must_fit: bool
    reserved_blocks: int
    has_scheduled_reqs: bool

    @classmethod
    def of(cls, signature: inspect.Signature, *args: Any, **kwargs: Any) -> "Allocation":
        """Return the arguments of one call, defaults filled in."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(**{field.name: bound.arguments[field.name] for field in fields(cls)})

    @property
    def local_tokens(self) -> int:
        """Return the tokens that are computed here, prefix hits included."""
        return int(self.request.num_computed_tokens) + self.num_new_computed_tokens

    @property
    def is_admission(self) -> bool:
        """Return whether the request does not run yet."""
        return self.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def short_blocks(manager: KVCacheManager, call: Allocation) -> int:
    """Return the blocks that the call lacks, by the larger of its two checks; 0 or less if it lacks none."""
    total = min(call.local_tokens + call.num_external_computed_tokens, manager.max_model_len)
    main = total + call.num_new_tokens
    slots = min(main + call.num_lookahead_tokens, manager.max_model_len)
    wanted = _needed_blocks(manager, call, total, (slots, main)) + call.reserved_blocks
    if call.full_sequence_must_fit:
        full = min(call.request.num_tokens, manager.max_model_len)
        wanted = max(wanted, _needed_blocks(manager, call, total, (full, full), apply_admission_cap=True))
    watermark = manager.watermark_blocks if call.has_scheduled_reqs and call.is_admission else 0
    return wanted + int(watermark) - int(manager.block_pool.get_num_free_blocks())


def _needed_blocks(
    manager: KVCacheManager, call: Allocation, total: int, tokens: tuple[int, int], *, apply_admission_cap: bool = False
) -> int:
    """Return the blocks to add for `tokens`: with lookahead, and for the main model alone."""
    blocks = call.new_computed_blocks or manager.empty_kv_cache_blocks
    num_tokens, num_tokens_main_model = tokens
    return int(
        manager.coordinator.get_num_blocks_to_allocate(
            request_id=call.request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=call.num_encoder_tokens,
            total_computed_tokens=total,
            num_local_computed_tokens=call.local_tokens,
            num_tokens_main_model=num_tokens_main_model,
            apply_admission_cap=apply_admission_cap,
        )
    )
