"""Work out the features of which descriptions are made: properties of a key that a query may see. NumPy alone.

`catalogue` declares them, `TextFacts` reads a text once, and `blocks_of` turns both into levels. `core.descriptions`
fits features, and knows none by name.

Source:
    Heads were described by delimiters, offsets and the first token in Clark et al. 2019, section 3; by offsets and rare
    words in Voita et al. 2019, section 4; by induction in Olsson et al. 2022, section 2; by sinks in Xiao et al. 2024,
    section 3.1. Windows: Press et al. 2022, section 3. The others are ours.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.results.tokens import Tokens
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of

Flags = NDArray[np.bool_]
Levels = NDArray[np.uint8]
Numbers = NDArray[np.int64]

GRADES = 16
"""Levels of a feature that is a number."""

FARTHEST = 32
"""Levels of a feature that is a distance; all tokens beyond have the lowest level."""

FARTHEST_OFFSET = 9
"""How far away the farthest token is that has a feature of its own."""

WITHIN = 4
"""The features `within` are about tokens at most this many tokens away."""

RESTING = "resting"
"""The feature of all tokens on which heads rest: special ones and the first."""

_SPECIAL = "special:"
"""What stands before the label of a special token in the name of its feature."""

_LOG_STEPS = 3.0
"""How many levels a distance has for each doubling."""

_SIDES = {"": (0, ""), "_left": (-1, " to the left"), "_right": (1, " to the right")}
"""The ending of a feature's name, with the sign of the distances of that side (0 = both), and its words."""

_SENTENCE_ENDS = frozenset(".!?…。！？")
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_QUOTES = "\"'“”‘’«»„`"
_CLOSING = "\"'”’»)]}"
_SIGNS = {
    "comma": ",，、",
    "dash": "-—–",
    "quote": _QUOTES,
    "bracket": "([{)]}",
    "opening": _QUOTES + "([{",
}
_WRITTEN_KINDS = (
    *_SIGNS,
    "punctuation",
    "sentence_end",
    "digit",
    "capital",
    "word",
    *CLOSED_CLASSES,
    *OPEN_CLASSES,
)
"""The kinds of tokens that are told by how a token is written: see `_kinds_of`."""

# The catalogue


@dataclass(frozen=True)
class Feature:
    """Hold a property of a key that a query may see, which has one level for each pair of query and key.

    Attributes:
        name: Its name in files.
        words: Its name in a description, such as "the previous token".
        about: What it is a property of: a sink on which heads rest, the kind of the key whatever the query is, the
            distance of the key, or another relation of query and key. A description has a part for each.
        rank: How simple it is; of features that explain alike, the one with the smallest rank is taken.
        levels: How many levels it has.
        shown_by: Where it has several levels: the name of the feature of two levels that marks the tokens with high
            ones.
    """

    name: str
    words: str
    about: Literal["sink", "kind", "distance", "relation"]
    rank: int
    levels: int = 2
    shown_by: str = ""


_KINDS = {
    "punctuation": "punctuation",
    "sentence_end": "sentence ends",
    "comma": "commas",
    "dash": "dashes",
    "quote": "quotation marks",
    "bracket": "brackets",
    "newline": "line breaks",
    "digit": "digits",
    "capital": "capitalised words",
    "name": "capitalised words within a sentence",
    "word": "words",
    "piece": "word pieces",
    "frequent": "frequent words",
    "infrequent": "rarer words",
    **{name: f"English {name}" for name in (*CLOSED_CLASSES, *OPEN_CLASSES)},
}
"""Kinds of tokens, and their names in descriptions."""

_SIMPLE = ("sentence_end", "comma", "dash", "quote", "bracket", "newline", "digit")
_RANKS = {"punctuation": 2, **dict.fromkeys(_SIMPLE, 3)}
"""Ranks of kinds; those of all others are 4."""

_OTHERS = (
    Feature("rarity", "rare tokens", "kind", 5, GRADES, "infrequent"),
    Feature("same", "the same token", "relation", 2),
    Feature("same_elsewhere", "the same token elsewhere", "relation", 2),
    Feature("sentence", "the same sentence", "relation", 4),
    Feature("sentence_start", "the start of its sentence", "relation", 4),
    Feature("last_punctuation", "the last punctuation mark", "relation", 4),
    Feature("induction", "what followed the same token before", "relation", 3),
    Feature("likeness", "other tokens like it", "relation", 5, GRADES, "alike"),
    Feature("alike", "other tokens much like it", "relation", 5),
    Feature("line", "the same line", "relation", 4),
    Feature("line_start", "the start of its line", "relation", 4),
    Feature("opener", "the bracket that it stands in", "relation", 4),
)


