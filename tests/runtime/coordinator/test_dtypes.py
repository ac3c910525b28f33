"""Conversions between dtypes, against torch's."""

import itertools

import numpy as np
import pytest
import torch

from elasticmoe.runtime.coordinator.dtypes import SAFETENSORS_NAMES, STORED, convert

VALUES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    3.14159,
    1e-30,
    6e-8,
    65504.0,
    1e38,
    1.00390625,
    1.01171875,
    float("inf"),
    float("-inf"),
]


@pytest.mark.parametrize(("source", "target"), [*itertools.product(SAFETENSORS_NAMES, repeat=2)])
def test_each_pair_rounds_as_torch_does(source: str, target: str) -> None:
    """Ordinary values, ties, overflow and infinities have torch's bits; NaN stays NaN."""
    given = torch.tensor([[*VALUES, *torch.linspace(-3, 3, 501).tolist()]]).to(getattr(torch, source))
    stored = given.view(torch.uint8).numpy().view(STORED[SAFETENSORS_NAMES[source]])
    with np.errstate(over="ignore"):
        converted = convert(stored, SAFETENSORS_NAMES[source], SAFETENSORS_NAMES[target])
    want = given.to(getattr(torch, target)).view(torch.uint8).numpy()
    assert np.array_equal(converted.view(np.uint8), want)


@pytest.mark.parametrize("target", SAFETENSORS_NAMES)
def test_nan_stays_nan(target: str) -> None:
    """Also one whose bits would overflow when rounded."""
    nan = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    converted = torch.from_numpy(convert(nan, "F32", SAFETENSORS_NAMES[target]).view(np.uint8).copy())
    assert converted.view(getattr(torch, target)).isnan().all()
