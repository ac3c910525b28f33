"""How often two runs of the same requests choose the same token after the same ones, and how close they are. Pure.

Sums of another order round differently, so a choice between two tokens as close as that may fall either way: between
two systems, and between two runs of one system that batch the requests differently.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from bench.matrix.cells import ANY_BUS, CELL

ANY_ROOM = {"kv_gib": None}
Tokens = Mapping[str, list[int]]
"""Generated tokens by the request's number."""
Choices = Mapping[str, list[tuple[float, float]]]
"""By the request's number, for each of its tokens: its logprob, and how much lower the next best one's is."""
Entry = Mapping[str, Any]
"""What a run keeps of a cell."""


def top1_agreement(one: Tokens, other: Tokens) -> float | None:
    """Return the share of tokens that both chose, of those chosen after the same ones; None without any.

    Of each request that both served the first token that differs is the last one counted: what follows it follows
    different ones.
    """
    num_equal = num_counted = 0
    for number in one.keys() & other.keys():
        until, num = _until(one[number], other[number])
        num_equal += until
        num_counted += min(until + 1, num)
    return num_equal / num_counted if num_counted else None


def tolerances(one: Entry, other: Entry) -> dict[str, float]:
    """Return how far two runs' logprobs are apart, where both chose alike, and how close what they chose between was.

    Keys: median and most of the difference in nats; median and most of the other's margin where it chose another token.
    Empty unless both runs noted their logprobs.
    """
    if not one.get("choices") or not other.get("choices"):
        return {}
    apart: list[float] = []
    margins: list[float] = []
    for number in one["tokens"].keys() & other["tokens"].keys():
        until, num = _until(one["tokens"][number], other["tokens"][number])
        ours, theirs = one["choices"][number], other["choices"][number]
        apart += (abs(left[0] - right[0]) for left, right in zip(ours[:until], theirs[:until], strict=True))
        margins += [theirs[until][1]] if until < num else []
    names = {"logprob_apart": apart, "margin_where_apart": margins}
    return {
        f"{name}_{kind}": function(values)
        for name, values in names.items()
        if values
        for kind, function in (("median", statistics.median), ("max", max))
    }


def agreements(entry: Entry, tokens: Iterable[Entry], rival: str) -> dict[str, float | None]:
    """Return the agreement of an entry of a run's tokens with the rival's in its cell, and with its own in most room.

    `tokens` are the entries of the rows that count. Of several repeats the first is compared with. None where there is
    no other one.
    """
    tokens = list(tokens)
    system, room = entry["system"], _cell(entry)["kv_gib"]
    rivals = [one for one in tokens if one["system"] == rival != system]
    beside = next((one for one in rivals if _cell(one) == _cell(entry) | ANY_BUS), None)
    own = [one for one in tokens if one["system"] == system and _cell(one) | ANY_ROOM == _cell(entry) | ANY_ROOM]
    most = max(own, key=lambda one: float(_cell(one)["kv_gib"]))
    itself = most if _cell(most)["kv_gib"] > room else None
    told: dict[str, float | None] = {
        "agrees_with_stock": top1_agreement(entry["tokens"], beside["tokens"]) if beside else None,
        "agrees_with_itself": top1_agreement(entry["tokens"], itself["tokens"]) if itself else None,
    }
    return told | (tolerances(entry, beside) if beside else {})


def _until(one: list[int], other: list[int]) -> tuple[int, int]:
    """Return how many tokens are equal until the first that differs, and how many both have."""
    num = min(len(one), len(other))
    return next((place for place in range(num) if one[place] != other[place]), num), num


def _cell(entry: Entry) -> dict[str, Any]:
    return dict(zip(CELL, entry["cell"], strict=True))
