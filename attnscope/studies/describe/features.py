"""Compute the features that descriptions are made of: properties of a key, some of them relative to a query.

A feature has a level for each pair of query and key: 0 or 1 for a property that a key has or does not have, 0 to
`levels` - 1 for a degree. `catalogue` declares the features, `FeatureFacts` reads a text once, and `blocks_of` computes
the levels, with NumPy alone. `core.descriptions` fits features without knowing their names.

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
Integers = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]
"""Arrays by name."""

GRADES = 16
"""How many levels a degree such as rarity has."""

DISTANCES = 32
"""How many levels a distance has: the nearest key has the highest level, and all distant keys have level 0."""

MAX_OFFSET = 9
"""The largest offset with a feature of its own, such as "the token 9 before"."""

WITHIN = 4
"""The features `within` mark tokens at most this many tokens away."""

RESTING = "resting"
"""The feature of all tokens on which heads rest: special ones and the first."""

_SPECIAL = "special:"
"""The prefix of the features of single special tokens, such as "special:[CLS]"."""

_LOG_STEPS = 3.0
"""By how many levels the features `near` fall when the distance + 1 doubles."""

_SIDES = {"": (0, ""), "_left": (-1, " to the left"), "_right": (1, " to the right")}
"""Suffix of a feature's name -> the sign of the offsets on that side (0 = both sides), and the suffix of its words."""

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
"""The kinds of tokens that follow from how a token is written: see `_kinds_of`."""

# The catalogue


