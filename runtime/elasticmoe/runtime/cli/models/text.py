"""Sample English sentences of our own: what the tokenizer is trained on and the router calibrated with.

Sentences are drawn from word lists and patterns, so that no text of others is needed. Called by `tokenizer` and
`weights`; never random beyond its seed.
"""

import random
from typing import Final

_SECOND_CLAUSE: Final = 0.4  # how often
_OPENER: Final = 0.4
_PLACE: Final = 0.4
_ADVERB: Final = 0.2
_NUMBER: Final = 0.15
_ADJECTIVE: Final = 0.6


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a list that is easier to read as text."""
    return tuple(text.split())


_NOUNS: Final = _words(
    "page block table pool arena expert layer router token prompt answer queue request server worker kernel tensor "
    "matrix cache buffer copy stream event graph step batch slot owner budget limit snapshot plan change policy memory "
    "host device node cluster garden river mountain harbour market kitchen teacher student doctor farmer baker sailor "
    "painter writer letter story question picture window bridge street village city island forest meadow morning "
    "evening winter summer autumn spring weather storm cloud horse rabbit sparrow fox train wagon lantern candle "
    "basket blanket bottle hammer ladder engine wheel clock map number reason result example problem idea music song"
)
_VERBS: Final = _words(
    "reads writes moves copies frees fills holds follows finds carries opens closes watches keeps sends takes gives "
    "needs shares splits merges counts measures explains answers asks builds paints repairs crosses remembers forgets "
    "loads evicts fetches schedules routes serves starts stops checks compares describes changes leaves reaches"
)
_ADJECTIVES: Final = _words(
    "small large quiet busy early late cold warm bright dark empty full free hidden simple careful quick slow old new "
    "green blue yellow grey wooden broken gentle clever honest patient hungry distant narrow wide heavy light common "
    "rare shared elastic resident missing planned random steady sudden friendly strange useful beautiful"
)
_PLACES: Final = _words("under over behind before after near beside without within between against towards through")
_ADVERBS: Final = _words("slowly quickly again often never always sometimes together alone today tomorrow carefully")
_DETERMINERS: Final = _words("the the this every my our her")
_JOINTS: Final = (", and ", ", but ", " because ", " while ", "; ")
_OPENERS: Final = (
    "Please explain why",
    "Tell me how",
    "I think that",
    "In the end",
    "We know that",
    "Can you say when",
    "It seems that",
    "Once upon a time",
    "For example",
    "There is no doubt that",
)


def sentences(count: int, seed: int) -> list[str]:
    """Return `count` sentences, the same ones for the same seed."""
    rng = random.Random(seed)
    return [_sentence(rng) for _ in range(count)]


def _sentence(rng: random.Random) -> str:
    """One sentence of one or two clauses, some with an opener, some a question."""
    text = _clause(rng)
    if rng.random() < _SECOND_CLAUSE:
        text = f"{text}{rng.choice(_JOINTS)}{_clause(rng)}"
    if rng.random() < _OPENER:
        return f"{rng.choice(_OPENERS)} {text}{rng.choice('.?')}"
    return f"{text[0].upper()}{text[1:]}{rng.choice('...!')}"


def _clause(rng: random.Random) -> str:
    """Subject, verb, object, and at times a place or an adverb."""
    clause = f"{_thing(rng)} {rng.choice(_VERBS)} {_thing(rng)}"
    ending = rng.random()
    if ending < _PLACE:
        return f"{clause} {rng.choice(_PLACES)} {_thing(rng)}"
    return f"{clause} {rng.choice(_ADVERBS)}" if ending < _PLACE + _ADVERB else clause


def _thing(rng: random.Random) -> str:
    """A noun with a number, or with a determiner and perhaps an adjective."""
    noun = rng.choice(_NOUNS)
    if rng.random() < _NUMBER:
        return f"{noun} {rng.randrange(1, 100)}"
    adjective = f"{rng.choice(_ADJECTIVES)} " if rng.random() < _ADJECTIVE else ""
    return f"{rng.choice(_DETERMINERS)} {adjective}{noun}"
