"""Name the features of which descriptions are made: properties of a key that a query may see. NumPy alone.

`facts` works out the facts of a text. `core.descriptions` fits features, and knows none by name.

Source:
    Heads were described by delimiters, offsets and the first token in Clark et al. 2019, section 3; by offsets and rare
    words in Voita et al. 2019, section 4; by induction in Olsson et al. 2022, section 2; by sinks in Xiao et al. 2024,
    section 3.1. Windows: Press et al. 2022, section 3. The others are ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.facts import Flags, TextFacts

Levels = NDArray[np.uint8]

Family = Literal["key", "offset", "group", "list", "graded"]
"""The property that a feature depends on: the key alone, its distance from the query, being in one group with the
query, being on a list of keys that the query has; or a number."""

GRADES = 16
"""Levels of a feature that is a number."""

FARTHEST, FARTHEST_OFFSET = 32, 9
"""Levels of distances, beyond which tokens are as far as these; and the farthest token with a feature of its own."""

_LOG_STEPS = 3.0


Of = Callable[[TextFacts, NDArray[np.int64]], NDArray[np.generic]]
"""The levels of a feature for some queries of a text, (query, key)."""


@dataclass(frozen=True, eq=False)
class Feature:
    """A property of a key that a query may see, with one level for each pair.

    Attributes:
        name: Its name in files.
        words: Its name in a description, such as "the previous token".
        family: The property that it depends on: the key, an offset, a group, a list, or a number.
        rank: How simple it is, the simplest first: of features that explain alike the smaller rank is taken.
        of: Its levels for some queries of a text.
        levels: How many levels it has.
        shown_by: The feature of 0 and 1 that says how much attention a number is about.
    """

    name: str
    words: str
    family: Family
    rank: int
    of: Of = field(repr=False)
    levels: int = 2
    shown_by: str = ""

    @property
    def is_of_keys(self) -> bool:
        """Say whether it tells kinds of keys apart, whatever the query is."""
        return self.family == "key" or self.name == "rarity"


def blocks_of(features: Sequence[Feature], facts: TextFacts, queries: NDArray[np.int64]) -> Levels:
    """Return the levels of features for some queries of a text, (feature, query, key), uint8."""
    blocks = np.empty((len(features), len(queries), facts.n), np.uint8)
    for number, feature in enumerate(features):
        blocks[number] = feature.of(facts, queries)
    return blocks


# Families -------------------------------------------------------------------------------------------------------


def of_keys(flags: Callable[[TextFacts], NDArray[np.generic]]) -> Of:
    """Return levels that depend on the key alone, (token,)."""
    return lambda facts, queries: np.broadcast_to(flags(facts), (len(queries), facts.n))


def _of_class(name: str) -> Of:
    return of_keys(lambda facts: facts.classes[name])


def _of_offset(levels: Callable[[NDArray[np.int64]], NDArray[np.generic]]) -> Of:
    return lambda facts, queries: levels(np.arange(facts.n) - queries[:, None])


def _at(offset: int) -> Of:
    return _of_offset(lambda d: d == offset)


def _within(side: int) -> Of:
    return _of_offset(lambda d: (np.abs(d) <= WITHIN) & (d * side >= 0))


def _near(side: int, far: Callable[[NDArray[np.int64]], NDArray[Any]]) -> Of:
    """Return the higher, the nearer: the highest level less how far a distance is."""

    def levels(d: NDArray[np.int64]) -> NDArray[np.int64]:
        # 0 on the other side of the query and from FARTHEST - 1 steps on.
        near = FARTHEST - 1 - np.rint(far(np.abs(d))).astype(np.int64)
        return np.where(d * side >= 0, np.clip(near, 0, None), 0)

    return _of_offset(levels)


def _same(numbers: Callable[[TextFacts], NDArray[np.int64]], elsewhere: bool = False) -> Of:
    """Find keys that have the query's number."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        # (query, key): do both have the same number?
        groups = numbers(facts)
        same: Flags = groups[queries][:, None] == groups
        if elsewhere:
            same[np.arange(len(queries)), queries] = False
        return same

    return of


