"""With the package installed and not asked for, vLLM is stock: its classes, its layers, its tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from pathlib import Path
from tests.engine.engines import draw_requests, running
from vllm.plugins import load_plugins_by_group
with running(Path(sys.argv[1]), kv_cache_memory_bytes=2**26) as engine:
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    from vllm.model_executor.custom_op import op_registry_oot
    config = engine.llm.llm_engine.vllm_config
    told = {
        "plugins": sorted(load_plugins_by_group("vllm.general_plugins")),
        "scheduler": type(engine.scheduler).__module__,
        "allocate": engine.scheduler.kv_cache_manager.allocate_slots.__module__,
        "pool": type(engine.scheduler.kv_cache_manager.block_pool).__module__,
        "worker": type(worker).__module__,
        "runner": type(worker.model_runner).__module__,
        "layers": sorted({type(module).__module__ for module in worker.model_runner.model.modules()}),
        "replaced": sorted(op_registry_oot),
        "ours": sorted(name for name in sys.modules if name.startswith("elasticmoe.runtime.device")),
        "arena": config.cache_config.kv_cache_memory_bytes,
        "tokens": engine.generate(draw_requests(16)),
    }
print("TOLD" + json.dumps(told))
"""


def _told(model: Path, plugins: str | None) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"} | (
        {} if plugins is None else {"VLLM_PLUGINS": plugins}
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOLD"))
    told: dict[str, Any] = json.loads(line.removeprefix("TOLD"))
    return told


def test_installed_and_not_asked_for_is_stock(tiny: Path) -> None:
    """An engine that loads our plugin but isn't configured for it is, class by class and token by token, vLLM's own."""
    with_us, without = _told(tiny, None), _told(tiny, "")
    assert "elasticmoe" in with_us.pop("plugins")
    assert "elasticmoe" not in without.pop("plugins")
    assert with_us == without
    assert with_us["replaced"] == []
    assert with_us["ours"] == []
    assert with_us["scheduler"].startswith("vllm.")
