"""Types of single fields: how each is checked here, and its schema in the CRD."""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema

from elasticmoe.operator.spec.quantity import DURATION_PATTERN, QUANTITY_PATTERN, check_quantity, parse_duration

INT_OR_STRING: Final = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
ANY_OBJECT: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
PERCENT_PATTERN: Final = r"^(100|[1-9]?[0-9])%$"


def _check_quantity(value: Any) -> str:  # noqa: ANN401 -- whatever the CR holds
    text = value if isinstance(value, str) else _as_whole(value)
    check_quantity(text)
    return text


def _check_limit(value: Any) -> int | str:  # noqa: ANN401 -- whatever the CR holds
    if isinstance(value, str) and re.match(PERCENT_PATTERN, value):
        return value
    if isinstance(value, str) or int(_as_whole(value)) < 0:
        message = f"want experts of a layer, a whole number >= 0, or a share such as 40%; it is {value!r}"
        raise ValueError(message)
    return int(value)


def _check_duration(value: Any) -> str:  # noqa: ANN401 -- whatever the CR holds
    if not isinstance(value, str):
        message = f"want a duration such as 15s, 2m or 1h, it is {value!r}"
        raise ValueError(message)  # noqa: TRY004 -- pydantic turns ValueError alone into one of its own
    parse_duration(value)
    return value


def _as_whole(value: Any) -> str:  # noqa: ANN401 -- whatever the CR holds
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"want a whole number or a string, it is {value!r}"
        raise ValueError(message)  # noqa: TRY004 -- pydantic turns ValueError alone into one of its own
    return str(value)


Quantity = Annotated[
    str, BeforeValidator(_check_quantity), WithJsonSchema({**INT_OR_STRING, "pattern": QUANTITY_PATTERN})
]
"""Bytes, cores or devices as Kubernetes writes them."""

Limit = Annotated[
    int | str,
    BeforeValidator(_check_limit),
    WithJsonSchema({**INT_OR_STRING, "minimum": 0, "pattern": PERCENT_PATTERN}),
]
"""Experts of one layer, as a number or as a share of all of them."""

Duration = Annotated[
    str, BeforeValidator(_check_duration), WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
]

AnyObject = Annotated[dict[str, Any], WithJsonSchema(ANY_OBJECT)]
"""A part of Kubernetes' own API, whose schema would be larger than all of ours."""


def resolve_limit(limit: int | str, num_experts: int | None) -> int | None:
    """Return a limit as a number of experts; None for a share while no pod has said how many there are."""
    if isinstance(limit, int):
        return limit
    return None if num_experts is None else num_experts * int(limit.rstrip("%")) // 100
