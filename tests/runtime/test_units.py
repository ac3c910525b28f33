"""Division and text of sizes."""

import pytest

from elasticmoe.runtime.units import align_up, ceil_div, mib


@pytest.mark.parametrize(
    ("amount", "unit", "units"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (-1, 3, 0), (-4, 3, -1)]
)
def test_ceil_div_is_the_fewest_units_that_hold_the_amount(amount: int, unit: int, units: int) -> None:
    """A remainder takes a whole unit; a negative amount is rounded up too."""
    assert ceil_div(amount, unit) == units


@pytest.mark.parametrize(("amount", "aligned"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_align_up_is_the_next_multiple(amount: int, aligned: int) -> None:
    """A multiple stays as it is."""
    assert align_up(amount, 16) == aligned


def test_mib_shows_two_digits() -> None:
    """Sizes in messages are MiB with two digits."""
    assert mib(3 * 2**19) == "1.50 MiB"
