"""Transport `map` on the real vLLM: the same tokens, warm restarts, and serving on while the coordinator is gone."""

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.serving.errors import ServerFailed
from bench.serving.server import Server, elastic_spec
from elasticmoe.runtime.contract import pool_names as names
from elasticmoe.runtime.contract.names import EXPERT_FETCHES
from elasticmoe.runtime.errors import UnsupportedError
from tests.engine.checkpoints import drop_tensor
from tests.engine.engines import BLOCK_SIZE, MAX_MODEL_LEN, Requests, Tokens, draw_requests, running
from tests.engine.over_http import generate
from tests.engine.sizes import arena_bytes, read_shape
from tests.runtime.coordinator.processes import CoordinatorProcess

pytestmark = pytest.mark.vllm

TIGHT_BLOCKS = 40
"""KV room beside all experts: too little for the requests, so that experts leave and are fetched from the pool."""
FLAGS = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN))
NUM_REQUESTS = 24
START_S = 300.0


def _serve(model: Path, log: Path, socket: Path) -> Server:
    """Start `elasticmoe serve` over the pool of the coordinator at `socket`."""
    arena, limit = arena_bytes(model, BLOCK_SIZE, TIGHT_BLOCKS), read_shape(model).num_experts
    own = ("--elastic-arena-bytes", str(arena), "--elastic-limit", str(limit), "--elastic-policy", "threshold")
    where = ("--elastic-transport", "map", "--elastic-socket", str(socket))
    return Server(elastic_spec(model, log, (*FLAGS, *own, *where)))


def _generate(server: Server, requests: Requests) -> Tokens:
    """Return each request's greedy tokens, all submitted at once."""
    return generate(server.spec.base_url, "tiny", requests)


def _num_fetches(server: Server) -> float:
    """Return how many experts were copied from the pool since the start."""
    text = httpx.get(f"{server.spec.base_url}/metrics", timeout=60, trust_env=False).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == EXPERT_FETCHES)


@pytest.mark.timeout(1200)  # three engines one after the other
def test_restarts_of_workers_and_coordinators(tiny: Path, tmp_path: Path) -> None:
    """Tokens are those of transport local; a killed worker's successor and a killed coordinator's read nothing."""
    requests = draw_requests(NUM_REQUESTS)
    with running(tiny, {"arena_bytes": arena_bytes(tiny, BLOCK_SIZE, TIGHT_BLOCKS)}) as local:
        want = local.generate(requests)
    socket, pool_bytes = tmp_path / "pool.sock", read_shape(tiny).expert_bytes_total(4)
    with CoordinatorProcess(socket, tiny) as first:
        with _serve(tiny, tmp_path / "first.log", socket) as worker:
            worker.wait_healthy(START_S, print)
            assert first.metric(names.CHECKPOINT_BYTES_READ) == pool_bytes
            assert _generate(worker, requests) == want
            assert _num_fetches(worker) > 0
            os.killpg(worker.pid, signal.SIGKILL)
        first.wait_for(names.HOST_POOL_LEASES, 0)
        with _serve(tiny, tmp_path / "second.log", socket) as worker:
            worker.wait_healthy(START_S, print)
            assert first.metric(names.HOST_POOL_LEASES) == 1
            assert first.metric(names.CHECKPOINT_BYTES_READ) == pool_bytes
            inodes = first.pool_inodes()
            first.kill()
            assert _generate(worker, requests) == want
            with CoordinatorProcess(socket, tiny) as second:
                second.wait_for(names.HOST_POOL_LEASES, 1)
                assert second.metric(names.CHECKPOINT_BYTES_READ) == 0
                assert second.metric(names.HOST_POOL_BYTES) == pool_bytes
                assert second.pool_inodes() == inodes
                assert _generate(worker, requests) == want
                worker.stop()
                second.wait_for(names.HOST_POOL_LEASES, 0)


def test_a_checkpoint_that_lacks_a_matrix_is_refused_by_the_coordinator(tiny: Path, tmp_path: Path) -> None:
    """`elasticmoe serve` ends with the coordinator's sentence, which names the tensor."""
    lacking, name = tmp_path / "lacking", "model.layers.1.mlp.experts.3.up_proj.weight"
    shutil.copytree(tiny, lacking)
    drop_tensor(lacking, name)
    socket = tmp_path / "pool.sock"
    with (
        CoordinatorProcess(socket, lacking) as coordinator,
        _serve(lacking, tmp_path / "log", socket) as worker,
    ):
        with pytest.raises(ServerFailed, match="it ended with code 2"):
            worker.wait_healthy(START_S, print)
        assert coordinator.metric(names.HOST_POOL_BYTES) == 0
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert f"elasticmoe: the checkpoint lacks {name}" in last


def test_weights_that_a_coordinator_cannot_read_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, for one, are in no checkpoint."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("ELASTICMOE_TRANSPORT", "map")
    monkeypatch.setenv("ELASTICMOE_SOCKET", "pool.sock")
    args = EngineArgs(model=str(tiny), load_format="dummy", dtype="float32", additional_config={"elasticmoe": {}})
    with pytest.raises(UnsupportedError, match=r"^--load-format dummy can't be combined with ELASTICMOE_TRANSPORT=map"):
        args.create_engine_config()
