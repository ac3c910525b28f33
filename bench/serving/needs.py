"""What a bench needs of the machine: looked for before anything is done, told in one sentence where it is missing."""

import importlib.util
import os
import sys

from bench.serving.errors import BenchError
from bench.serving.files import end_in_a_sentence
from bench.serving.meta import find_versions


def packages(*names: str) -> None:
    """Raise BenchError unless those can be imported; imports none of them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(
            f"want {' and '.join(names)}, {sys.executable} has no {' or '.join(missing)}; use .venv/bin/python after "
            "`make setup`, or install elasticmoe[gpu] where there is a GPU"
        )


def gpu() -> None:
    """Raise BenchError unless there is a GPU, and torch to drive it."""
    packages("torch")
    # Without it torch looks by CUDA, which no forked worker could use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.cuda.is_available():
        raise BenchError("want an NVIDIA GPU, torch finds none; run it on a machine that has one")


def engine() -> None:
    """Raise BenchError unless there is vLLM, and a GPU where it was built for one."""
    packages("vllm")
    version = find_versions(("vllm",)).get("vllm")  # the CPU's is another package
    if version is not None and "cpu" not in version:
        gpu()


def first(*names: str) -> None:
    """End the process in that sentence unless those can be imported: of a script that imports them at its top."""

    def look() -> int:
        packages(*names)
        return 0

    if status := end_in_a_sentence(look):
        sys.exit(status)
