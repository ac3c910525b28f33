"""Runs reconcile: woken by handlers, and by itself every few seconds. Knows how long ago the watch was last in step.

Everything blocking runs in a thread; one resource is never reconciled twice at once.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elasticmoe.operator.reconcile import Key

logger = logging.getLogger(__name__)

RESYNC_S: Final = 10.0
AT_ONCE: Final = 4
"""Passes of a resync; those that a change woke come beside them."""
MAX_WATCH_AGE_S: Final = 120.0


@dataclass(slots=True)
class WatchAge:
    """When what the watch has brought last agreed with what a list says.

    A watch that died in silence keeps agreeing only until the first change it misses.
    """

    agreed_at_s: float
    _listed_at_s: float = 0.0
    _seen: dict[str, tuple[str, float]] = field(default_factory=dict)

    def see(self, uid: str, version: str, now_s: float) -> None:
        """Take note of a resource's version that the watch brought."""
        self._seen[uid] = (version, now_s)

    def forget(self, uid: str) -> None:
        """Take note of a resource that the watch saw go."""
        self._seen.pop(uid, None)

    def compare(self, listed: Mapping[str, str], now_s: float) -> None:
        """Agree if the watch has brought each listed version, or anything of that resource since the last list."""
        if all(self._is_current(uid, version) for uid, version in listed.items()):
            self.agreed_at_s = now_s
        self._listed_at_s = now_s

    def _is_current(self, uid: str, version: str) -> bool:
        seen_version, seen_at_s = self._seen.get(uid, ("", float("-inf")))
        return seen_version == version or seen_at_s > self._listed_at_s


@dataclass(frozen=True, slots=True)
class Listed:
    """All custom resources by list: which to reconcile, and their versions by uid."""

    keys: tuple[Key, ...]
    versions: Mapping[str, str]


class Loop:
    """Wakes for one resource are merged: those that come during a pass make one further pass."""

    def __init__(self, reconcile: Callable[[Key], None], list_all: Callable[[], Listed], watch: WatchAge) -> None:
        self._reconcile = reconcile
        self._list_all = list_all
        self._watch = watch
        self._locks: dict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._woken: set[Key] = set()

    async def wake(self, key: Key) -> None:
        """Reconcile a resource as it is now or will be; returns when that is done, raises if it fails."""
        self._woken.add(key)
        async with self._locks[key]:
            if key not in self._woken:
                return
            self._woken.discard(key)
            await asyncio.to_thread(self._reconcile, key)

    async def run(self, clock: Callable[[], float]) -> None:
        """Resync until cancelled. Lists keep their pace, however long the passes take, for the watch's age."""
        passes: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    keys = await self._list(clock)
                    if passes is None or passes.done():
                        passes = asyncio.create_task(self._pass_over(keys))
                except Exception:  # the API server may be away; the probe tells if it stays so
                    logger.exception("the list of resources failed; the next one comes in %.0f s", RESYNC_S)
                await asyncio.sleep(RESYNC_S)
        finally:
            if passes is not None:
                passes.cancel()

    async def _list(self, clock: Callable[[], float]) -> tuple[Key, ...]:
        """Return all resources, and hold the watch against them."""
        listed = await asyncio.to_thread(self._list_all)
        self._watch.compare(listed.versions, clock())
        return listed.keys

    async def _pass_over(self, keys: Iterable[Key]) -> None:
        """Reconcile each, a few at once; one that fails is logged and comes again."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(key: Key) -> None:
            async with places:
                try:
                    await self.wake(key)
                except Exception:  # one broken resource must not stop the others
                    logger.exception("%s/%s: this pass failed; the next one tries again", key.namespace, key.name)

        await asyncio.gather(*map(one, keys))
