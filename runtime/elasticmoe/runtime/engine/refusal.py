"""Refusals found after vLLM has started its processes: kept in a file that `elasticmoe serve` prints at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticmoe.runtime.contract.names import ENV_REFUSAL_FILE
from elasticmoe.runtime.errors import ElasticMoEError



@contextmanager
def recorded() -> Iterator[None]:
    """Let an ElasticMoEError pass, after writing its sentence where `elasticmoe serve` looks for it."""
    try:
        yield
    except ElasticMoEError as error:
        if path := os.environ.get(ENV_REFUSAL_FILE):
            Path(path).write_text(str(error), encoding="utf-8")
        raise