def catalogue(special_labels: Sequence[str]) -> list[Feature]:
    """Return all features; there is one for each special token that occurs, given by its label."""
    # Single offsets, up to the farthest with a feature of its own.
    features = [Feature("self", "the token itself", "distance", 0)]
    for n in range(1, FARTHEST_OFFSET + 1):
        for sign, side, nearest in (("-", "before", "previous"), ("+", "after", "next")):
            words = f"the {nearest} token" if n == 1 else f"the token {n} {side}"
            features.append(Feature(f"offset{sign}{n}", words, "distance", n - 1))
    # Sides, and distances as numbers on either side.
    features += [Feature(side, f"to the {side}", "distance", 5) for side in ("left", "right")]
    for name, words in (("near", "near tokens"), ("window", "nearby tokens")):
        for side, (_, where) in _SIDES.items():
            features.append(
                Feature(name + side, words + where, "distance", 5, FARTHEST, f"within{side}")
            )
    for side, (_, where) in _SIDES.items():
        features.append(Feature(f"within{side}", f"tokens at most {WITHIN} away{where}", "distance", 4))
    # Sinks, kinds of keys, and other relations.
    features += [Feature(_SPECIAL + label, label, "sink", 1) for label in special_labels]
    features.append(Feature("first", "the first token", "sink", 2))
    features.append(Feature(RESTING, "special and first tokens", "sink", 3))
    features += [Feature(name, words, "kind", _RANKS.get(name, 4)) for name, words in _KINDS.items()]
    return [*features, *_OTHERS]


def blocks_of(features: Sequence[Feature], facts: TextFacts, queries: Numbers) -> Levels:
    """Return a block of levels, (query, key), for each feature and some queries: (feature, query, key), uint8."""
    tokens = facts.tokens
    labels = np.array(tokens.labels, object)
    levels = facts.of_keys | _levels_of_distances(facts, queries) | _levels_of_relations(facts, queries)
    blocks = np.empty((len(features), len(queries), facts.n), np.uint8)
    for number, feature in enumerate(features):
        # Levels of the key alone, (key,), are those for all queries.
        if feature.name.startswith(_SPECIAL):
            blocks[number] = tokens.special & (labels == feature.name.removeprefix(_SPECIAL))
        else:
            blocks[number] = levels[feature.name]
    return blocks


def _levels_of_distances(facts: TextFacts, queries: Numbers) -> dict[str, NDArray[Any]]:
    """Return the levels of distances by name, (query, key)."""
    distance = np.arange(facts.n) - queries[:, None]
    away = np.abs(distance)
    levels: dict[str, NDArray[Any]] = {"self": away == 0, "left": distance < 0, "right": distance > 0}
    for n in range(1, FARTHEST_OFFSET + 1):
        levels[f"offset-{n}"] = distance == -n
        levels[f"offset+{n}"] = distance == n
    # The higher, the nearer: the highest level less the distance or its logarithm; 0 on the other side of the query.
    log_steps = np.rint(_LOG_STEPS * np.log2(1 + away)).astype(np.int64)
    for side, (sign, _) in _SIDES.items():
        is_on_side = distance * sign >= 0
        levels[f"within{side}"] = is_on_side & (away <= WITHIN)
        levels[f"near{side}"] = is_on_side * np.maximum(FARTHEST - 1 - log_steps, 0)
        levels[f"window{side}"] = is_on_side * np.maximum(FARTHEST - 1 - away, 0)
    return levels


