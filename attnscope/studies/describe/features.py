"""The features that descriptions are made of: what a query may see in a key, in plain words. NumPy alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.texts import Link, Span
from attnscope.records import Tokens
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of

Flags = NDArray[np.bool_]
Levels = NDArray[np.uint8]

Family = Literal["key", "offset", "group", "list", "graded", "from"]
"""What a feature goes by: the key alone, how far it is from the query, being in one group with the query, being on
a list of keys of the query's, a number; or by what both are."""

GRADES = 16
"""Levels of what is a number."""

FARTHEST, FARTHEST_OFFSET = 32, 9
"""Levels of distances, beyond which tokens are as far as these; and the farthest token with a feature of its own."""

_SENTENCE_ENDS = frozenset(".!?…。！？")
_CLAUSE_ENDS = _SENTENCE_ENDS | frozenset(",;:—–，；：、")
_OPENING, _CLOSING = "([{", ")]}"
_LOG_STEPS = 3.0


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What features know of one text, made once.

    Attributes:
        tokens: Its tokens.
        log_frequency: (token,): natural logarithm of each token's relative frequency.
        frequent: (token,): whether it is among the most frequent words, which together are half of all text.
        embeddings: (token, d): static embeddings of length 1; None where they are not known.
        words: The words of an annotation, as characters.
        links: Its links.
        kinds: The kind of each of the annotation's words; none = it does not say.
    """

    tokens: Tokens
    log_frequency: NDArray[np.float64]
    frequent: Flags
    embeddings: NDArray[np.float32] | None = None
    words: tuple[Span, ...] = ()
    links: tuple[Link, ...] = ()
    kinds: tuple[str, ...] = ()

    @cached_property
    def n(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @cached_property
    def surfaces(self) -> tuple[str, ...]:
        """Each token as it is written in the text, with its line breaks; as the tokenizer writes it, if that is all."""
        made = []
        for place, label in enumerate(self.tokens.labels):
            start, stop = (int(at) for at in self.tokens.offsets[place])
            text = self.tokens.text if not self.tokens.segments[place] else self.tokens.pair or ""
            spelled = text[start:stop] if 0 <= start < stop else ""
            made.append(spelled or ("" if self.tokens.special[place] else label.removeprefix("##").replace("·", " ")))
        return tuple(made)

    @cached_property
    def stripped(self) -> tuple[str, ...]:
        """The same without white space."""
        return tuple(surface.strip() for surface in self.surfaces)

    def where(self, holds: Callable[[str], bool], lower: bool = False) -> Flags:
        """Which ordinary tokens something holds of, as they are written or in lower case."""
        written = (s.lower() if lower else s for s in self.stripped)
        return np.array([bool(s) and holds(s) for s in written], np.bool_) & ~self.tokens.special

    @cached_property
    def classes(self) -> Mapping[str, Flags]:
        """Kinds of tokens, each (token,)."""
        punctuation = self.where(lambda s: all(unicodedata.category(c)[0] in "PS" for c in s))
        words = self.where(lambda s: any(c.isalpha() for c in s))
        newline = np.array(["\n" in s for s in self.surfaces], np.bool_) & ~self.tokens.special
        english = np.array([class_of(s.lower()) for s in self.stripped])
        # A tokenizer that drops line breaks leaves them between two tokens.
        return {
            "special": self.tokens.special,
            "punctuation": punctuation,
            "sentence_end": self.where(lambda s: s[0] in _SENTENCE_ENDS) & punctuation,
            "comma": self.where(lambda s: s[0] in ",，、"),
            "colon": self.where(lambda s: s[0] in ":;：；"),
            "dash": self.where(lambda s: s[0] in "-—–"),
            "quote": self.where(lambda s: s[0] in "\"'“”‘’«»„`"),
            "bracket": self.where(lambda s: s[0] in _OPENING + _CLOSING),
            "newline": newline,
            "digit": self.where(lambda s: any(c.isdigit() for c in s)),
            "capital": self.where(lambda s: s[0].isupper()) & ~self.piece,
            "name": self.where(lambda s: s[0].isupper()) & ~self._starts,
            "word": words,
            "piece": self.piece,
            "frequent": words & self.frequent & ~self.piece,
            "infrequent": words & ~self.frequent & ~self.piece,
            **{name: self.where(words_of.__contains__, lower=True) for name, words_of in CLOSED_CLASSES.items()},
            **{name: (english == name) & ~self.tokens.special & ~self.piece for name in OPEN_CLASSES},
        }

    @cached_property
    def _starts(self) -> Flags:
        """Which tokens begin a sentence, quotation marks left out."""
        opened = self.where(lambda s: s[0] in "\"'“”‘’«»„`([{")
        sentence = self.sentence
        first: Flags = np.append(True, sentence[1:] != sentence[:-1])
        for place in np.flatnonzero(first & opened):
            if place + 1 < self.n:
                first[place + 1] = True
        return first

    @cached_property
    def piece(self) -> Flags:
        """Which tokens go on with a word that has begun."""
        word = self.word
        return np.append(False, word[1:] == word[:-1]) & ~self.tokens.special

    @cached_property
    def word(self) -> NDArray[np.int64]:
        """The number of each token's word; what is part of none has a number of its own."""
        known = self.tokens.words
        alone = -1 - np.arange(self.n)
        if known is None:
            return alone
        numbers = known.astype(np.int64) + (known.max(initial=0) + 1) * self.tokens.segments.astype(np.int64)
        return np.where(known >= 0, numbers, alone)

    @cached_property
    def sentence(self) -> NDArray[np.int64]:
        """The number of each token's sentence; special tokens are in none, each with a number of its own."""
        return self._cut(_SENTENCE_ENDS)

    @cached_property
    def clause(self) -> NDArray[np.int64]:
        """The number of each token's clause: what stands between two marks."""
        return self._cut(_CLAUSE_ENDS)

    @cached_property
    def line(self) -> NDArray[np.int64]:
        """The number of each token's line."""
        starts = self.tokens.offsets[:, 0]
        breaks = np.flatnonzero(np.frombuffer(self.tokens.text.encode("utf-32-le"), "<u4") == ord("\n"))
        return np.where(starts >= 0, np.searchsorted(breaks, starts), -1 - np.arange(self.n))

    @cached_property
    def indentation(self) -> NDArray[np.int64]:
        """How many blanks each token's line begins with; a tab is one, special tokens have numbers of their own."""
        lines = self.tokens.text.split("\n")
        widths = np.array([len(line) - len(line.lstrip(" \t")) for line in lines], np.int64)
        return np.where(self.line >= 0, widths[np.maximum(self.line, 0)], self.line)

    @cached_property
    def opener(self) -> NDArray[np.int64]:
        """The token with the innermost bracket that each token stands in, or that it opens or closes; -1 = none."""
        standing: list[tuple[str, int]] = []
        found = np.full(self.n, -1, np.int64)
        for place, surface in enumerate(self.stripped):
            innermost = standing[-1][1] if standing else -1
            for sign in surface if not self.tokens.special[place] else "":
                if sign in _OPENING:
                    standing.append((sign, place))
                elif sign in _CLOSING and standing and standing[-1][0] == _OPENING[_CLOSING.index(sign)]:
                    standing.pop()
            found[place] = max(innermost, standing[-1][1] if standing else -1)
        return found

    @cached_property
    def of_kind(self) -> Mapping[str, Flags]:
        """Which tokens are part of a word of each kind that the annotation knows, each (token,)."""
        made: dict[str, Flags] = {}
        for word, kind in zip(self.words, self.kinds, strict=False):
            if kind:
                made.setdefault(kind, np.zeros(self.n, np.bool_))[self._tokens_of(word)] = True
        return made

    def _cut(self, ends: frozenset[str]) -> NDArray[np.int64]:
        """Numbers of runs that end with a mark, and the quotation marks and brackets that close it."""
        numbers, number, ended = np.empty(self.n, np.int64), 0, False
        for place, surface in enumerate(self.stripped):
            if self.tokens.special[place] or not surface:
                numbers[place] = -1 - place
                continue
            closes = surface[0] in ends or (surface[0] in "\"'”’»)]}" and not self._is_spaced(place))
            if ended and not closes:
                number, ended = number + 1, False
            numbers[place] = number
            ended = ended or (surface[0] in ends and not surface[0].isalnum())
        return numbers

    def _is_spaced(self, place: int) -> bool:
        """Whether there is white space before a token."""
        start = int(self.tokens.offsets[place, 0])
        return self.surfaces[place][:1].isspace() or self.tokens.text[max(0, start - 1) : max(0, start)].isspace()

    @cached_property
    def arcs(self) -> Mapping[str, Flags]:
        """Relations of the annotation: (token, token), whether the first is linked to the second."""
        tokens_of = [self._tokens_of(word) for word in self.words]
        made: dict[str, Flags] = {}
        for link in self.links:
            arcs = made.setdefault(link.relation, np.zeros((self.n, self.n), np.bool_))
            for source in (t for word in link.source for t in tokens_of[word]):
                arcs[source, [t for word in link.targets for t in tokens_of[word]]] = True
        return made

    def _tokens_of(self, word: Span) -> list[int]:
        start, stop = word
        offsets = self.tokens.offsets
        inside = (offsets[:, 0] >= 0) & (offsets[:, 0] < stop) & (offsets[:, 1] > start) & ~self.tokens.special
        return [int(t) for t in np.flatnonzero(inside)]


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that a query may see in a key.

    Attributes:
        name: Its name, as in `--feature` and in files.
        words: What it is called in a description, such as "the previous token".
        family: What it goes by.
        rank: How simple it is, the simplest first: of features that explain alike the smaller rank is taken.
        of: Its levels for some queries of a text, (query, key).
        levels: How many levels it has.
        source: Who has described heads by it, or "ours".
        base: The feature that it is a part of, as [CLS] from punctuation is of [CLS]: it joins that alone.
        shown_by: The feature of 0 and 1 that says how much attention a number is about; and what to call it.
    """

    name: str
    words: str
    family: Family
    rank: int
    of: Callable[[TextFacts, NDArray[np.int64]], NDArray[np.generic]] = field(repr=False)
    levels: int = 2
    source: str = "ours"
    base: str = ""
    shown_by: tuple[str, str] = ("", "")


def blocks_of(features: Sequence[Feature], facts: TextFacts, queries: NDArray[np.int64]) -> Levels:
    """The levels of features for some queries of a text, (feature, query, key), uint8."""
    made = np.empty((len(features), len(queries), facts.n), np.uint8)
    for number, feature in enumerate(features):
        made[number] = feature.of(facts, queries)
    return made


# Families -------------------------------------------------------------------------------------------------------


def _key(flags: Callable[[TextFacts], Flags]) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return lambda facts, queries: np.broadcast_to(flags(facts), (len(queries), facts.n))


def _class(name: str) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return _key(lambda facts: facts.classes[name])


def _offset(holds: Callable[[NDArray[np.int64]], Flags]) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return lambda facts, queries: holds(np.arange(facts.n) - queries[:, None])


def _at(offset: int) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return _offset(lambda d: d == offset)


def _within(side: int) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return _offset(lambda d: (np.abs(d) <= WITHIN) & (d * side >= 0))


def _group(
    numbers: Callable[[TextFacts], NDArray[np.int64]], elsewhere: bool = False
) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        groups = numbers(facts)
        same: Flags = groups[queries][:, None] == groups
        if elsewhere:
            same[np.arange(len(queries)), queries] = False
        return same

    return of


def _nearest(flags: Callable[[TextFacts], Flags], after: bool) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    """The last key before the query of which something holds, or the next one after it."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        places = np.flatnonzero(flags(facts))
        found = np.zeros((len(queries), facts.n), np.bool_)
        at = np.searchsorted(places, queries, "right") if after else np.searchsorted(places, queries, "left") - 1
        known = (at >= 0) & (at < len(places))
        found[np.flatnonzero(known), places[at[known]]] = True
        return found

    return of


