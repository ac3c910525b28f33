"""What the runtime says of its memory at start, in numbers that anyone can add up."""

from dataclasses import dataclass

from elasticmoe.runtime.units import mib


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """How one rank's arena is cut, at start."""

    arena_bytes: int
    expert_page_bytes: int
    block_bytes: int
    huge_page_bytes: int
    waste_ratio: float
    num_blocks: int
    num_experts: int
    """Routed experts of the model, over all layers."""
    num_resident: int
    loading_bytes: int
    host_pool_bytes: int
    is_pinned: bool

    def lines(self) -> list[str]:
        """Return the report as log lines."""
        pinned = "pinned" if self.is_pinned else "pageable"
        sizes = (
            f"{self.num_blocks} blocks of {self.block_bytes} bytes, expert pages of {self.expert_page_bytes}, "
            f"huge pages of {self.huge_page_bytes} (padding {self.waste_ratio:.2%})"
        )
        return [
            f"arena {mib(self.arena_bytes)}: {sizes}",
            f"{self.num_resident} of {self.num_experts} experts resident, loading buffers {mib(self.loading_bytes)}",
            f"host pool {mib(self.host_pool_bytes)}, {pinned}",
        ]
