"""Kubernetes quantities and our durations as numbers: `1536Mi`, `2`, `500m`; `15s`, `2m`.

The only place in the operator that knows the suffixes.
"""

import math
import re
from decimal import Decimal
from typing import Final

QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
DURATION_PATTERN: Final = r"^[1-9][0-9]{0,5}(s|m|h)$"

_FACTORS: Final = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** (n + 1) for n, suffix in enumerate("kMGTP")},
    **{f"{suffix}i": Decimal(1024) ** (n + 1) for n, suffix in enumerate("KMGTP")},
}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_MIB: Final = 1024**2


def parse_quantity(text: str) -> int:
    """Return a quantity as a whole number, rounded up; raises ValueError."""
    if not re.match(QUANTITY_PATTERN, text):
        message = f"want a quantity such as 16Gi or 500M, it is {text!r}"
        raise ValueError(message)
    number = text.rstrip("mkMGTPKi")
    return math.ceil(Decimal(number) * _FACTORS[text[len(number) :]])


def parse_duration(text: str) -> int:
    """Return a duration in seconds; raises ValueError."""
    if not re.match(DURATION_PATTERN, text):
        message = f"want a duration such as 15s, 2m or 1h, it is {text!r}"
        raise ValueError(message)
    return int(text[:-1]) * _SECONDS[text[-1]]


def show_bytes(num_bytes: int) -> str:
    """Return bytes as people write them in a resource, rounded up to whole MiB."""
    return f"{-(-num_bytes // _MIB)}Mi"
