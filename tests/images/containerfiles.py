"""Reads a Containerfile as the list of its instructions."""

import re
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).resolve().parent.parent.parent / "images"
NAMES = ("coordinator", "operator", "runtime")


class Instruction(NamedTuple):
    """One instruction: its word and the rest, joined over continued lines."""

    word: str
    rest: str


def read_containerfile(name: str) -> list[Instruction]:
    """Return the instructions of one image, in order and without comments."""
    text = (IMAGES / name / "Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def rests(name: str, word: str) -> list[str]:
    """Return what stands after each instruction of that word."""
    return [one.rest for one in read_containerfile(name) if one.word == word]
