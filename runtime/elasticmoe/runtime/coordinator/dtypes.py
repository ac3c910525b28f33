"""Weights from one dtype to another, rounded as torch does, in numpy alone; bfloat16 is kept as its 16 bits."""

from typing import Any, Final

import numpy as np

STORED: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
"""numpy's dtype for the bytes of each of safetensors' dtypes that a weight may have."""
SAFETENSORS_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_QUIET_NAN: Final = 0x7FC0


def convert(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Return the values, stored as `source`, as `target` stores them."""
    if source == target:
        return values
    wide = _widen_bfloat16(values) if source == "BF16" else values.astype(np.float32)
    return _narrow_bfloat16(wide) if target == "BF16" else wide.astype(STORED[target])


def _widen_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _narrow_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_QUIET_NAN), rounded)
