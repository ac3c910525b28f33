"""Refusals found after vLLM has started its processes: kept in a file that `elasticmoe serve` prints at the end."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from elasticmoe.runtime.contract.names import ENV_REFUSAL_FILE
from elasticmoe.runtime.errors import ElasticMoEError


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Let an ElasticMoEError pass, after writing its sentence where `elasticmoe serve` looks for it.

    Of several processes that refuse, the first one is heard.
    """
    try:
        yield
    except ElasticMoEError as error:
        if path := os.environ.get(ENV_REFUSAL_FILE):
            with contextlib.suppress(FileExistsError), Path(path).open("x", encoding="utf-8") as file:
                file.write(str(error))
        raise
