"""How every process of the command tells a fault of the user's: one sentence on stderr, and status 2."""

import sys
from typing import Final

_USAGE_ERROR: Final = 2


def refuse(sentence: str) -> int:
    """Print why the command ends and return its exit status."""
    print(f"elasticmoe: {sentence}", file=sys.stderr)
    return _USAGE_ERROR
