"""The autotuner on a server that is short of memory."""

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.cluster.install import wait_gone
from bench.cluster.kubectl import Object
from tests.e2e.served import Record, Served, example, time_until
from tests.engine.engines import draw_requests

pytestmark = pytest.mark.cluster

NUM_LOADING = 32
ONE_CORE = [{"name": "OMP_NUM_THREADS", "value": "1"}]
"""Of two: an engine that takes all of them leaves its own API server, which tells the metrics, none."""


@pytest.fixture
def tuned(tiny: Served) -> Iterator[Served]:
    """Give a server whose limit is too low for a burst, with a quick autotuner."""
    memory = tiny.resource()["spec"]["memory"]
    quick = {"enabled": True, "interval": "2s", "cooldown": "4s"}
    resource = example("tuned", env=ONE_CORE, memory={**memory, "expertOffload": {"limit": 2, "autotune": quick}})
    tiny.target.kube.apply(resource)
    served = Served(tiny.target, "tuned")
    try:
        served.wait_ready()
        yield served
    finally:
        tiny.target.kube.run("delete", "emoe", "tuned")
        wait_gone(tiny.target.kube, "tuned", print)


def test_the_autotuner_raises_the_limit_while_requests_wait(tuned: Served, record_property: Record) -> None:
    """In its status and as an Event with the reason; switched off by one field, it leaves the limit alone."""
    lives = tuned.lives()
    with under_load(tuned):
        record_property("seconds", round(time_until("a raise", lambda: bool(history(tuned)), 120), 1))
        entry = history(tuned)[0]
        off = {"limit": 3, "autotune": {"enabled": False}}
        tuned.patch(json.dumps({"spec": {"memory": {"expertOffload": off}}}))
        time_until("the limit that the spec says", lambda: tuned.resource()["status"]["offloadLimit"] == 3, 30)
        time.sleep(8)  # several intervals
    assert tuned.resource()["status"]["offloadLimit"] == 3
    assert "autotuner" not in tuned.resource()["status"]
    assert (entry["from"], entry["to"]) == (2, 4)
    assert "requests wait and 4 layers are at their limit" in entry["reason"]
    events = tuned.target.kube.run(
        "get", "events", "--field-selector=involvedObject.name=tuned,reason=OffloadLimitChanged"
    )
    assert entry["reason"] in events
    assert tuned.lives() == lives


def history(served: Served) -> list[Object]:
    """Return what the autotuner has changed."""
    changes: list[Object] = served.resource()["status"].get("autotuner", {}).get("history", [])
    return changes


@contextmanager
def under_load(served: Served) -> Iterator[None]:
    """Keep more requests waiting than the arena holds until the block ends."""
    done, requests = threading.Event(), draw_requests(NUM_LOADING)

    def load() -> None:
        while not done.is_set():
            served.generate(requests)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load)
        try:
            yield
        finally:
            done.set()
            loading.result()