def _levels_of_relations(facts: TextFacts, queries: Numbers) -> dict[str, NDArray[Any]]:
    """Return the levels of other relations of a query and a key by name, (query, key)."""
    keys = np.arange(facts.n)
    query = queries[:, None]
    ids = facts.tokens.ids
    # The token before each key.
    before = np.append(-1, ids[:-1])
    is_same = ids[query] == ids
    levels: dict[str, NDArray[Any]] = {"same": is_same, "same_elsewhere": is_same & (keys != query)}
    # Keys up to the query that follow its token, elsewhere.
    levels["induction"] = (keys < query) & (ids[query] == before)
    # Groups of tokens that the query is in, and the first token of each.
    for name, numbers in (("sentence", facts.sentence), ("line", facts.line)):
        levels[name] = numbers[query] == numbers
        levels[f"{name}_start"] = levels[name] & _begins(numbers)
    # The last mark before each query, and the innermost bracket that is open there; where there is none, -1, no key.
    marks = np.append(-1, np.flatnonzero(facts.of_keys["punctuation"]))
    levels["last_punctuation"] = marks[np.searchsorted(marks, query) - 1] == keys
    levels["opener"] = facts.opener[query] == keys
    # Cosines of 0 to 1, without keys of the query's own token.
    cosine = np.zeros(is_same.shape)
    if facts.embeddings is not None:
        cosine = np.clip(facts.embeddings[queries] @ facts.embeddings.T, 0, 1)
    levels["likeness"] = np.rint((GRADES - 1) * cosine * ~is_same)
    levels["alike"] = levels["likeness"] >= GRADES // 2
    return levels


def _begins(numbers: NDArray[np.integer]) -> Flags:
    """Return which tokens have another number than the one before, (token,)."""
    return np.append(True, numbers[1:] != numbers[:-1])


# A text


