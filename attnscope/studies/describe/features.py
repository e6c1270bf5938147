"""Compute the features that descriptions of heads are made of: properties of a key, some of them relative to a query.

A feature has an integer *level* for each pair of query and key. A binary feature has level 0 or 1. A graded one, such
as rarity, has levels from 0 to `levels` - 1. `list_features` declares the features, `FeatureFacts` reads a text once,
and `compute_levels` computes the levels. `core.descriptions` fits features without knowing their names.

A *sink* is a key on which heads rest whatever the query is: a special token or the first token.

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

from attnscope.arrays import Flags, Integers, Levels
from attnscope.results.tokens import Tokens
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of

Arrays = dict[str, NDArray[Any]]
"""Arrays by name."""

N_GRADES = 16
"""The number of levels of a graded feature, such as rarity."""

N_DISTANCE_LEVELS = 32
"""The number of levels of a distance: the nearest key has the highest level, and all distant keys have level 0."""

MAX_OFFSET = 9
"""The largest offset with a feature of its own, such as "the token 9 before"."""

MAX_NEAR_DISTANCE = 4
"""The largest distance of the keys that the features `within`, `within_left` and `within_right` mark, in tokens."""

RESTING = "resting"
"""The name of the feature that all sinks have."""

_SPECIAL_PREFIX = "special:"
"""The prefix of the features of single special tokens, such as "special:[CLS]"."""

_LOG_STEPS = 3.0
"""The levels of the features `near` fall by this number each time that distance + 1 doubles."""

_SIDE_BY_SUFFIX = {"": (0, ""), "_left": (-1, " to the left"), "_right": (1, " to the right")}
"""Suffix of a feature's name -> the sign of the offsets on its side (0 for both sides), and the suffix of its words."""

_SENTENCE_ENDS = frozenset(".!?…。！？")
_OPENER_BY_CLOSER = {")": "(", "]": "[", "}": "{"}
_QUOTES = "\"'“”‘’«»„`"
_CLOSING = "\"'”’»)]}"
# All quotation marks count as opening, because a mark that closes in one language opens in another: “so”, „so“, »so«.
_CHARACTERS_BY_KIND = {
    "comma": ",，、",
    "dash": "-—–",
    "quote": _QUOTES,
    "bracket": "([{)]}",
    "opening": _QUOTES + "([{",
}
_SPELLING_KINDS = (
    *_CHARACTERS_BY_KIND,
    "punctuation",
    "sentence_end",
    "digit",
    "capital",
    "word",
    *CLOSED_CLASSES,
    *OPEN_CLASSES,
)
"""The kinds of tokens that depend on the token's spelling alone: see `_find_kinds`."""

# The list of features


@dataclass(frozen=True)
class Feature:
    """Declare a property of a key, which has a level for each pair of query and key.

    Attributes:
        name: Its name in files.
        words: Its name in a description, such as "the previous token".
        about: What it depends on: "sink" or "kind", on the key alone; "distance", on the distance of key and query;
            "relation", on both in another way.
        rank: Its complexity. Of features that explain equally much, the one with the smallest rank is used.
        levels: The number of its levels.
        shown_by: For a graded feature, the name of the binary feature that marks the keys of high level; "" for a
            binary feature.
    """

    name: str
    words: str
    about: Literal["sink", "kind", "distance", "relation"]
    rank: int
    levels: int = 2
    shown_by: str = ""


