"""Quantities and durations as Kubernetes and we write them."""

import pytest

from elasticmoe.operator.spec.quantity import QUANTITY_END, check_quantity, parse_duration, parse_quantity, show_bytes


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
        ("1E", 10**18),
        ("1000E", 10**21),
        ("2Ei", 2**61),
        ("1E3", 1000),
        ("12e-1", 2),
        ("1e+2", 100),
        ("5.", 5),
        (".5Ki", 512),
        ("+1Gi", 2**30),
        ("-1", -1),
    ],
)
def test_a_quantity_is_a_number_with_a_suffix(text: str, number: int) -> None:
    """Decimal suffixes count in thousands, binary ones in 1024s."""
    assert parse_quantity(text) == number


def test_a_part_of_one_is_rounded_up() -> None:
    """What is asked for is never given short."""
    assert parse_quantity("1500m") == 2
    assert parse_quantity("1000001u") == 2
    assert parse_quantity("1n") == 1
    assert parse_quantity("1e-999") == 1
    assert parse_quantity("9223372036854775807.0001") == 2**63


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", ".", "1K", "1e", "1e1234", "1GiB", "1Gi\n", "--1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    """The message shows the form and what there was."""
    with pytest.raises(ValueError, match=r"want a quantity such as 16Gi"):
        parse_quantity(text)


@pytest.mark.parametrize("text", ["0", "9223372036854775807", "9.2E", "7Ei", "1e18"])
def test_a_spec_may_ask_for_what_fits_into_64_bits(text: str) -> None:
    """As many as Kubernetes can count."""
    check_quantity(text)
    assert parse_quantity(text) < QUANTITY_END


@pytest.mark.parametrize("text", ["9223372036854775808", "8Ei", "10E", "1e999", "9" * 5000, "-1", "+1", "1Gi\n", "x"])
def test_a_spec_may_not_ask_for_more_or_for_less_than_nothing(text: str) -> None:
    """One message for all of them."""
    with pytest.raises(ValueError, match=r"^want a quantity such as 16Gi or 500M, from 0 to less than 8Ei, it is '"):
        check_quantity(text)


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
