"""Events: stable names, and a warning where a user must act."""

import kubernetes_validate
import pytest

from elasticmoe.operator.events import condition_event, limit_event
from elasticmoe.operator.status import Condition, Truth
from tests.fakes.kube_objects import IDENTITY

NOW = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("kind", "status", "severity"),
    [("Ready", "False", "Normal"), ("ConfigValid", "False", "Warning"), ("ConfigValid", "True", "Normal")],
)
def test_a_fault_that_a_user_must_mend_is_a_warning(kind: str, status: Truth, severity: str) -> None:
    """Pods that are not ready yet are no fault."""
    event = condition_event(IDENTITY, Condition(kind, status, "Why", "because"), NOW)
    assert (event["type"], event["reason"], event["message"]) == (severity, "Why", f"{kind} is {status}: because")


def test_a_condition_without_a_message_tells_its_reason() -> None:
    """An Event must say something."""
    assert condition_event(IDENTITY, Condition("Ready", "True", "Why"), NOW)["message"] == "Ready is True: Why"


def test_a_limit_tells_from_where_to_where_and_why() -> None:
    """In a form that Kubernetes takes, no longer than it takes."""
    event = limit_event(IDENTITY, 16, 18, "x" * 2000, NOW)
    assert event["reason"] == "OffloadLimitChanged"
    assert event["message"].startswith("offload limit 16 → 18: xxx")
    assert len(event["message"]) == 1024
    kubernetes_validate.validate({**event, "metadata": {**event["metadata"], "name": "e"}}, "1.34", strict=True)