_WORDS_BY_KIND = {
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
"""Kind of token -> its words in descriptions. Each kind is a feature of that name."""

_SIMPLE_KINDS = ("sentence_end", "comma", "dash", "quote", "bracket", "newline", "digit")
_RANK_BY_KIND = {"punctuation": 2, **dict.fromkeys(_SIMPLE_KINDS, 3)}
"""Kind of token -> its rank. All other kinds have rank 4."""

_OTHER_FEATURES = (
    Feature("rarity", "rare tokens", "kind", 5, N_GRADES, "infrequent"),
    Feature("same", "the same token", "relation", 2),
    Feature("same_elsewhere", "the same token elsewhere", "relation", 2),
    Feature("sentence", "the same sentence", "relation", 4),
    Feature("sentence_start", "the start of its sentence", "relation", 4),
    Feature("last_punctuation", "the last punctuation mark", "relation", 4),
    Feature("induction", "what followed the same token before", "relation", 3),
    Feature("likeness", "other tokens like it", "relation", 5, N_GRADES, "alike"),
    Feature("alike", "other tokens much like it", "relation", 5),
    Feature("line", "the same line", "relation", 4),
    Feature("line_start", "the start of its line", "relation", 4),
    Feature("opener", "the bracket that it stands in", "relation", 4),
)


def list_features(special_labels: Sequence[str]) -> list[Feature]:
    """Return all features. Each label of a special token, such as "[CLS]", has a feature of its own."""
    # Single offsets. Of these, nearer ones are simpler.
    features = [Feature("self", "the token itself", "distance", 0)]
    for n in range(1, MAX_OFFSET + 1):
        for sign, side, nearest in (("-", "before", "previous"), ("+", "after", "next")):
            words = f"the {nearest} token" if n == 1 else f"the token {n} {side}"
            features.append(Feature(f"offset{sign}{n}", words, "distance", rank=n - 1))
    # Distances, on both sides together and on each side: `near` falls with the logarithm of the distance, `window` in
    # proportion to it.
    features += [Feature(side, f"to the {side}", "distance", rank=5) for side in ("left", "right")]
    for suffix, (_, where) in _SIDE_BY_SUFFIX.items():
        within = f"within{suffix}"
        features += [
            Feature(f"near{suffix}", f"near tokens{where}", "distance", 5, N_DISTANCE_LEVELS, within),
            Feature(
                f"window{suffix}", f"nearby tokens{where}", "distance", 5, N_DISTANCE_LEVELS, within
            ),
            Feature(within, f"tokens at most {MAX_NEAR_DISTANCE} away{where}", "distance", rank=4),
        ]
    # Sinks, kinds of keys, and other relations.
    features += [Feature(_SPECIAL_PREFIX + label, label, "sink", rank=1) for label in special_labels]
    features.append(Feature("first", "the first token", "sink", rank=2))
    features.append(Feature(RESTING, "special and first tokens", "sink", rank=3))
    features += [
        Feature(name, words, "kind", _RANK_BY_KIND.get(name, 4))
        for name, words in _WORDS_BY_KIND.items()
    ]
    return [*features, *_OTHER_FEATURES]


def compute_levels(features: Sequence[Feature], facts: FeatureFacts, queries: Integers) -> Levels:
    """Compute the levels of features for some queries of a text, (feature, query, key), uint8."""
    tokens = facts.tokens
    labels = np.array(tokens.labels, object)
    # Name of a feature -> its levels, (query, key), or (key,) if they are the same for all queries.
    levels = (
        facts.key_levels
        | _compute_distance_levels(facts, queries)
        | _compute_relation_levels(facts, queries)
    )
    blocks = np.empty((len(features), len(queries), facts.n_tokens), np.uint8)
    for block, feature in zip(blocks, features, strict=True):
        if feature.name.startswith(_SPECIAL_PREFIX):
            block[:] = tokens.special & (labels == feature.words)
        else:
            block[:] = levels[feature.name]
    return blocks


def _compute_distance_levels(facts: FeatureFacts, queries: Integers) -> Arrays:
    """Return name of a feature -> its levels, (query, key), for all features of the distance."""
    offset = np.arange(facts.n_tokens) - queries[:, None]
    distance = np.abs(offset)
    levels: Arrays = {"self": offset == 0, "left": offset < 0, "right": offset > 0}
    for n in range(1, MAX_OFFSET + 1):
        levels[f"offset-{n}"] = offset == -n
        levels[f"offset+{n}"] = offset == n
    # Nearer keys have higher levels. Keys on the other side of the query have level 0.
    log_steps = np.rint(_LOG_STEPS * np.log2(1 + distance)).astype(np.int64)
    for suffix, (sign, _) in _SIDE_BY_SUFFIX.items():
        is_on_side = offset * sign >= 0
        levels[f"within{suffix}"] = is_on_side & (distance <= MAX_NEAR_DISTANCE)
        levels[f"near{suffix}"] = is_on_side * np.maximum(N_DISTANCE_LEVELS - 1 - log_steps, 0)
        levels[f"window{suffix}"] = is_on_side * np.maximum(N_DISTANCE_LEVELS - 1 - distance, 0)
    return levels


def _compute_relation_levels(facts: FeatureFacts, queries: Integers) -> Arrays:
    """Return name of a feature -> its levels, (query, key), for all other relations of query and key."""
    keys = np.arange(facts.n_tokens)
    query = queries[:, None]
    ids = facts.tokens.ids
    is_same = ids[query] == ids
    levels: Arrays = {"same": is_same, "same_elsewhere": is_same & (keys != query)}
    # Keys before the query that follow an earlier occurrence of the query's token. No token precedes the first one: -1
    # equals no id.
    previous_ids = np.append(-1, ids[:-1])
    levels["induction"] = (keys < query) & (ids[query] == previous_ids)
    # The query's own sentence or line, and its first token.
    for name, group_ids in (("sentence", facts.sentence_ids), ("line", facts.line_ids)):
        levels[name] = group_ids[query] == group_ids
        levels[f"{name}_start"] = levels[name] & _starts_group(group_ids)
    # The last punctuation mark before each query, and the bracket that the query stands in. If there is none, the
    # position is -1, which equals no key. `searchsorted` counts the entries of `marks` that are smaller than the query.
    # The -1 at the front is one of them, so there is always a last one: at the count - 1.
    marks = np.append(-1, np.flatnonzero(facts.key_levels["punctuation"]))
    levels["last_punctuation"] = marks[np.searchsorted(marks, query) - 1] == keys
    levels["opener"] = facts.opener_positions[query] == keys
    # The cosine of the embeddings of query and key, clipped to 0 to 1; 0 for keys with the query's own token.
    cosine = np.zeros(is_same.shape)
    if facts.embeddings is not None:
        cosine = np.clip(facts.embeddings[queries] @ facts.embeddings.T, 0, 1)
    levels["likeness"] = np.rint((N_GRADES - 1) * cosine * ~is_same)
    levels["alike"] = levels["likeness"] >= N_GRADES // 2
    return levels


def _starts_group(group_ids: NDArray[np.integer]) -> Flags:
    """Return which tokens begin a group, (token,): the first token, and tokens after a token of another group."""
    return np.append(True, group_ids[1:] != group_ids[:-1])


# A text


@dataclass(frozen=True, eq=False)
class FeatureFacts:
    """Hold the facts of one text that features need. Each fact is computed once.

    Attributes:
        tokens: The tokens of the text.
        log_frequency: The natural logarithm of each token's relative frequency in the corpus, (token,).
        is_frequent: Whether each token is among the most frequent words, which make up half of all words, (token,).
        embeddings: Static embeddings, normalised to length 1, (token, d); None if the model does not give them.
    """

    tokens: Tokens
    log_frequency: NDArray[np.float64]
    is_frequent: Flags
    embeddings: NDArray[np.float32] | None = None

    @cached_property
    def n_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    @cached_property
    def full_text(self) -> str:
        """Return the text and a line break; for a pair of texts also the second text."""
        return f"{self.tokens.text}\n{self.tokens.pair or ''}"

    @cached_property
    def spans(self) -> Integers:
        """Return where each token's characters begin and end in `full_text`, (token, 2); -1 for tokens without text."""
        tokens = self.tokens
        # Offsets count from the start of their own text. Shift those of a pair's second text (segment 1) behind the
        # first text and its line break.
        shifts = tokens.segments[:, None].astype(np.int64) * (len(tokens.text) + 1)
        return np.where(tokens.offsets < 0, -1, tokens.offsets + shifts)

    @cached_property
    def surfaces(self) -> list[str]:
        """Return each token as it is spelled in the text, with its line breaks; "" for special tokens."""
        # A token without a span in the text gets its label, which may lack case or line breaks. In labels "##" marks a
        # word piece, and "·" stands for a space.
        surfaces = [self.full_text[start:stop] for start, stop in self.spans.tolist()]
        for position, label in enumerate(self.tokens.labels):
            if not surfaces[position] and not self.tokens.special[position]:
                surfaces[position] = label.removeprefix("##").replace("·", " ")
        return surfaces

    @cached_property
    def stripped_surfaces(self) -> list[str]:
        """Return `surfaces` without leading and trailing white space."""
        return [surface.strip() for surface in self.surfaces]

    @cached_property
    def key_levels(self) -> Arrays:
        """Return name of a feature -> its levels, (token,), for features of the key alone: kinds, sinks and rarity."""
        tokens = self.tokens
        is_ordinary = ~tokens.special
        # Kind by spelling -> which tokens are of this kind, (token,).
        flags = {name: np.zeros(self.n_tokens, np.bool_) for name in _SPELLING_KINDS}
        for position in np.flatnonzero(is_ordinary).tolist():
            for name in _find_kinds(self.stripped_surfaces[position]):
                flags[name][position] = True
        # Word pieces continue a word of the same segment. `words` has the index of each token's word in its segment;
        # -1 for tokens of no word.
        is_piece = np.zeros(self.n_tokens, np.bool_)
        if tokens.words is not None:
            continues = ~_starts_group(tokens.words) & ~_starts_group(tokens.segments)
            is_piece = (tokens.words >= 0) & continues & is_ordinary
        # The spelling of a later piece says nothing about the word.
        for name in ("capital", *OPEN_CLASSES):
            flags[name] &= ~is_piece
        # A capitalised word is a name, unless it is the first token of a sentence, or the second after an opening mark:
        # as in “The.
        is_start = _starts_group(self.sentence_ids)
        is_start[1:] |= (is_start & flags["opening"])[:-1]
        is_first = np.arange(self.n_tokens) == 0
        # Map ln frequency linearly: -2 (common) to 0, and -10 (rare) to 1.
        rarity = np.clip((-self.log_frequency - 2) / 8, 0, 1) * is_ordinary
        return {
            **flags,
            "name": flags["capital"] & ~is_start,
            "piece": is_piece,
            "frequent": flags["word"] & self.is_frequent & ~is_piece,
            "infrequent": flags["word"] & ~self.is_frequent & ~is_piece,
            # Tokens that contain a line break. Some tokenizers drop line breaks.
            "newline": np.array(["\n" in surface for surface in self.surfaces], np.bool_) & is_ordinary,
            "first": is_first,
            RESTING: tokens.special | is_first,
            "rarity": np.rint((N_GRADES - 1) * rarity),
        }

    @cached_property
    def sentence_ids(self) -> Integers:
        """Return the id of each token's sentence, (token,). Each special or blank token has a negative id of its own.

        A sentence ends after an end mark, such as ".", and the quotation marks and brackets that close behind it.
        """
        sentence_ids = -1 - np.arange(self.n_tokens)
        sentence_id = 0
        has_ended = False
        for position, surface in enumerate(self.stripped_surfaces):
            if self.tokens.special[position] or not surface:
                continue
            is_end = surface[0] in _SENTENCE_ENDS
            # A closing mark belongs to the sentence before it, unless a space stands between them. The space may be the
            # character before the token, or the token's own first character.
            start = max(0, int(self.spans[position, 0]))
            around_start = self.full_text[max(0, start - 1) : start] + self.surfaces[position][:1]
            has_space = any(map(str.isspace, around_start))
            is_closing = is_end or (surface[0] in _CLOSING and not has_space)
            if has_ended and not is_closing:
                sentence_id += 1
                has_ended = False
            sentence_ids[position] = sentence_id
            has_ended = has_ended or is_end
        # The second text of a pair (segment 1) has other sentences: shift its ids beyond those of the first text.
        return np.where(
            sentence_ids < 0, sentence_ids, sentence_ids + self.n_tokens * self.tokens.segments
        )

    @cached_property
    def line_ids(self) -> Integers:
        """Return the id of each token's line, (token,). Each token without text has a negative id of its own."""
        # Find line breaks with NumPy. Spans count characters, and in UTF-32 each character is one number.
        starts = self.spans[:, 0]
        breaks = np.flatnonzero(np.frombuffer(self.full_text.encode("utf-32-le"), "<u4") == ord("\n"))
        return np.where(starts >= 0, np.searchsorted(breaks, starts), -1 - np.arange(self.n_tokens))

    @cached_property
    def opener_positions(self) -> Integers:
        """Return the position of the innermost opening bracket around each token, (token,); -1 = no bracket.

        A token that opens or closes a bracket counts as inside it.
        """
        # A stack of the open brackets: their characters and positions. Its bottom, "" at -1, stands for no bracket.
        open_brackets = [""]
        positions = [-1]
        openers = np.full(self.n_tokens, -1, np.int64)
        for position, surface in enumerate(self.stripped_surfaces):
            innermost_before = positions[-1]
            # Special tokens such as [SEP] open no brackets.
            characters = "" if self.tokens.special[position] else surface
            for character in characters:
                # A closing bracket closes the innermost open bracket, if both are of the same type.
                if character in _OPENER_BY_CLOSER.values():
                    open_brackets.append(character)
                    positions.append(position)
                elif open_brackets[-1] == _OPENER_BY_CLOSER.get(character):
                    open_brackets.pop()
                    positions.pop()
            # Take the inner one of the bracket open before the token and the bracket open after it. So a token that
            # closes a bracket still belongs to it.
            openers[position] = max(innermost_before, positions[-1])
        return openers


@cache
def _find_kinds(surface: str) -> frozenset[str]:
    """Return the kinds of a token that depend on its spelling alone; they are names in `_SPELLING_KINDS`."""
    if not surface:
        return frozenset()
    # Test the first character, then all characters, then any of them, then lists of English words.
    kinds = {name for name, characters in _CHARACTERS_BY_KIND.items() if surface[0] in characters}
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
