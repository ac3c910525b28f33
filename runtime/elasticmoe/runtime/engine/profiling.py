"""Runs requests through an elastic engine in this process and returns what its router chose. Called by the command."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from elasticmoe.runtime.contract.config import CONFIG_KEY


def count_routed(model: str, requests: Sequence[Any], max_tokens: int, flags: Sequence[str]) -> np.ndarray:
    """Return [layers, experts] int64: the tokens of these requests, prompts and answers, that each expert drew."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="elasticmoe profile"))
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, "--enforce-eager", *flags]))
    args.additional_config = {CONFIG_KEY: {}, **args.additional_config}
    llm = LLM.from_engine_args(args)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    texts = [request for request in requests if isinstance(request, str)]
    chats = [request for request in requests if not isinstance(request, str)]
    if texts:
        llm.generate(texts, sampling)
    if chats:
        llm.chat(chats, sampling)
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    counts: np.ndarray = scheduler.adjuster.load.total
    scheduler.shutdown()
    return counts
