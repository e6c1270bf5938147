"""What features know of one text: its words, sentences, lines and brackets, and what is annotated. NumPy alone."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.texts import Link, Span
from attnscope.results.tokens import Tokens
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of

Flags = NDArray[np.bool_]

_SENTENCE_ENDS = frozenset(".!?…。！？")
_CLAUSE_ENDS = _SENTENCE_ENDS | frozenset(",;:—–，；：、")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What features know of one text, made once.

    Attributes:
        log_frequency: (token,): natural logarithm of each token's relative frequency.
        frequent: (token,): whether it is among the most frequent words, which together are half of all text.
        embeddings: (token, d): static embeddings of length 1; None if they are not known.
        words: The words of an annotation, as characters.
        links: Links between these words.
        kinds: The kind of each of these words; empty if the annotation has none.
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
        """Each token as it is written in the text, with its line breaks; else as the tokenizer writes it."""
        surfaces = []
        for place, label in enumerate(self.tokens.labels):
            start, stop = (int(at) for at in self.tokens.offsets[place])
            text = self.tokens.text if not self.tokens.segments[place] else self.tokens.pair or ""
            label = "" if self.tokens.special[place] else label.removeprefix("##").replace("·", " ")
            surfaces.append((text[start:stop] if 0 <= start < stop else "") or label)
        return tuple(surfaces)

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
        """The number of each token's word; a token outside words has a number of its own."""
        words = self.tokens.words
        alone = -1 - np.arange(self.n)
        if words is None:
            return alone
        numbers = words.astype(np.int64) + (words.max(initial=0) + 1) * self.tokens.segments.astype(np.int64)
        return np.where(words >= 0, numbers, alone)

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
        """The token with the innermost bracket that each token stands in, opens or closes; -1 = none."""
        standing: list[tuple[str, int]] = []
        openers = np.full(self.n, -1, np.int64)
        for place, surface in enumerate(self.stripped):
            innermost = standing[-1][1] if standing else -1
            for sign in surface if not self.tokens.special[place] else "":
                if sign in _OPENING:
                    standing.append((sign, place))
                elif sign in _CLOSING and standing and standing[-1][0] == _OPENING[_CLOSING.index(sign)]:
                    standing.pop()
            openers[place] = max(innermost, standing[-1][1] if standing else -1)
        return openers

    @cached_property
    def of_kind(self) -> Mapping[str, Flags]:
        """Which tokens are part of a word of each kind that the annotation knows, each (token,)."""
        by_kind: dict[str, Flags] = {}
        for word, kind in zip(self.words, self.kinds, strict=False):
            if kind:
                by_kind.setdefault(kind, np.zeros(self.n, np.bool_))[self._tokens_of(word)] = True
        return by_kind

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
        by_relation: dict[str, Flags] = {}
        for link in self.links:
            arcs = by_relation.setdefault(link.relation, np.zeros((self.n, self.n), np.bool_))
            for source in (t for word in link.source for t in tokens_of[word]):
                arcs[source, [t for word in link.targets for t in tokens_of[word]]] = True
        return by_relation

    def _tokens_of(self, word: Span) -> list[int]:
        start, stop = word
        offsets = self.tokens.offsets
        inside = (offsets[:, 0] >= 0) & (offsets[:, 0] < stop) & (offsets[:, 1] > start) & ~self.tokens.special
        return [int(t) for t in np.flatnonzero(inside)]
