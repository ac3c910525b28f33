"""What an engine can measure of its own steps: all that a policy may learn from.

Filled by the engine from its own clocks and by the simulator from the same quantities, at the same pace: one sample
whenever the worker's counts arrive (every 16 steps while busy; at first after 1, 2, 4 and 8). It goes to
`Adjuster.learn` before the next step is planned. Under asynchronous scheduling it arrives a step late, so it carries
its own batch sizes and is never matched with what runs now.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSample:
    """Sums over `num_steps` consecutive steps of a busy engine that computed tokens; idle time is not in it."""

    num_steps: int
    duration_s: float
    """Wall time of these steps, from output to output, whatever they waited for."""
    num_tokens: int
    """Tokens computed, of prompts and of answers, padding excluded."""
    num_requests: int
    """Requests in the batch, summed over the steps."""
    num_prompt_steps: int
    """Steps that computed prompt tokens (recomputed ones included)."""
    num_prompt_tokens: int
    num_new_tokens: int
    """Tokens of answers that came out."""
    num_missed: int
    """Experts that were routed to and absent, fetched then or ahead, counted once a layer and step."""
    exposed_s: float
    """Seconds that compute waited for those fetches: at most duration_s."""
    copied_bytes: int
    """Bytes copied to the GPU whose time was measured, on one rank, for whatever reason (the start included)."""
    copy_s: float
    """Seconds that those copies took by their own clock; 0 with copied_bytes 0 where nothing was measured."""
    num_preempted: int
    """Requests that were preempted in these steps."""
    num_started: int = 0
    """Requests whose prompts these steps began to compute, once more after a preemption."""
    answers: tuple[int, ...] = ()
    """Tokens of each answer that ended."""
