"""What argparse takes for a bench's counts, amounts and the file of its result; the rest it refuses by flag."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def count(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or not 0 < int(text[:10]) <= 10**9 or len(text) > 10:
        raise ArgumentTypeError(f"want a whole number above 0, it is {text}")
    return int(text)


def counts(least: int, most: int) -> Callable[[str], list[int]]:
    """Return what takes whole numbers from `least` to `most`, with commas between them."""

    def take(text: str) -> list[int]:
        words = text.split(",")
        if not all(word.isdecimal() and len(word) <= 10 and least <= int(word) <= most for word in words):
            raise ArgumentTypeError(f"want whole numbers from {least} to {most}, such as {least},{most}; it is {text}")
        return [int(word) for word in words]

    return take


def amount(text: str) -> float:
    """Return a number above 0 that need not be whole."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 10**9:
        raise ArgumentTypeError(f"want a number above 0, it is {text}")
    return number


def new_file(text: str) -> Path:
    """Return the path of a file to write; asked before the work whose result goes there."""
    path = Path(text)
    if path.is_dir() or any(parent.exists() and not parent.is_dir() for parent in path.parents):
        raise ArgumentTypeError(f"want a file to write, {text} can't be one")
    return path
