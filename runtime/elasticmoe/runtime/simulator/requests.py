"""A request as it arrives, and as the simulated scheduler keeps it."""

from dataclasses import dataclass, field

from elasticmoe.runtime.units import BlockId


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request comes, and how many tokens it brings and asks for."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """One request's progress; `blocks` hold its KV. Two requests are never the same, however alike."""

    arrival: Arrival
    group: int
    """Whose routing it follows."""
    num_tokens: int
    """Prompt and generated tokens."""
    computed: int = 0
    """Tokens whose KV is there."""
    capacity: int = 0
    """Tokens that its blocks hold."""
    blocks: list[BlockId] = field(default_factory=list)
    first_token_s: float = -1.0
    """Below 0: none yet."""
    finished_s: float = -1.0

    @property
    def generated(self) -> int:
        """Return the tokens generated so far."""
        return self.num_tokens - self.arrival.prompt_tokens

    @property
    def is_done(self) -> bool:
        """Return whether all its tokens are there."""
        return self.generated >= self.arrival.output_tokens