def _start_of(numbers: Callable[[TextFacts], NDArray[np.int64]]) -> Of:
    """Find the first token of the query's own group."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        groups = numbers(facts)
        starts: Flags = (groups[queries][:, None] == groups) & np.append(True, groups[1:] != groups[:-1])
        return starts

    return of


def _nearest(name: str, *, after: bool) -> Of:
    """Find the last key of a class before the query, or the next one after it."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        # Places of the class, and the one beside each query.
        places = np.flatnonzero(facts.classes[name])
        nearest = np.zeros((len(queries), facts.n), np.bool_)
        at = np.searchsorted(places, queries, "right") if after else np.searchsorted(places, queries, "left") - 1
        exists = (at >= 0) & (at < len(places))
        nearest[np.flatnonzero(exists), places[at[exists]]] = True
        return nearest

    return of


def _shifted_same(by: int, *, only_before: bool = False) -> Of:
    """Find keys whose neighbour `by` tokens further is the same token as the query, elsewhere."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        ids = facts.tokens.ids
        # The token `by` places after each key; -1 beyond the text.
        neighbour = np.full(facts.n, -1, np.int64)
        if by < 0:
            neighbour[-by:] = ids[:by]
        else:
            neighbour[:-by] = ids[by:]
        keys = np.arange(facts.n)
        at = queries[:, None]
        same: Flags = (neighbour == ids[queries][:, None]) & (keys + by != at) & (keys != at)
        return same & (keys <= at) if only_before else same

    return of


def _opener(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
    """Find the innermost bracket that is open at the query."""
    is_opener: Flags = facts.opener[queries][:, None] == np.arange(facts.n)
    return is_opener


def _likeness(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    if facts.embeddings is None:
        return np.zeros((len(queries), facts.n), np.int64)
    # Cosines of 0 to 1, without keys of the query's own token.
    cosine = facts.embeddings[queries] @ facts.embeddings.T
    other = facts.tokens.ids[queries][:, None] != facts.tokens.ids
    levels: NDArray[np.int64] = np.rint((GRADES - 1) * np.clip(cosine, 0, 1) * other).astype(np.int64)
    return levels


def _is_alike(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
    return _likeness(facts, queries) >= GRADES // 2


def _rarity(facts: TextFacts) -> NDArray[np.int64]:
    # ln frequency from -2 (common) to -10 (rare) becomes 0 to 1.
    rarity = np.clip((-facts.log_frequency - 2) / 8, 0, 1) * ~facts.tokens.special
    return np.rint((GRADES - 1) * rarity).astype(np.int64)


def _special(label: str) -> Of:
    return of_keys(lambda facts: facts.tokens.special & np.array([name == label for name in facts.tokens.labels], bool))


# The catalogue --------------------------------------------------------------------------------------------------

RESTING = "resting"
"""The feature of all tokens on which heads rest: special ones and the first."""

SPECIAL = "special:"
SINK = re.compile(rf"{SPECIAL}|first$|resting$")
"""The features that tell these tokens apart, by name."""

WITHIN = 4
"""How far away tokens are that are called near, in tokens."""

_SIDES = {"": (0, ""), "_left": (-1, " to the left"), "_right": (1, " to the right")}


_KINDS = {
    "punctuation": ("punctuation", 2),
    "sentence_end": ("sentence ends", 3),
    "comma": ("commas", 3),
    "colon": ("colons", 3),
    "dash": ("dashes", 3),
    "quote": ("quotation marks", 3),
    "bracket": ("brackets", 3),
    "newline": ("line breaks", 3),
    "digit": ("digits", 3),
    "capital": ("capitalised words", 4),
    "name": ("capitalised words within a sentence", 4),
    "word": ("words", 4),
    "piece": ("word pieces", 4),
    "frequent": ("frequent words", 4),
    "infrequent": ("rarer words", 4),
    **{name: (f"English {name}", 4) for name in (*CLOSED_CLASSES, *OPEN_CLASSES)},
}
"""Kinds of tokens: their name in descriptions, and their rank."""


def catalogue(special_labels: Sequence[str]) -> list[Feature]:
    """Return all features, the simplest first where two are alike.

    They depend on which of the tokenizer's special tokens occur.
    """
    is_first = of_keys(lambda facts: np.arange(facts.n) == 0)
    is_last = of_keys(lambda facts: np.arange(facts.n) == facts.n - 1)
    rests = of_keys(lambda facts: facts.tokens.special | (np.arange(facts.n) == 0))
    return [
        *_offsets(),
        *(Feature(SPECIAL + label, label, "key", 1, _special(label)) for label in special_labels),
        Feature("first", "the first token", "key", 2, is_first),
        Feature("last", "the last token", "key", 3, is_last),
        Feature(RESTING, "special and first tokens", "key", 3, rests),
        *(Feature(name, words, "key", rank, _of_class(name)) for name, (words, rank) in _KINDS.items()),
        Feature("rarity", "rare tokens", "graded", 5, of_keys(_rarity), GRADES, "infrequent"),
        Feature("same", "the same token", "group", 2, _same(lambda facts: facts.tokens.ids)),
        Feature("same_elsewhere", "the same token elsewhere", "group", 2, _same(lambda facts: facts.tokens.ids, True)),
        Feature("same_word", "other pieces of its word", "group", 2, _same(lambda facts: facts.word, True)),
        Feature("word_start", "the first piece of its word", "list", 3, _start_of(lambda facts: facts.word)),
        *_stretch("sentence", lambda facts: facts.sentence),
        *_stretch("clause", lambda facts: facts.clause),
        *_nearest_sides("sentence_end", "sentence end", 4, "sentence_end"),
        *_nearest_sides("punctuation", "punctuation mark", 4, "punctuation"),
        *_nearest_sides("rarer", "rarer word", 5, "infrequent"),
        Feature("induction", "what followed the same token before", "list", 3, _shifted_same(-1, only_before=True)),
        Feature("after_same", "what follows the same token elsewhere", "list", 4, _shifted_same(-1)),
        Feature("before_same", "what stands before the same token elsewhere", "list", 4, _shifted_same(1)),
        Feature("likeness", "other tokens like it", "graded", 5, _likeness, GRADES, "alike"),
        Feature("alike", "other tokens much like it", "group", 5, _is_alike),
        *_stretch("line", lambda facts: facts.line),
        Feature("indentation", "lines of the same indentation", "group", 5, _same(lambda facts: facts.indentation)),
        Feature("brackets", "the same brackets", "group", 4, _same(lambda facts: facts.opener)),
        Feature("opener", "the bracket that it stands in", "list", 4, _opener),
    ]


def _offsets() -> list[Feature]:
    """Return the features of distances."""
    # Single offsets, up to the farthest with a feature of its own.
    features = [Feature("self", "the token itself", "offset", 0, _at(0))]
    for n in range(1, FARTHEST_OFFSET + 1):
        for sign, word in ((-1, "before"), (1, "after")):
            words = f"the token {n} {word}" if n > 1 else f"the {'next' if sign > 0 else 'previous'} token"
            features.append(Feature(f"offset{sign * n:+d}", words, "offset", n - 1, _at(sign * n)))
    # Sides, and distances as numbers on either side.
    features.append(Feature("left", "to the left", "offset", 5, _of_offset(lambda d: d < 0)))
    features.append(Feature("right", "to the right", "offset", 5, _of_offset(lambda d: d > 0)))
    graded = (
        ("near", "near tokens", lambda d: _LOG_STEPS * np.log2(1 + d)),
        ("window", "nearby tokens", lambda d: d),
    )
    for name, words, far in graded:
        for side, (sign, where) in _SIDES.items():
            shown_by = f"within{side}"
            features.append(Feature(f"{name}{side}", words + where, "graded", 5, _near(sign, far), FARTHEST, shown_by))
    for side, (sign, where) in _SIDES.items():
        words = f"tokens at most {WITHIN} away{where}"
        features.append(Feature(f"within{side}", words, "offset", 4, _within(sign)))
    return features


def _nearest_sides(name: str, words: str, rank: int, kind: str) -> list[Feature]:
    """Return the last key of a class, and the next one."""
    return [
        Feature(f"{side}_{name}", f"the {side} {words}", "list", rank, _nearest(kind, after=side == "next"))
        for side in ("last", "next")
    ]


def _stretch(name: str, numbers: Callable[[TextFacts], NDArray[np.int64]]) -> list[Feature]:
    """Return the query's own sentence, clause or line, and the start of it."""
    return [
        Feature(name, f"the same {name}", "group", 4, _same(numbers)),
        Feature(f"{name}_start", f"the start of its {name}", "list", 4, _start_of(numbers)),
    ]
