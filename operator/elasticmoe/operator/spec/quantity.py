"""Kubernetes quantities and our durations as numbers: `1536Mi`, `2`, `500m`; `15s`, `2m`.

The only place in the operator that knows the suffixes.
"""

import math
import re
from decimal import ROUND_CEILING, Context, Decimal
from typing import Final

_NUMBER: Final = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_SUFFIX: Final = r"(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]{1,3})?"
QUANTITY_PATTERN: Final = f"^{_NUMBER}{_SUFFIX}$"
QUANTITY_END: Final = 2**63
"""Every quantity of a spec is less; Kubernetes counts in 64 bits."""
DURATION_PATTERN: Final = r"^[1-9][0-9]{0,5}(s|m|h)$"

_FACTORS: Final = {
    "": Decimal(1),
    **{suffix: Decimal(1000) ** -(n + 1) for n, suffix in enumerate("mun")},
    **{suffix: Decimal(1000) ** (n + 1) for n, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Decimal(1024) ** (n + 1) for n, suffix in enumerate("KMGTPE")},
}
_UPWARDS: Final = Context(prec=40, rounding=ROUND_CEILING)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_MIB: Final = 1024**2


def parse_quantity(text: str) -> int:
    """Return a quantity as a whole number, rounded up, in any form that Kubernetes writes; raises ValueError."""
    found = re.fullmatch(f"([+-]?{_NUMBER}){_SUFFIX}", text)
    if found is None:
        message = f"want a quantity such as 16Gi or 500M, it is {text!r}"
        raise ValueError(message)
    number, suffix = found[1], found[4] or ""
    factor = _FACTORS[suffix] if suffix in _FACTORS else Decimal(f"1{suffix}")
    return math.ceil(_UPWARDS.multiply(Decimal(number), factor))


def check_quantity(text: str) -> None:
    """Raise ValueError if a spec can't ask for such a quantity."""
    if re.fullmatch(QUANTITY_PATTERN, text) is None or parse_quantity(text) >= QUANTITY_END:
        message = f"want a quantity such as 16Gi or 500M, from 0 to less than 8Ei, it is {text!r}"
        raise ValueError(message)


def parse_duration(text: str) -> int:
    """Return a duration in seconds; raises ValueError."""
    if not re.match(DURATION_PATTERN, text):
        message = f"want a duration such as 15s, 2m or 1h, it is {text!r}"
        raise ValueError(message)
    return int(text[:-1]) * _SECONDS[text[-1]]


def show_bytes(num_bytes: int) -> str:
    """Return bytes as people write them in a resource, rounded up to whole MiB."""
    return f"{-(-num_bytes // _MIB)}Mi"