@dataclass(frozen=True)
class Feature:
    """Declare a property of a key, which has a level for each pair of query and key.

    Attributes:
        name: Its name in files.
        words: Its name in a description, such as "the previous token".
        about: What it tells: that the key is a sink on which heads rest, the kind of the key whatever the query is, its
            distance from the query, or another relation of both.
        rank: Its complexity: of features that explain equally much, the one with the smallest rank is taken.
        levels: How many levels it has.
        shown_by: For a feature of more than two levels: the name of one with two, which marks the keys of high level.
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
"""The kinds of tokens -> their names in descriptions."""

_SIMPLE_KINDS = ("sentence_end", "comma", "dash", "quote", "bracket", "newline", "digit")
_RANKS = {"punctuation": 2, **dict.fromkeys(_SIMPLE_KINDS, 3)}
"""The ranks of kinds; all other kinds have rank 4."""

_OTHER_FEATURES = (
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
    """Return all features, one of them for each label of a special token."""
    # Single offsets.
    features = [Feature("self", "the token itself", "distance", 0)]
    for n in range(1, MAX_OFFSET + 1):
        for sign, side, nearest in (("-", "before", "previous"), ("+", "after", "next")):
            words = f"the {nearest} token" if n == 1 else f"the token {n} {side}"
            features.append(Feature(f"offset{sign}{n}", words, "distance", rank=n - 1))
    # Distances, on both sides together and on either side.
    features += [Feature(side, f"to the {side}", "distance", rank=5) for side in ("left", "right")]
    for suffix, (_, where) in _SIDES.items():
        within = f"within{suffix}"
        features += [
            Feature(f"near{suffix}", f"near tokens{where}", "distance", 5, DISTANCES, within),
            Feature(f"window{suffix}", f"nearby tokens{where}", "distance", 5, DISTANCES, within),
            Feature(within, f"tokens at most {WITHIN} away{where}", "distance", rank=4),
        ]
    # Sinks, kinds of keys, and other relations.
    features += [Feature(_SPECIAL + label, label, "sink", rank=1) for label in special_labels]
    features.append(Feature("first", "the first token", "sink", rank=2))
    features.append(Feature(RESTING, "special and first tokens", "sink", rank=3))
    features += [Feature(name, words, "kind", _RANKS.get(name, 4)) for name, words in _KINDS.items()]
    return [*features, *_OTHER_FEATURES]


def blocks_of(features: Sequence[Feature], facts: FeatureFacts, queries: Integers) -> Levels:
    """Compute the levels of features for some queries, (feature, query, key), uint8."""
    tokens = facts.tokens
    labels = np.array(tokens.labels, object)
    # Levels by the name of the feature: (query, key); or (key,), if they are the same for all queries.
    levels = facts.of_keys | _levels_of_distances(facts, queries) | _levels_of_relations(facts, queries)
    blocks = np.empty((len(features), len(queries), facts.n), np.uint8)
    for block, feature in zip(blocks, features, strict=True):
        if feature.name.startswith(_SPECIAL):
            block[:] = tokens.special & (labels == feature.words)
        else:
            block[:] = levels[feature.name]
    return blocks


def _levels_of_distances(facts: FeatureFacts, queries: Integers) -> Arrays:
    """Return the levels of distances by the name of the feature, (query, key)."""
    offset = np.arange(facts.n) - queries[:, None]
    distance = np.abs(offset)
    levels: Arrays = {"self": offset == 0, "left": offset < 0, "right": offset > 0}
    for n in range(1, MAX_OFFSET + 1):
        levels[f"offset-{n}"] = offset == -n
        levels[f"offset+{n}"] = offset == n
    # Nearer keys have higher levels. On the wrong side of the query the level is 0.
    log_steps = np.rint(_LOG_STEPS * np.log2(1 + distance)).astype(np.int64)
    for suffix, (sign, _) in _SIDES.items():
        is_on_side = offset * sign >= 0
        levels[f"within{suffix}"] = is_on_side & (distance <= WITHIN)
        levels[f"near{suffix}"] = is_on_side * np.maximum(DISTANCES - 1 - log_steps, 0)
        levels[f"window{suffix}"] = is_on_side * np.maximum(DISTANCES - 1 - distance, 0)
    return levels


def _levels_of_relations(facts: FeatureFacts, queries: Integers) -> Arrays:
    """Return the levels of other relations of a query and a key by the name of the feature, (query, key)."""
    keys = np.arange(facts.n)
    query = queries[:, None]
    ids = facts.tokens.ids
    is_same = ids[query] == ids
    levels: Arrays = {"same": is_same, "same_elsewhere": is_same & (keys != query)}
    # Keys before the query that follow an earlier occurrence of its token.
    previous_ids = np.append(-1, ids[:-1])
    levels["induction"] = (keys < query) & (ids[query] == previous_ids)
    # The query's own sentence or line, and its first token.
    for name, group_ids in (("sentence", facts.sentence), ("line", facts.line)):
        levels[name] = group_ids[query] == group_ids
        levels[f"{name}_start"] = levels[name] & _begins(group_ids)
    # The last mark before each query, and the bracket that the query stands in. -1 = there is none: it equals no key.
    marks = np.append(-1, np.flatnonzero(facts.of_keys["punctuation"]))
    levels["last_punctuation"] = marks[np.searchsorted(marks, query) - 1] == keys
    levels["opener"] = facts.opener[query] == keys
    # Cosines, clipped to 0 to 1; 0 for keys with the query's own token.
    cosine = np.zeros(is_same.shape)
    if facts.embeddings is not None:
        cosine = np.clip(facts.embeddings[queries] @ facts.embeddings.T, 0, 1)
    levels["likeness"] = np.rint((GRADES - 1) * cosine * ~is_same)
    levels["alike"] = levels["likeness"] >= GRADES // 2
    return levels


def _begins(group_ids: NDArray[np.integer]) -> Flags:
    """Return which tokens begin a group, (token,): the token before has another id; the first token begins one."""
    return np.append(True, group_ids[1:] != group_ids[:-1])


# A text


@dataclass(frozen=True, eq=False)
class FeatureFacts:
    """Hold the facts of one text that features need; each is computed once.

    Attributes:
        tokens: The text.
        log_frequency: The natural logarithm of each token's relative frequency, (token,).
        frequent: Whether the token is among the frequent words, which are half of all words in a text, (token,).
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
        """Return the text; of a pair both texts, with a line break between them."""
        return f"{self.tokens.text}\n{self.tokens.pair or ''}"

    @cached_property
    def spans(self) -> Integers:
        """Return where each token's characters begin and end in `written`, (token, 2); -1 = it stands for no text."""
        tokens = self.tokens
        # Offsets are within a text: those of the second text of a pair (segment 1) are shifted behind the first.
        shifts = tokens.segments[:, None].astype(np.int64) * (len(tokens.text) + 1)
        return np.where(tokens.offsets < 0, -1, tokens.offsets + shifts)

    @cached_property
    def surfaces(self) -> list[str]:
        """Return each token as it is written in the text, with its line breaks; special tokens are empty."""
        # Labels may lack case or line breaks: they stand in only where a token has no span in the text.
        surfaces = [self.written[start:stop] for start, stop in self.spans.tolist()]
        for position, label in enumerate(self.tokens.labels):
            if not surfaces[position] and not self.tokens.special[position]:
                surfaces[position] = label.removeprefix("##").replace("·", " ")
        return surfaces

    @cached_property
    def stripped(self) -> list[str]:
        """Return each token as in `surfaces`, without white space around it."""
        return [surface.strip() for surface in self.surfaces]

    @cached_property
    def of_keys(self) -> Arrays:
        """Return the levels of features of the key alone by name, (token,) each: its kinds, sinks and rarity."""
        tokens = self.tokens
        is_ordinary = ~tokens.special
        flags = {name: np.zeros(self.n, np.bool_) for name in _WRITTEN_KINDS}
        for position in np.flatnonzero(is_ordinary).tolist():
            for name in _kinds_of(self.stripped[position]):
                flags[name][position] = True
        # Pieces continue a word of the same segment; `words` numbers the words of a segment, -1 = none.
        is_piece = np.zeros(self.n, np.bool_)
        if tokens.words is not None:
            continues = ~_begins(tokens.words) & ~_begins(tokens.segments)
            is_piece = (tokens.words >= 0) & continues & is_ordinary
        for name in ("capital", *OPEN_CLASSES):
            flags[name] &= ~is_piece
        # Capitals at the start of a sentence make no name, nor do those behind an opening mark at its start.
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
    def sentence(self) -> Integers:
        """Return the id of each token's sentence, (token,). Special and blank tokens have negative ids of their own.

        A sentence ends with an end mark, and with the quotes and brackets that close behind it.
        """
        sentence_ids = -1 - np.arange(self.n)
        sentence_id = 0
        has_ended = False
        for position, surface in enumerate(self.stripped):
            if self.tokens.special[position] or not surface:
                continue
            is_end = surface[0] in _SENTENCE_ENDS
            # A closing mark belongs to the sentence before it, unless a space stands between them: the character before
            # the token, or the token's own first one.
            start = max(0, int(self.spans[position, 0]))
            around_start = self.written[max(0, start - 1) : start] + self.surfaces[position][:1]
            closes = is_end or (surface[0] in _CLOSING and not any(map(str.isspace, around_start)))
            if has_ended and not closes:
                sentence_id += 1
                has_ended = False
            sentence_ids[position] = sentence_id
            has_ended = has_ended or is_end
        # Both texts of a pair have sentences of their own: there are at most n in the first.
        return np.where(sentence_ids < 0, sentence_ids, sentence_ids + self.n * self.tokens.segments)

    @cached_property
    def line(self) -> Integers:
        """Return the id of each token's line, (token,). Tokens without text have negative ids of their own."""
        # Spans count characters: in UTF-32, each is one number.
        starts = self.spans[:, 0]
        breaks = np.flatnonzero(np.frombuffer(self.written.encode("utf-32-le"), "<u4") == ord("\n"))
        return np.where(starts >= 0, np.searchsorted(breaks, starts), -1 - np.arange(self.n))

    @cached_property
    def opener(self) -> Integers:
        """Return the position of the innermost opening bracket around each token, (token,); -1 = none.

        A token that opens or closes a bracket is within it.
        """
        # A stack of the brackets that are open: their signs and positions. Its bottom stands for no bracket.
        signs = [""]
        positions = [-1]
        openers = np.full(self.n, -1, np.int64)
        for position, surface in enumerate(self.stripped):
            innermost_before = positions[-1]
            # Special tokens write nothing.
            written = "" if self.tokens.special[position] else surface
            for sign in written:
                # A closing bracket ends the innermost open one, if it is of the same kind.
                if sign in _BRACKETS.values():
                    signs.append(sign)
                    positions.append(position)
                elif sign in _BRACKETS and signs[-1] == _BRACKETS[sign]:
                    signs.pop()
                    positions.pop()
            # The inner one of the bracket that is open before the token and the one that is open behind it.
            openers[position] = max(innermost_before, positions[-1])
        return openers


@cache
def _kinds_of(surface: str) -> frozenset[str]:
    """Return the kinds of a token by how it is written; see `FeatureFacts.of_keys`."""
    if not surface:
        return frozenset()
    # Kinds by the first character, by all characters, by any of them, then by lists of English words.
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
