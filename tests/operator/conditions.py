"""Conditions of what was observed, for the tests of the status."""

from typing import Any

from elasticmoe.operator.errors import SpecError
from elasticmoe.operator.observed import Container, End, Observed
from elasticmoe.operator.status import Condition, Verdict, build_conditions
from tests.fakes.kube_objects import IDENTITY, make_spec

CRASHING = (
    Container("main", is_ready=False, waiting="CrashLoopBackOff", restarts=1, past_end=End(2, "Error", "no", 1.0)),
)
CRASHED = "main ended with exit code 2: no, restarts: 1; see `kubectl -n default logs"
BAD = Verdict(SpecError("spec.replicas", "it is -1"))


def condition(kind: str, verdict: Verdict | None = None, **fields: Any) -> tuple[str, str]:  # noqa: ANN401 -- any field
    """Return status and reason of one condition."""
    found = whole(kind, verdict, **fields)
    return found.status, found.reason


def whole(kind: str, verdict: Verdict | None = None, **fields: Any) -> Condition:  # noqa: ANN401 -- any field
    """Return one condition; the pool needs 2 GiB."""
    conditions = build_conditions(Observed(IDENTITY, **fields), verdict or Verdict(make_spec()))
    return {found.type: found for found in conditions}[kind]