def _shifted_same(by: int) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    """Keys whose neighbour `by` tokens further is the same token as the query, elsewhere."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        ids = facts.tokens.ids
        neighbour = np.full(facts.n, -1, np.int64)
        if by < 0:
            neighbour[-by:] = ids[:by]
        else:
            neighbour[:-by] = ids[by:]
        keys = np.arange(facts.n)
        elsewhere = keys + by != queries[:, None]
        found: Flags = (neighbour == ids[queries][:, None]) & elsewhere & (keys != queries[:, None])
        return found

    return of


def _induction(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
    keys = np.arange(facts.n)
    found: Flags = _shifted_same(-1)(facts, queries).astype(np.bool_) & (keys <= queries[:, None])
    return found


def _group_start(numbers: Callable[[TextFacts], NDArray[np.int64]]) -> Callable[..., Flags]:
    """The first token of the query's own group."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        groups = numbers(facts)
        first = np.append(True, groups[1:] != groups[:-1])
        found: Flags = (groups[queries][:, None] == groups) & first
        return found

    return of


def _opener(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
    """The innermost bracket that is open at the query."""
    found: Flags = facts.opener[queries][:, None] == np.arange(facts.n)
    return found


def _of_kind(kind: str) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return _key(lambda facts: facts.of_kind.get(kind, np.zeros(facts.n, np.bool_)))


def _near_log(side: int) -> Callable[[TextFacts, NDArray[np.int64]], NDArray[np.int64]]:
    def of(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
        offset = np.arange(facts.n) - queries[:, None]
        near = FARTHEST - 1 - np.rint(_LOG_STEPS * np.log2(1 + np.abs(offset))).astype(np.int64)
        return np.where(offset * side >= 0, np.clip(near, 0, None), 0)

    return of


def _near_linear(side: int) -> Callable[[TextFacts, NDArray[np.int64]], NDArray[np.int64]]:
    def of(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
        offset = np.arange(facts.n) - queries[:, None]
        return np.where(offset * side >= 0, np.clip(FARTHEST - 1 - np.abs(offset), 0, None), 0)

    return of


def _likeness(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    if facts.embeddings is None:
        return np.zeros((len(queries), facts.n), np.int64)
    cosine = facts.embeddings[queries] @ facts.embeddings.T
    other = facts.tokens.ids[queries][:, None] != facts.tokens.ids
    found: NDArray[np.int64] = np.rint((GRADES - 1) * np.clip(cosine, 0, 1) * other).astype(np.int64)
    return found


def _rarity(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    rarity = np.clip((-facts.log_frequency - 2) / 8, 0, 1) * ~facts.tokens.special
    return np.broadcast_to(np.rint((GRADES - 1) * rarity).astype(np.int64), (len(queries), facts.n))


def _rarity_of_query(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = _rarity(facts, queries[:1])[0][queries]
    return found


def _lateness(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.minimum(GRADES - 1, np.rint(1.5 * np.log2(1 + queries))).astype(np.int64)


def _length(facts: TextFacts, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.full(len(queries), min(GRADES - 1, round(1.5 * np.log2(facts.n))))


def _from(name: str, of: Callable[[TextFacts, NDArray[np.int64]], NDArray[np.generic]]) -> Callable[..., Flags]:
    """A feature of 0 and 1 for queries of a class alone."""
    return lambda facts, queries: of(facts, queries).astype(np.bool_) & facts.classes[name][queries][:, None]


def _special(label: str) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    return _key(lambda facts: facts.tokens.special & np.array([one == label for one in facts.tokens.labels], np.bool_))


def _first(facts: TextFacts) -> Flags:
    first: Flags = np.arange(facts.n) == 0
    return first


def _last(facts: TextFacts) -> Flags:
    last: Flags = np.arange(facts.n) == facts.n - 1
    return last


def _resting(facts: TextFacts) -> Flags:
    return facts.tokens.special | _first(facts)


# The catalogue --------------------------------------------------------------------------------------------------

_CLARK, _VOITA = "Clark et al. 2019, section 3", "Voita et al. 2019, section 4"

RESTING = "resting"
"""The feature of all tokens on which heads rest: special ones and the first."""

SPECIAL = "special:"
SINK = re.compile(rf"{SPECIAL}|first$|resting$")
"""The features that tell these tokens apart, by name."""

WITHIN = 4
"""How far away tokens are that are called near, in tokens."""

_SIDES = {"": (0, ""), "_left": (-1, " to the left"), "_right": (1, " to the right")}


def _offsets() -> list[Feature]:
    made = [Feature("self", "the token itself", "offset", 0, _offset(lambda d: d == 0), source=_CLARK)]
    for n in range(1, FARTHEST_OFFSET + 1):
        for sign, word in ((-1, "before"), (1, "after")):
            words = f"the token {n} {word}" if n > 1 else f"the {'next' if sign > 0 else 'previous'} token"
            made.append(
                Feature(f"offset{sign * n:+d}", words, "offset", n - 1,
                        _at(sign * n), source=_VOITA)
            )  # fmt: skip
    made += [
        Feature("left", "to the left", "offset", 5, _offset(lambda d: d < 0)),
        Feature("right", "to the right", "offset", 5, _offset(lambda d: d > 0)),
        *(
            Feature(f"{name}{side}", words + place, "graded", rank, of(sign), FARTHEST, source,
                    shown_by=(f"within{side}", f"at most {WITHIN} away"))
            for name, words, rank, of, source in (
                ("near", "near tokens", 5, _near_log, "ours"),
                ("window", "nearby tokens", 5, _near_linear, "Press et al. 2022, section 3"),
            )
            for side, (sign, place) in _SIDES.items()
        ),
        *(
            Feature(f"within{side}", f"tokens at most {WITHIN} away{place}", "offset", 4, _within(sign))
            for side, (sign, place) in _SIDES.items()
        ),
    ]  # fmt: skip
    return made


_KINDS = {
    "punctuation": ("punctuation", 2, _CLARK), "sentence_end": ("sentence ends", 3, "ours"),
    "comma": ("commas", 3, "ours"), "colon": ("colons", 3, "ours"), "dash": ("dashes", 3, "ours"),
    "quote": ("quotation marks", 3, "ours"), "bracket": ("brackets", 3, "ours"),
    "newline": ("line breaks", 3, "ours"), "digit": ("digits", 3, "ours"),
    "capital": ("capitalised words", 4, "ours"), "name": ("capitalised words within a sentence", 4, "ours"),
    "word": ("words", 4, "ours"), "piece": ("word pieces", 4, "ours"),
    "frequent": ("frequent words", 4, "ours"), "infrequent": ("rarer words", 4, "ours"),
    **{name: (f"English {name}", 4, "ours") for name in (*CLOSED_CLASSES, *OPEN_CLASSES)},
}  # fmt: skip
"""Kinds of tokens: what they are called, their rank, their source."""

_FROM = {
    "special": "special tokens", "punctuation": "punctuation", "sentence_end": "sentence ends", "comma": "commas",
    "frequent": "frequent words", "infrequent": "rarer words", "piece": "word pieces", "capital": "capitalised words",
    "name": "capitalised words within a sentence", "word": "words",
}  # fmt: skip
"""Classes of queries that products are made of."""


def catalogue(special_labels: Sequence[str], relations: Sequence[str] = (), kinds: Sequence[str] = ()) -> list[Feature]:
    """All features, the simplest first where two are alike.

    Args:
        special_labels: The tokenizer's special tokens that occur.
        relations: Relations of annotated texts.
        kinds: Kinds of words of annotated texts.
    """
    specials = [Feature(SPECIAL + one, one, "key", 1, _special(one), source=_CLARK) for one in special_labels]
    first = Feature("first", "the first token", "key", 2, _key(_first), source="Xiao et al. 2024, section 3.1")
    features = [
        *_offsets(),
        *specials,
        first,
        Feature("last", "the last token", "key", 3, _key(_last)),
        Feature(RESTING, "special and first tokens", "key", 3, _key(_resting), source="Xiao et al. 2024"),
        *(
            Feature(name, words, "key", rank, _class(name), source=source)
            for name, (words, rank, source) in _KINDS.items()
        ),
        Feature("rarity", "rare tokens", "graded", 5, _rarity, GRADES, _VOITA + ", rare words",
                shown_by=("infrequent", "on rarer words")),
        Feature("same", "the same token", "group", 2, _group(lambda f: f.tokens.ids)),
        Feature("same_elsewhere", "the same token elsewhere", "group", 2, _group(lambda f: f.tokens.ids, True)),
        Feature("same_word", "other pieces of its word", "group", 2, _group(lambda f: f.word, True)),
        Feature("word_start", "the first piece of its word", "list", 3, _group_start(lambda f: f.word)),
        Feature("sentence", "the same sentence", "group", 4, _group(lambda f: f.sentence)),
        Feature("sentence_start", "the start of its sentence", "list", 4, _group_start(lambda f: f.sentence)),
        Feature("clause", "the same clause", "group", 4, _group(lambda f: f.clause)),
        Feature("clause_start", "the start of its clause", "list", 4, _group_start(lambda f: f.clause)),
        Feature("last_sentence_end", "the last sentence end", "list", 4,
                _nearest(lambda f: f.classes["sentence_end"], False)),
        Feature("next_sentence_end", "the next sentence end", "list", 4,
                _nearest(lambda f: f.classes["sentence_end"], True)),
        Feature("last_punctuation", "the last punctuation mark", "list", 4,
                _nearest(lambda f: f.classes["punctuation"], False)),
        Feature("next_punctuation", "the next punctuation mark", "list", 4,
                _nearest(lambda f: f.classes["punctuation"], True)),
        Feature("last_rarer", "the last rarer word", "list", 5,
                _nearest(lambda f: f.classes["infrequent"], False)),
        Feature("next_rarer", "the next rarer word", "list", 5,
                _nearest(lambda f: f.classes["infrequent"], True)),
        Feature("induction", "what followed the same token before", "list", 3, _induction,
                source="Olsson et al. 2022, section 2"),
        Feature("after_same", "what follows the same token elsewhere", "list", 4, _shifted_same(-1)),
        Feature("before_same", "what stands before the same token elsewhere", "list", 4, _shifted_same(1)),
        Feature("likeness", "other tokens like it", "graded", 5, _likeness, GRADES, shown_by=("alike", "much like it")),
        Feature("alike", "other tokens much like it", "group", 5,
                lambda facts, queries: _likeness(facts, queries) >= GRADES // 2),
        Feature("line", "the same line", "group", 4, _group(lambda f: f.line)),
        Feature("line_start", "the start of its line", "list", 4, _group_start(lambda f: f.line)),
        Feature("indentation", "lines of the same indentation", "group", 5, _group(lambda f: f.indentation)),
        Feature("brackets", "the same brackets", "group", 4, _group(lambda f: f.opener)),
        Feature("opener", "the bracket that it stands in", "list", 4, _opener),
        *_arcs(relations),
        *(Feature(f"kind:{kind}", f"{kind} (annotated)", "key", 3, _of_kind(kind)) for kind in kinds),
    ]  # fmt: skip
    bases = [*specials, first, features[0]]
    return [*features, *(product for base in bases for product in _products(base))]


def _products(base: Feature) -> list[Feature]:
    """A feature from some queries alone, or the more so the more of something they are."""
    made = [
        Feature(f"{base.name} from {kind}", f"from {words}", "from", 8, _from(kind, base.of), base=base.name)
        for kind, words in _FROM.items()
    ]
    graded = {
        "rarity": ("from rare tokens", _rarity_of_query),
        "place": ("from late tokens", _lateness),
        "length": ("in long texts", _length),
    }
    for name, (words, grade) in graded.items():

        def of(facts: TextFacts, queries: NDArray[np.int64], grade: Any = grade) -> NDArray[np.generic]:
            product: NDArray[np.int64] = base.of(facts, queries).astype(np.int64) * grade(facts, queries)[:, None]
            return product

        made.append(Feature(f"{base.name} by {name}", words, "from", 9, of, GRADES, base=base.name))
    return made


def _arcs(relations: Sequence[str]) -> list[Feature]:
    """Links of annotations: each relation, and all that go to a word's parent or to what depends on it."""
    groups = {
        "parent": ("its parent", [name for name in relations if name.endswith("→parent")]),
        "dependents": ("what depends on it", [name for name in relations if name.startswith("parent→")]),
        "linked": ("what it is linked to", list(relations)),
    }
    made = [
        Feature(f"arc:{name}", f"{words} (annotated)", "list", 3, _arc(of), source=_CLARK + ".3")
        for name, (words, of) in groups.items()
        if len(of) > 1
    ]
    return made + [
        Feature(f"arc:{name}", f"{name} (annotated)", "list", 4, _arc([name]), source=_CLARK + ".3")
        for name in relations
    ]


def _arc(names: Sequence[str]) -> Callable[[TextFacts, NDArray[np.int64]], Flags]:
    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        found = np.zeros((len(queries), facts.n), np.bool_)
        for name in names:
            if name in facts.arcs:
                found |= facts.arcs[name][queries]
        return found

    return of
