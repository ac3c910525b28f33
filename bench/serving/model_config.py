"""A model's config.json as the benches take it: its sizes are judged before a server or an engine starts."""

from pathlib import Path
from typing import Any

from bench.serving.files import parse_object, read_text
from elasticmoe.runtime.simulator.served import ServedModel, parse_served


def read_model_config(path: Path) -> tuple[dict[str, Any], ServedModel]:
    """Return what a config.json holds, and what follows from it for one GPU.

    Raises BadScenario for a file that holds no object, UnsupportedError for one of a model that isn't paged or that
    there can't be.
    """
    config = parse_object(read_text(path), str(path))
    return config, parse_served(config, str(path))
