"""Prints the greedy tokens of a few requests through the elastic pool, as JSON: `generate.py MODEL ARENA_BYTES`.

Run by the image's Python and by the checkout's, so it imports nothing of the tests.
"""

import json
import os
import random
import sys


def main(model: str, arena_bytes: int) -> None:
    """Start an engine, send all requests at once, print each one's tokens on the last line."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    from vllm import LLM, SamplingParams  # noqa: PLC0415 -- it reads the environment

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=16,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        additional_config={"elasticmoe": {"arena_bytes": arena_bytes}},
    )
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(rng.randint(8, 120))]} for _ in range(16)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    json.dump([list(output.outputs[0].token_ids) for output in outputs], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
