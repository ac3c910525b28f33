"""The handlers: what wakes the loop, what the probe says, and that nothing needs a finalizer.

How kopf and a real API server call them is tested on a real cluster.
"""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import kopf
import pytest

from elasticmoe.operator import handlers as handlers_module
from elasticmoe.operator.errors import SettingsError
from elasticmoe.operator.loop import MAX_WATCH_AGE_S, Listed, Loop, WatchAge
from elasticmoe.operator.reconcile import Key
from tests.fakes.kube_api import FakeKube
from tests.fakes.kube_objects import make_resource

handlers: Any = handlers_module
"""kopf's types ask for all keywords that kopf gives."""
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the chart sets."""
    monkeypatch.setenv("ELASTICMOE_RUNTIME_IMAGE", "runtime:1")
    monkeypatch.setenv("ELASTICMOE_COORDINATOR_IMAGE", "coordinator:1")


class Woken:
    """A running operator that only notes which resources were woken."""

    def __init__(self) -> None:
        """Have a watch that is in step."""
        self.keys: list[Key] = []
        self.watch = WatchAge(time.monotonic())
        loop = Loop(self.keys.append, lambda: Listed((), {}), self.watch)
        self.memo = SimpleNamespace(running=SimpleNamespace(loop=loop, watch=self.watch))


def test_a_resource_and_its_children_wake_the_same_key() -> None:
    """Children by their label."""
    woken = Woken()
    asyncio.run(handlers.wake_for_resource(name="tiny", namespace="default", memo=woken.memo))
    labels = {"elasticmoe.io/deployment": "tiny"}
    asyncio.run(handlers.wake_for_child(labels=labels, namespace="default", memo=woken.memo))
    assert woken.keys == [Key("default", "tiny")] * 2


def test_events_of_resources_tell_the_watch() -> None:
    """Versions that came, and resources that went."""
    woken = Woken()
    resource = make_resource()
    asyncio.run(handlers.see_resource(event={"type": None, "object": resource}, memo=woken.memo))
    woken.watch.compare({"uid-1": "7"}, now_s=1.0)
    assert woken.watch.agreed_at_s == 1.0
    asyncio.run(handlers.see_resource(event={"type": "DELETED", "object": resource}, memo=woken.memo))
    woken.watch.compare({"uid-1": "7"}, now_s=2.0)
    assert woken.watch.agreed_at_s == 1.0


def test_the_probe_says_the_watchs_age_and_fails_when_it_is_dead() -> None:
    """For good: kopf would ask again else, and answer 200 meanwhile."""
    woken = Woken()
    assert 0.0 <= asyncio.run(handlers.check_watch(memo=woken.memo)) < 60.0
    woken.watch.agreed_at_s -= MAX_WATCH_AGE_S + 1
    with pytest.raises(kopf.PermanentError, match=r"want the watch in step within 120 s, it was 1[2-7]\d s ago"):
        asyncio.run(handlers.check_watch(memo=woken.memo))


def test_no_handler_needs_a_finalizer() -> None:
    """A resource can go without the operator."""
    registry: Any = kopf.get_default_registry()
    changing = [
        handler
        for handler in registry._changing.get_all_handlers()
        if handler.fn.__module__ == handlers_module.__name__
    ]
    assert {handler.fn.__name__ for handler in changing} == {"wake_for_resource"}
    assert [handler for handler in changing if handler.requires_finalizer] == []
    assert list(registry._spawning.get_all_handlers()) == []


def test_kopf_is_set_to_leave_annotations_of_ours_and_to_notice_a_silent_watch() -> None:
    """Without peering; scanning the cluster only where all of it is served."""
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    assert settings.persistence.finalizer == "elasticmoe.io/finalizer"
    assert isinstance(settings.persistence.progress_storage, kopf.AnnotationsProgressStorage)
    assert isinstance(settings.persistence.diffbase_storage, kopf.AnnotationsDiffBaseStorage)
    assert settings.watching.inactivity_timeout == 70
    assert settings.peering.standalone
    assert not settings.scanning.disabled


def test_one_namespace_needs_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Role couldn't do one."""
    monkeypatch.setenv("ELASTICMOE_WATCH_NAMESPACE", "default")
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    assert settings.scanning.disabled


def test_start_connects_and_resyncs_and_end_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop lists through the client and reconciles what it finds."""
    kube = FakeKube()
    kube.add(make_resource())
    monkeypatch.setattr(handlers, "connect", lambda: kube)
    memo: Any = SimpleNamespace()

    applied = threading.Event()
    kube.on_status = applied.set

    async def live() -> None:
        await handlers.begin(settings=kopf.OperatorSettings(), memo=memo)
        assert await asyncio.to_thread(applied.wait, DEADLINE_S)
        await handlers.end(memo=memo)
        with pytest.raises(asyncio.CancelledError):
            await memo.running.task

    asyncio.run(live())
    assert ("apply", "Deployment", "tiny-worker") in kube.calls


def test_a_start_that_failed_ends_without_a_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is called all the same."""
    monkeypatch.delenv("ELASTICMOE_RUNTIME_IMAGE")
    memo = kopf.Memo()
    with pytest.raises(SettingsError, match="ELASTICMOE_RUNTIME_IMAGE"):
        asyncio.run(handlers.begin(settings=kopf.OperatorSettings(), memo=memo))
    asyncio.run(handlers.end(memo=memo))
    assert memo == {}
