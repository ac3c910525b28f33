"""Quantities and durations as Kubernetes and we write them."""

import pytest

from elasticmoe.operator.spec.quantity import parse_duration, parse_quantity, show_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("7", 7),
        ("1Ki", 1024),
        ("1.5Gi", 3 * 2**29),
        ("2k", 2000),
        ("3M", 3_000_000),
        ("1P", 10**15),
        ("1Ti", 2**40),
    ],
)
def test_a_quantity_is_a_number_with_a_suffix(text: str, number: int) -> None:
    """Decimal suffixes count in thousands, binary ones in 1024s."""
    assert parse_quantity(text) == number


def test_a_part_of_one_is_rounded_up() -> None:
    """What is asked for is never given short."""
    assert parse_quantity("1500m") == 2


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1K", "1e3", "1GiB"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    """The message shows the form and what there was."""
    with pytest.raises(ValueError, match=r"want a quantity such as 16Gi"):
        parse_quantity(text)


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15), ("2m", 120), ("1h", 3600)])
def test_a_duration_is_in_seconds(text: str, seconds: int) -> None:
    """Seconds, minutes and hours."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["0s", "15", "1d", "1m30s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """A duration of nothing is none."""
    with pytest.raises(ValueError, match=r"want a duration"):
        parse_duration(text)


def test_bytes_are_shown_in_whole_mib() -> None:
    """Rounded up."""
    assert show_bytes(2**30 + 1) == "1025Mi"
