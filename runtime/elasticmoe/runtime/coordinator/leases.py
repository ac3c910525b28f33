"""Who holds which pool, and what to do next: load, wait, grant, adopt or free. Decides only; the server does it.

Time comes in as an argument, pools are named by their digest, holders by a number.
"""

from dataclasses import dataclass, field
from enum import Enum, auto


class Answer(Enum):
    """What to do for a worker that asks for a pool."""

    GRANT = auto()
    """It holds a lease now: give it the pool."""
    LOAD = auto()
    """Read the checkpoint, say `loaded` or `failed`, then ask again."""
    WAIT = auto()
    """Another one loads, or a worker may still hand the pool back: ask again a little later."""


@dataclass(slots=True)
class _Pool:
    is_ready: bool = False
    """False while it loads."""
    holders: set[int] = field(default_factory=set)
    idle_since_s: float = 0.0
    """Since when nobody holds it; meaningful only while nobody does."""


class Leases:
    """The leases of one coordinator.

    Invariant: a holder holds at most one lease, and only of a pool that is ready. A pool is loaded by one at a time,
    and freed only after nobody has held it for the grace period.
    """

    def __init__(self, grace_s: float, settled_s: float) -> None:
        """Free pools after `grace_s` without a lease; load none before the time `settled_s`, but adopt."""
        self._grace_s = grace_s
        self._settled_s = settled_s
        self._pools: dict[str, _Pool] = {}
        self._held: dict[int, str] = {}

    @property
    def num_leases(self) -> int:
        """Return how many workers hold a pool."""
        return len(self._held)

    def ask(self, holder: int, digest: str, now_s: float) -> Answer:
        """Return what to do for a holder that wants the pool; LOAD is said to one of all that ask."""
        pool = self._pools.get(digest)
        if pool is None and now_s >= self._settled_s:
            self._pools[digest] = _Pool()
            return Answer.LOAD
        if pool is None or not pool.is_ready:
            return Answer.WAIT
        self._hold(holder, digest, pool)
        return Answer.GRANT

    def loaded(self, digest: str, now_s: float) -> bool:
        """Note that the pool is there; False if one was adopted meanwhile, so that the loaded one must be dropped."""
        pool = self._pools.setdefault(digest, _Pool())
        if pool.is_ready:
            return False
        pool.is_ready, pool.idle_since_s = True, now_s
        return True

    def failed(self, digest: str) -> None:
        """Note that loading failed; the next one that asks tries again, unless a pool was adopted meanwhile."""
        pool = self._pools.get(digest)
        if pool is not None and not pool.is_ready:
            del self._pools[digest]

    def hand_back(self, holder: int, digest: str) -> bool:
        """Give a holder that brings its pool along a lease; True if the pool is to be kept, False if one is there."""
        pool = self._pools.setdefault(digest, _Pool())
        is_new = not pool.is_ready
        pool.is_ready = True
        self._hold(holder, digest, pool)
        return is_new

    def end(self, holder: int, now_s: float) -> None:
        """Take the holder's lease back, if it has one."""
        digest = self._held.pop(holder, None)
        if digest is not None:
            pool = self._pools[digest]
            pool.holders.remove(holder)
            pool.idle_since_s = now_s

    def take_expired(self, now_s: float) -> list[str]:
        """Forget the pools that nobody has held for the grace period; returns them, to be freed."""
        expired = [d for d, p in self._pools.items() if self._is_expired(p, now_s)]
        for digest in expired:
            del self._pools[digest]
        return expired

    def check_integrity(self) -> None:
        """Raise AssertionError if the invariant does not hold."""
        held = {holder: digest for digest, pool in self._pools.items() for holder in pool.holders}
        assert held == self._held, f"pools say {held}, holders say {self._held}"
        for digest, pool in self._pools.items():
            assert pool.is_ready or not pool.holders, f"{digest} is held by {pool.holders} before it is loaded"

    def _hold(self, holder: int, digest: str, pool: _Pool) -> None:
        assert holder not in self._held, f"holder {holder} has a lease of {self._held[holder]} already"
        self._held[holder] = digest
        pool.holders.add(holder)

    def _is_expired(self, pool: _Pool, now_s: float) -> bool:
        return pool.is_ready and not pool.holders and now_s - pool.idle_since_s >= self._grace_s
