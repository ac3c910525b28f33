"""Wakes and resyncs, and how long ago the watch was in step."""

import asyncio
import itertools
import threading
from collections.abc import Callable

import pytest

from elasticmoe.operator import loop as loop_module
from elasticmoe.operator.loop import Listed, Loop, WatchAge
from elasticmoe.operator.reconcile import Key

DEADLINE_S = 60.0
A, B = Key("default", "a"), Key("default", "b")


class Passes:
    """Counts passes; each waits until the test lets it end."""

    def __init__(self) -> None:
        """Let passes end at once."""
        self.done: list[Key] = []
        self.running = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.gate, self.started, self.four = threading.Event(), threading.Event(), threading.Event()
        self.gate.set()
        self.failing: set[Key] = set()
        self.failing_lists = 0
        self.listed = Listed((A, B), {"uid-a": "1", "uid-b": "1"})

    def reconcile(self, key: Key) -> None:
        """Make a pass."""
        with self.lock:
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        self.started.set()
        assert self.gate.wait(DEADLINE_S)
        with self.lock:
            self.running -= 1
        self.done.append(key)
        if len(self.done) == 4:
            self.four.set()
        if key in self.failing:
            message = f"{key.name} fails"
            raise RuntimeError(message)

    def list_all(self) -> Listed:
        """Return what there is, after the lists that are to fail."""
        if self.failing_lists:
            self.failing_lists -= 1
            message = "the API server is away"
            raise OSError(message)
        return self.listed


def make(passes: Passes, watch: WatchAge | None = None) -> Loop:
    """Return a loop over such passes."""
    return Loop(passes.reconcile, passes.list_all, watch or WatchAge(0.0))


def test_wakes_during_a_pass_make_one_further_pass() -> None:
    """However many; and never two passes at once."""
    passes = Passes()

    async def wake_often() -> None:
        loop = make(passes)
        passes.gate.clear()
        first = asyncio.create_task(loop.wake(A))
        assert await asyncio.to_thread(passes.started.wait, DEADLINE_S)
        others = [asyncio.create_task(loop.wake(A)) for _ in range(5)]
        await asyncio.sleep(0)
        passes.gate.set()
        await asyncio.gather(first, *others)

    asyncio.run(wake_often())
    assert passes.done == [A, A]
    assert passes.most_at_once == 1


def test_a_wake_raises_what_its_pass_raised() -> None:
    """So that kopf logs it and comes again; the next wake makes a pass again."""
    passes = Passes()
    passes.failing = {A}

    async def wake_twice() -> None:
        loop = make(passes)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a fails"):
                await loop.wake(A)

    asyncio.run(wake_twice())
    assert passes.done == [A, A]


def test_a_resync_passes_over_every_resource(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that fails is logged and stops no other."""
    monkeypatch.setattr(loop_module, "RESYNC_S", 2 * DEADLINE_S)
    passes = Passes()
    passes.failing = {A}
    asyncio.run(run_until(make(passes), 0.0, lambda: len(passes.done) == 2 and bool(caplog.text)))
    assert sorted(passes.done) == [A, B]
    assert "default/a: this pass failed; the next one tries again" in caplog.text


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not is_so():  # noqa: ASYNC110 -- what turns it is a thread
        await asyncio.sleep(0.01)


async def run_until(loop: Loop, now_s: float, is_so: Callable[[], bool]) -> None:
    """Run the loop at one moment until something is so."""
    task = asyncio.create_task(loop.run(lambda: now_s))
    await asyncio.wait_for(until(is_so), DEADLINE_S)
    task.cancel()


def test_slow_passes_do_not_make_the_watch_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists keep their pace while passes wait; a few passes run at once, one for each resource."""
    monkeypatch.setattr(loop_module, "RESYNC_S", 0.01)
    passes = Passes()
    keys = tuple(Key("default", f"r{i}") for i in range(3 * loop_module.AT_ONCE))
    passes.listed = Listed(keys, {})
    ticks = itertools.count(1.0)
    watch = WatchAge(0.0)

    async def run_a_while() -> None:
        passes.gate.clear()
        task = asyncio.create_task(make(passes, watch).run(lambda: next(ticks)))
        await until(lambda: passes.running >= loop_module.AT_ONCE)
        listed = watch.agreed_at_s
        await until(lambda: watch.agreed_at_s >= listed + 20)
        assert passes.running == loop_module.AT_ONCE
        assert not passes.done
        passes.gate.set()
        await until(lambda: len(passes.done) >= len(keys))
        task.cancel()

    asyncio.run(asyncio.wait_for(run_a_while(), DEADLINE_S))
    assert sorted(passes.done[: len(keys)]) == sorted(keys)
    assert passes.most_at_once <= loop_module.AT_ONCE


def test_it_resyncs_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also after a list that failed."""
    monkeypatch.setattr(loop_module, "RESYNC_S", 0.0)
    passes = Passes()
    passes.failing_lists = 1

    async def run_a_while() -> None:
        task = asyncio.create_task(make(passes).run(lambda: 0.0))
        assert await asyncio.to_thread(passes.four.wait, DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run_a_while())
    assert sorted(passes.done[:2]) == sorted(passes.done[2:4]) == [A, B]
    assert "the list of resources failed" in caplog.text


def test_a_watch_is_in_step_when_it_brought_each_listed_version() -> None:
    """The age is counted from then."""
    watch = WatchAge(0.0)
    watch.see("a", "1", now_s=1.0)
    watch.compare({"a": "1"}, now_s=5.0)
    assert watch.agreed_at_s == 5.0


def test_a_watch_that_misses_a_change_falls_behind() -> None:
    """A new object counts, too; one that has gone doesn't."""
    watch = WatchAge(0.0)
    watch.see("a", "1", now_s=1.0)
    watch.compare({"a": "1"}, now_s=5.0)
    watch.compare({"a": "2"}, now_s=15.0)
    watch.compare({"a": "2"}, now_s=25.0)
    assert watch.agreed_at_s == 5.0
    watch.see("a", "2", now_s=26.0)
    watch.compare({"a": "2"}, now_s=35.0)
    assert watch.agreed_at_s == 35.0
    watch.compare({"a": "2", "b": "1"}, now_s=45.0)
    assert watch.agreed_at_s == 35.0
    watch.forget("a")
    watch.compare({}, now_s=55.0)
    assert watch.agreed_at_s == 55.0


def test_an_event_on_its_way_is_no_lag() -> None:
    """A resource that changes all the time is always a version ahead of its watch; that it brings something counts."""
    watch = WatchAge(0.0)
    watch.compare({}, now_s=5.0)
    watch.see("a", "7", now_s=14.0)
    watch.compare({"a": "8"}, now_s=15.0)
    assert watch.agreed_at_s == 15.0


def test_a_resync_compares_the_watch_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that it is given."""
    monkeypatch.setattr(loop_module, "RESYNC_S", 2 * DEADLINE_S)
    watch, passes = WatchAge(0.0), Passes()
    watch.see("uid-a", "1", 0.0)
    watch.see("uid-b", "1", 0.0)
    asyncio.run(run_until(make(passes, watch), 42.0, lambda: len(passes.done) == 2))
    assert watch.agreed_at_s == 42.0
