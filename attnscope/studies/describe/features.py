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
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES
from attnscope.studies.describe.facts import TextFacts

Levels = NDArray[np.uint8]
Numbers = NDArray[np.int64]

Family = Literal["key", "offset", "group", "list", "graded"]
"""The property that a feature depends on: the key alone, its distance from the query, being in one group with the
query, being on a list of keys that the query has; or a number."""

GRADES = 16
"""Levels of a feature that is a number."""

FARTHEST, FARTHEST_OFFSET = 32, 9
"""Levels of distances, beyond which tokens are as far as these; and the farthest token with a feature of its own."""

WITHIN = 4
"""How far away tokens are that are called near, in tokens."""

RESTING = "resting"
"""The feature of all tokens on which heads rest: special ones and the first."""

SPECIAL = "special:"
SINK = re.compile(rf"{SPECIAL}|first$|resting$")
"""The features that tell these tokens apart, by name."""

_LOG_STEPS = 3.0
_SIDES = {"": (0, ""), "_left": (-1, " to the left"), "_right": (1, " to the right")}

_KINDS = {
    "punctuation": ("punctuation", 2),
    "sentence_end": ("sentence ends", 3),
    "comma": ("commas", 3),
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

Of = Callable[[TextFacts, Numbers], NDArray[np.generic]]
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


def blocks_of(features: Sequence[Feature], facts: TextFacts, queries: Numbers) -> Levels:
    """Return the levels of features for some queries of a text, (feature, query, key), uint8."""
    blocks = np.empty((len(features), len(queries), facts.n), np.uint8)
    for number, feature in enumerate(features):
        blocks[number] = feature.of(facts, queries)
    return blocks


def catalogue(special_labels: Sequence[str]) -> list[Feature]:
    """Return all features, the simplest first where two are alike.

    They depend on which of the tokenizer's special tokens occur.
    """
    is_first = _of_keys(lambda facts: np.arange(facts.n) == 0)
    rests = _of_keys(lambda facts: facts.tokens.special | (np.arange(facts.n) == 0))
    features = _offsets()
    features += [Feature(SPECIAL + label, label, "key", 1, _of_label(label)) for label in special_labels]
    features.append(Feature("first", "the first token", "key", 2, is_first))
    features.append(Feature(RESTING, "special and first tokens", "key", 3, rests))
    features += [Feature(name, words, "key", rank, _of_class(name)) for name, (words, rank) in _KINDS.items()]
    return [
        *features,
        Feature("rarity", "rare tokens", "graded", 5, _of_keys(_rarity), GRADES, "infrequent"),
        Feature("same", "the same token", "group", 2, _same(lambda facts: facts.tokens.ids)),
        Feature("same_elsewhere", "the same token elsewhere", "group", 2, _same_elsewhere),
        Feature("sentence", "the same sentence", "group", 4, _same(lambda facts: facts.sentence)),
        Feature("sentence_start", "the start of its sentence", "list", 4, _start_of(lambda facts: facts.sentence)),
        Feature("last_punctuation", "the last punctuation mark", "list", 4, _last_mark),
        Feature("induction", "what followed the same token before", "list", 3, _induction),
        Feature("likeness", "other tokens like it", "graded", 5, _likeness, GRADES, "alike"),
        Feature("alike", "other tokens much like it", "group", 5, _is_alike),
        Feature("line", "the same line", "group", 4, _same(lambda facts: facts.line)),
        Feature("line_start", "the start of its line", "list", 4, _start_of(lambda facts: facts.line)),
        Feature("opener", "the bracket that it stands in", "list", 4, _opener),
    ]


# Distances


def _offsets() -> list[Feature]:
    """Return the features of distances."""
    # Single offsets, up to the farthest with a feature of its own.
    features = [Feature("self", "the token itself", "offset", 0, _of_offset(partial(np.equal, 0)))]
    for n in range(1, FARTHEST_OFFSET + 1):
        for offset, side, nearest in ((-n, "before", "previous"), (n, "after", "next")):
            words = f"the token {n} {side}" if n > 1 else f"the {nearest} token"
            levels = _of_offset(partial(np.equal, offset))
            features.append(Feature(f"offset{offset:+d}", words, "offset", n - 1, levels))
    # Sides, and distances as numbers on either side.
    features.append(Feature("left", "to the left", "offset", 5, _of_offset(partial(np.greater, 0))))
    features.append(Feature("right", "to the right", "offset", 5, _of_offset(partial(np.less, 0))))
    for name, words, is_log in (("near", "near tokens", True), ("window", "nearby tokens", False)):
        for side, (sign, where) in _SIDES.items():
            near = _near(sign, is_log=is_log)
            features.append(Feature(f"{name}{side}", words + where, "graded", 5, near, FARTHEST, f"within{side}"))
    for side, (sign, where) in _SIDES.items():
        words = f"tokens at most {WITHIN} away{where}"
        features.append(Feature(f"within{side}", words, "offset", 4, _within(sign)))
    return features


def _of_offset(levels: Callable[[Numbers], NDArray[np.generic]]) -> Of:
    """Return levels that depend on the distance alone, key minus query, in tokens."""
    return lambda facts, queries: levels(np.arange(facts.n) - queries[:, None])


def _within(side: int) -> Of:
    return _of_offset(lambda d: (np.abs(d) <= WITHIN) & (d * side >= 0))


def _near(side: int, *, is_log: bool) -> Of:
    """Return the higher, the nearer: the highest level less the distance or its logarithm."""

    def levels(d: Numbers) -> Numbers:
        # 0 on the other side of the query and from FARTHEST - 1 steps on.
        away = np.abs(d)
        steps = np.rint(_LOG_STEPS * np.log2(1 + away)).astype(np.int64) if is_log else away
        return np.where(d * side >= 0, np.clip(FARTHEST - 1 - steps, 0, None), 0)

    return _of_offset(levels)


# Kinds of keys


def _of_keys(levels: Callable[[TextFacts], NDArray[np.generic]]) -> Of:
    """Return levels that depend on the key alone, (token,)."""
    return lambda facts, queries: np.broadcast_to(levels(facts), (len(queries), facts.n))


def _of_class(name: str) -> Of:
    return _of_keys(lambda facts: facts.classes[name])


def _of_label(label: str) -> Of:
    return _of_keys(lambda facts: facts.tokens.special & (np.array(facts.tokens.labels, object) == label))


def _rarity(facts: TextFacts) -> Numbers:
    # ln frequency from -2 (common) to -10 (rare) becomes 0 to 1.
    rarity = np.clip((-facts.log_frequency - 2) / 8, 0, 1) * ~facts.tokens.special
    return np.rint((GRADES - 1) * rarity).astype(np.int64)


# Relations of a query and a key


def _same(numbers: Callable[[TextFacts], Numbers]) -> Of:
    """Find keys that have the query's number."""
    return lambda facts, queries: np.equal.outer(numbers(facts)[queries], numbers(facts))


def _same_elsewhere(facts: TextFacts, queries: Numbers) -> NDArray[np.generic]:
    ids = facts.tokens.ids
    elsewhere: NDArray[np.bool_] = np.not_equal.outer(queries, np.arange(facts.n))
    return elsewhere & np.equal.outer(ids[queries], ids)


def _start_of(numbers: Callable[[TextFacts], Numbers]) -> Of:
    """Find the first token of the query's own group."""

    def start(facts: TextFacts, queries: Numbers) -> NDArray[np.generic]:
        groups = numbers(facts)
        is_first: NDArray[np.bool_] = np.append(True, groups[1:] != groups[:-1])
        return is_first & np.equal.outer(groups[queries], groups)

    return start


def _last_mark(facts: TextFacts, queries: Numbers) -> NDArray[np.generic]:
    # The place of the last mark before each query; -1 = there is none.
    marks = np.append(-1, np.flatnonzero(facts.classes["punctuation"]))
    last = marks[np.searchsorted(marks, queries) - 1]
    is_last: NDArray[np.bool_] = np.equal.outer(last, np.arange(facts.n))
    return is_last


def _induction(facts: TextFacts, queries: Numbers) -> NDArray[np.generic]:
    """Find keys up to the query that follow its token, elsewhere."""
    ids = facts.tokens.ids
    before = np.append(-1, ids[:-1])
    is_earlier: NDArray[np.bool_] = np.greater.outer(queries, np.arange(facts.n))
    follows: NDArray[np.bool_] = np.equal.outer(ids[queries], before)
    return is_earlier & follows


def _opener(facts: TextFacts, queries: Numbers) -> NDArray[np.generic]:
    """Find the innermost bracket that is open at the query."""
    is_opener: NDArray[np.bool_] = np.equal.outer(facts.opener[queries], np.arange(facts.n))
    return is_opener


def _likeness(facts: TextFacts, queries: Numbers) -> Numbers:
    if facts.embeddings is None:
        return np.zeros((len(queries), facts.n), np.int64)
    # Cosines of 0 to 1, without keys of the query's own token.
    cosine = facts.embeddings[queries] @ facts.embeddings.T
    is_other = facts.tokens.ids[queries][:, None] != facts.tokens.ids
    levels: Numbers = np.rint((GRADES - 1) * np.clip(cosine, 0, 1) * is_other).astype(np.int64)
    return levels


def _is_alike(facts: TextFacts, queries: Numbers) -> NDArray[np.generic]:
    return _likeness(facts, queries) >= GRADES // 2
