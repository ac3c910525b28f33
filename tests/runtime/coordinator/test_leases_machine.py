"""Any order of asking, loading, handing back and leaving keeps the leases whole and loads nothing twice."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticmoe.runtime.coordinator.leases import Answer, Leases

GRACE_S = 5.0
SETTLED_S = 3.0
DIGESTS = st.sampled_from(["a", "b"])
HOLDERS = st.integers(0, 5)


class LeasesMachine(RuleBasedStateMachine):
    """The model: which pools are in memory, which are being loaded, who holds what, and when it was left."""

    def __init__(self) -> None:
        """Start a coordinator at time 0."""
        super().__init__()
        self.leases = Leases(GRACE_S, SETTLED_S)
        self.now_s = 0.0
        self.present: dict[str, float] = {}
        """Pools in memory, and when each was last left or loaded."""
        self.loading: list[str] = []
        self.held: dict[int, str] = {}

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        """Time goes on."""
        self.now_s += seconds

    @rule(holder=HOLDERS, digest=DIGESTS)
    def ask(self, holder: int, digest: str) -> None:
        """GRANT says that the pool is there, LOAD that it is neither there nor being loaded by the rules' count."""
        if holder in self.held:
            return
        answer = self.leases.ask(holder, digest, self.now_s)
        if digest in self.present:
            assert answer is Answer.GRANT
            self.held[holder] = digest
        elif answer is Answer.LOAD:
            assert self.now_s >= SETTLED_S
            self.loading.append(digest)
        else:
            assert answer is Answer.WAIT
            assert digest in self.loading or self.now_s < SETTLED_S

    @precondition(lambda self: self.loading)
    @rule(works=st.booleans())
    def finish_load(self, works: bool) -> None:  # noqa: FBT001
        """A load that worked is kept if the pool is not there yet, and only then."""
        digest = self.loading.pop(0)
        if not works:
            self.leases.failed(digest)
            return
        is_kept = self.leases.loaded(digest, self.now_s)
        assert is_kept == (digest not in self.present)
        if is_kept:
            self.present[digest] = self.now_s

    @rule(holder=HOLDERS, digest=DIGESTS)
    def hand_back(self, holder: int, digest: str) -> None:
        """A pool that is handed back is kept if it is not there yet; its bringer holds a lease either way."""
        if holder in self.held:
            return
        is_kept = self.leases.hand_back(holder, digest)
        assert is_kept == (digest not in self.present)
        self.present.setdefault(digest, self.now_s)
        self.held[holder] = digest

    @rule(holder=HOLDERS)
    def end(self, holder: int) -> None:
        """A connection ends, with a lease or without."""
        self.leases.end(holder, self.now_s)
        if holder in self.held:
            self.present[self.held.pop(holder)] = self.now_s

    @rule()
    def free(self) -> None:
        """Exactly the pools that nobody has held for the grace period are freed."""
        held = set(self.held.values())
        due = {d for d, left_s in self.present.items() if d not in held and self.now_s - left_s >= GRACE_S}
        assert set(self.leases.take_expired(self.now_s)) == due
        for digest in due:
            del self.present[digest]

    @invariant()
    def is_whole(self) -> None:
        """The leases are consistent, and as many as the model counts."""
        self.leases.check_integrity()
        assert self.leases.num_leases == len(self.held)


TestLeases = LeasesMachine.TestCase
