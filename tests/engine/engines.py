"""Real engines of vLLM on the CPU, inside the test's process, one at a time."""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Tokens = list[list[int]]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Keeps vLLM's engine in this process, offline, on its first model runner; set before vLLM is imported."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts as token ids, and how many tokens each asks for."""

    prompts: Prompts
    max_tokens: list[int]


def draw_requests(num: int, seed: int = 0, vocab: int = 1000) -> Requests:
    """Return requests of 8 to 120 prompt tokens, a third of which share a prefix of four blocks."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, vocab) for _ in range(4 * BLOCK_SIZE)]

    def prompt(index: int) -> list[int]:
        own = [rng.randrange(3, vocab) for _ in range(rng.randint(8, 56))]
        return prefix + own if index % 3 == 0 else own * 2

    return Requests([prompt(n) for n in range(num)], [rng.randint(12, 48) for _ in range(num)])


class Engine:
    """One LLM of vLLM and what the tests look at."""

    def __init__(self, llm: Any) -> None:
        """Wrap a started LLM that runs in this process."""
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.preemptions = 0
        self.peak = 0
        self.prefix_hits = 0
        """Prompt tokens that were found in the prefix cache."""
        self.on_step: Callable[[int], None] = lambda _: None
        self._steps = 0
        self._watch()

    @property
    def adjuster(self) -> Any:
        """Return the adjuster of an elastic engine."""
        return self.scheduler.adjuster

    def generate(self, requests: Requests) -> Tokens:
        """Return each request's greedy tokens, all submitted at once."""
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False)
            for num in requests.max_tokens
        ]
        prompts = [{"prompt_token_ids": ids} for ids in requests.prompts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def idle(self) -> int:
        """Step an engine without requests until it wants no more steps; returns how many it took."""
        core, steps = self.llm.llm_engine.engine_core.engine_core, 0
        while self.scheduler.has_requests():
            core.step_fn()
            steps += 1
        return steps

    def _watch(self) -> None:
        stock = self.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            self.on_step(self._steps)
            output = stock(*args, **kwargs)
            self.preemptions += len(output.preempted_req_ids or ())
            self.peak = max(self.peak, len(self.scheduler.running))
            return output

        self.scheduler.schedule = schedule
        manager = self.scheduler.kv_cache_manager
        look_up = manager.get_computed_blocks

        def get_computed_blocks(*args: Any, **kwargs: Any) -> Any:
            found = look_up(*args, **kwargs)
            self.prefix_hits += found[1]
            return found

        manager.get_computed_blocks = get_computed_blocks


@contextmanager
def running(model: Path, elastic: dict[str, Any] | None = None, **flags: Any) -> Iterator[Engine]:
    """Give a started engine on `model`, elastic if a configuration is given; it is torn down at the end.

    The policy, if none is named, is one that evicts whenever memory is short, however fast this machine is.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if elastic is not None:
        flags["additional_config"] = {"elasticmoe": {"policy": "threshold"} | elastic}
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(model=str(model), **{**defaults, **flags})
    engine = Engine(llm)
    try:
        yield engine
    finally:
        engine.scheduler.shutdown()
        del engine, llm
        cleanup_dist_env_and_memory()
        gc.collect()