@dataclass(frozen=True, eq=False)
class TextFacts:
    """Hold the facts of one text that features need; each is worked out once.

    Attributes:
        tokens: The text.
        log_frequency: The natural logarithm of each token's relative frequency, (token,).
        frequent: Whether it is among the most frequent words, which together are half of all words, (token,).
        embeddings: Static embeddings of length 1, (token, d); None if they are not known.
    """

    tokens: Tokens
    log_frequency: NDArray[np.float64]
    frequent: Flags
    embeddings: NDArray[np.float32] | None = None

    @cached_property
    def n(self) -> int:
        """Return how many tokens there are."""
        return len(self.tokens)

    @cached_property
    def written(self) -> str:
        """Return the text; both texts of a pair, each on lines of its own."""
        return f"{self.tokens.text}\n{self.tokens.pair or ''}"

    @cached_property
    def spans(self) -> Numbers:
        """Return each token's first and last + 1 character in `written`, (token, 2); -1 = it stands for no text."""
        tokens = self.tokens
        shifts = tokens.segments[:, None].astype(np.int64) * (len(tokens.text) + 1)
        return np.where(tokens.offsets < 0, -1, tokens.offsets + shifts)

    @cached_property
    def surfaces(self) -> list[str]:
        """Return each token as it is written in the text, with its line breaks; special tokens are empty."""
        # The text itself, because the tokenizer's label may have lost case or line breaks; without offsets the label.
        surfaces = [self.written[start:stop] for start, stop in self.spans.tolist()]
        for place, label in enumerate(self.tokens.labels):
            if not surfaces[place] and not self.tokens.special[place]:
                surfaces[place] = label.removeprefix("##").replace("·", " ")
        return surfaces

    @cached_property
    def stripped(self) -> list[str]:
        """Return each token as in `surfaces`, without white space around it."""
        return [surface.strip() for surface in self.surfaces]

    @cached_property
    def of_keys(self) -> dict[str, NDArray[Any]]:
        """Return the levels of features of the key alone by name, each (token,): kinds, sinks, and how rare it is."""
        tokens = self.tokens
        is_ordinary = ~tokens.special
        flags = {name: np.zeros(self.n, np.bool_) for name in _WRITTEN_KINDS}
        for place in np.flatnonzero(is_ordinary).tolist():
            for name in _kinds_of(self.stripped[place]):
                flags[name][place] = True
        # Tokens that go on with a word that has begun, in the same segment.
        is_piece = np.zeros(self.n, np.bool_)
        if tokens.words is not None:
            is_piece = (
                (tokens.words >= 0) & ~_begins(tokens.words) & ~_begins(tokens.segments) & is_ordinary
            )
        for name in ("capital", *OPEN_CLASSES):
            flags[name] &= ~is_piece
        # A name is capitalised, and neither begins a sentence nor follows an opening mark that begins one.
        is_start = _begins(self.sentence)
        is_start[1:] |= (is_start & flags["opening"])[:-1]
        is_first = np.arange(self.n) == 0
        # ln frequency from -2 (common) to -10 (rare) becomes 0 to 1.
        rarity = np.clip((-self.log_frequency - 2) / 8, 0, 1) * is_ordinary
        return {
            **flags,
            "name": flags["capital"] & ~is_start,
            "piece": is_piece,
            "frequent": flags["word"] & self.frequent & ~is_piece,
            "infrequent": flags["word"] & ~self.frequent & ~is_piece,
            # Tokens with a line break in them; where the tokenizer drops line breaks, there are none.
            "newline": np.array(["\n" in surface for surface in self.surfaces], np.bool_) & is_ordinary,
            "first": is_first,
            RESTING: tokens.special | is_first,
            "rarity": np.rint((GRADES - 1) * rarity),
        }

    @cached_property
    def sentence(self) -> Numbers:
        """Return the number of each token's sentence, (token,); special tokens have negative numbers of their own.

        A sentence ends with a mark and the quotes and brackets that close it.
        """
        numbers = -1 - np.arange(self.n)
        number = 0
        has_ended = False
        for place, surface in enumerate(self.stripped):
            if self.tokens.special[place] or not surface:
                continue
            is_end = surface[0] in _SENTENCE_ENDS
            # A closing mark belongs to the sentence before it, unless a space stands between them: as the character
            # before the token, or as the token's own first one.
            start = max(0, int(self.spans[place, 0]))
            around_start = self.written[max(0, start - 1) : start] + self.surfaces[place][:1]
            closes = is_end or (surface[0] in _CLOSING and not any(map(str.isspace, around_start)))
            if has_ended and not closes:
                number += 1
                has_ended = False
            numbers[place] = number
            has_ended = has_ended or is_end
        # Both texts of a pair have sentences of their own.
        return np.where(numbers < 0, numbers, numbers + self.n * self.tokens.segments)

    @cached_property
    def line(self) -> Numbers:
        """Return the number of each token's line, (token,); tokens that stand for no text have numbers of their own."""
        # Spans count characters, so line breaks are found in code points, not bytes.
        starts = self.spans[:, 0]
        breaks = np.flatnonzero(np.frombuffer(self.written.encode("utf-32-le"), "<u4") == ord("\n"))
        return np.where(starts >= 0, np.searchsorted(breaks, starts), -1 - np.arange(self.n))

    @cached_property
    def opener(self) -> Numbers:
        """Return the place of the innermost opening bracket around each token, (token,); -1 = none.

        A token that opens or closes a bracket is within it.
        """
        # Brackets that are open, and the place of each.
        signs = [""]
        places = [-1]
        openers = np.full(self.n, -1, np.int64)
        for place, surface in enumerate(self.stripped):
            innermost_before = places[-1]
            # Special tokens write nothing.
            written = "" if self.tokens.special[place] else surface
            for sign in written:
                # A closing bracket ends the innermost open one, if it is of the same kind.
                if sign in _BRACKETS.values():
                    signs.append(sign)
                    places.append(place)
                elif sign in _BRACKETS and signs[-1] == _BRACKETS[sign]:
                    signs.pop()
                    places.pop()
            # The later of the two is the inner one: what this token closes, or what it opens.
            openers[place] = max(innermost_before, places[-1])
        return openers


@cache
def _kinds_of(surface: str) -> frozenset[str]:
    """Return the kinds of a token by how it is written; see `TextFacts.of_keys`."""
    if not surface:
        return frozenset()
    # By the first character, by the whole of it, then by lists of English words.
    kinds = {name for name, signs in _SIGNS.items() if surface[0] in signs}
    if all(unicodedata.category(character)[0] in "PS" for character in surface):
        kinds.add("punctuation")
        if surface[0] in _SENTENCE_ENDS:
            kinds.add("sentence_end")
    if any(map(str.isdigit, surface)):
        kinds.add("digit")
    if any(map(str.isalpha, surface)):
        kinds.add("word")
    if surface[0].isupper():
        kinds.add("capital")
    lower = surface.lower()
    kinds |= {name for name, words in CLOSED_CLASSES.items() if lower in words}
    open_class = class_of(lower)
    if open_class in OPEN_CLASSES:
        kinds.add(open_class)
    return frozenset(kinds)
