"""Work out the facts of one text that features need: kinds of tokens, words, sentences, lines and brackets.

It reads the text alone. `features` turns facts into levels for pairs of a query and a key.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from attnscope.results.tokens import Tokens
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of

Flags = NDArray[np.bool_]

_SENTENCE_ENDS = frozenset(".!?…。！？")
_CLAUSE_ENDS = _SENTENCE_ENDS | frozenset(",;:—–，；：、")
_OPENING, _CLOSING = "([{", ")]}"
_QUOTES = "\"'“”‘’«»„`"
_SIGNS = {
    "comma": ",，、",
    "colon": ":;：；",
    "dash": "-—–",
    "quote": _QUOTES,
    "bracket": _OPENING + _CLOSING,
    "opening": _QUOTES + _OPENING,
}
_KINDS = (*_SIGNS, "punctuation", "sentence_end", "digit", "capital", "word", *CLOSED_CLASSES, *OPEN_CLASSES)


@dataclass(frozen=True, eq=False)
class TextFacts:
    """The facts of one text that features need, each worked out once, arrays (token,) unless said otherwise.

    Attributes:
        log_frequency: (token,): natural logarithm of each token's relative frequency.
        frequent: (token,): whether it is among the most frequent words, which together are half of all text.
        embeddings: (token, d): static embeddings of length 1; None if they are not known.
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
    def surfaces(self) -> tuple[str, ...]:
        """Return each token as it is written in the text, with its line breaks; else as the tokenizer writes it."""
        surfaces = []
        for place, label in enumerate(self.tokens.labels):
            # The text itself, because the tokenizer's label may have lost case or line breaks.
            start, stop = (int(at) for at in self.tokens.offsets[place])
            text = self.tokens.text if not self.tokens.segments[place] else self.tokens.pair or ""
            label = "" if self.tokens.special[place] else label.removeprefix("##").replace("·", " ")
            surfaces.append((text[start:stop] if 0 <= start < stop else "") or label)
        return tuple(surfaces)

    @cached_property
    def stripped(self) -> tuple[str, ...]:
        """Return each token as in `surfaces`, without white space around it."""
        return tuple(surface.strip() for surface in self.surfaces)

    @cached_property
    def classes(self) -> Mapping[str, Flags]:
        """Return kinds of tokens, each (token,)."""
        ordinary = ~self.tokens.special
        kinds = [_kinds_of(surface) if surface else frozenset() for surface in self.stripped]
        flags = {name: np.array([name in of_token for of_token in kinds], np.bool_) & ordinary for name in _KINDS}
        whole = ordinary & ~self.piece
        # A tokenizer that drops line breaks leaves them between two tokens.
        newline = np.array(["\n" in surface for surface in self.surfaces], np.bool_) & ordinary
        return flags | {
            "special": self.tokens.special,
            "newline": newline,
            "capital": flags["capital"] & ~self.piece,
            "name": flags["capital"] & ~self._starts(flags["opening"]),
            "piece": self.piece,
            "frequent": flags["word"] & self.frequent & whole,
            "infrequent": flags["word"] & ~self.frequent & whole,
            **{name: flags[name] & whole for name in OPEN_CLASSES},
        }

    def _starts(self, opening: Flags) -> Flags:
        """Return which tokens begin a sentence, and which follow a mark that opens one."""
        first: Flags = np.append(True, self.sentence[1:] != self.sentence[:-1])
        first[1:] |= (first & opening)[:-1]
        return first

    @cached_property
    def piece(self) -> Flags:
        """Return which tokens go on with a word that has begun."""
        word = self.word
        return np.append(False, word[1:] == word[:-1]) & ~self.tokens.special

    @cached_property
    def word(self) -> NDArray[np.int64]:
        """Return the number of each token's word; a token outside words has a number of its own."""
        words = self.tokens.words
        alone = -1 - np.arange(self.n)
        if words is None:
            return alone
        # Words of the second segment are numbered after those of the first.
        numbers = words.astype(np.int64) + (words.max(initial=0) + 1) * self.tokens.segments.astype(np.int64)
        return np.where(words >= 0, numbers, alone)

    @cached_property
    def sentence(self) -> NDArray[np.int64]:
        """Return the number of each token's sentence; special tokens are in none, each with a number of its own."""
        return self._cut(_SENTENCE_ENDS)

    @cached_property
    def clause(self) -> NDArray[np.int64]:
        """Return the number of each token's clause: what stands between two marks."""
        return self._cut(_CLAUSE_ENDS)

    @cached_property
    def line(self) -> NDArray[np.int64]:
        """Return the number of each token's line."""
        # Offsets count characters, so line breaks are found in code points, not bytes.
        starts = self.tokens.offsets[:, 0]
        breaks = np.flatnonzero(np.frombuffer(self.tokens.text.encode("utf-32-le"), "<u4") == ord("\n"))
        return np.where(starts >= 0, np.searchsorted(breaks, starts), -1 - np.arange(self.n))

    @cached_property
    def indentation(self) -> NDArray[np.int64]:
        """Return how many blanks each token's line begins with, a tab as one; special tokens have their own numbers."""
        lines = self.tokens.text.split("\n")
        widths = np.array([len(line) - len(line.lstrip(" \t")) for line in lines], np.int64)
        return np.where(self.line >= 0, widths[np.maximum(self.line, 0)], self.line)

    @cached_property
    def opener(self) -> NDArray[np.int64]:
        """Return the token with the innermost bracket that each token stands in, opens or closes; -1 = none."""
        # Brackets that stand open, each with the token it is in.
        standing: list[tuple[str, int]] = []
        openers = np.full(self.n, -1, np.int64)
        for place, surface in enumerate(self.stripped):
            innermost = standing[-1][1] if standing else -1
            # A closing bracket ends the innermost open one, if it is of the same kind.
            for sign in surface if not self.tokens.special[place] else "":
                if sign in _OPENING:
                    standing.append((sign, place))
                elif sign in _CLOSING and standing and standing[-1][0] == _OPENING[_CLOSING.index(sign)]:
                    standing.pop()
            openers[place] = max(innermost, standing[-1][1] if standing else -1)
        return openers

    def _cut(self, ends: frozenset[str]) -> NDArray[np.int64]:
        """Return the number of each token's run, which ends with a mark and the quotes and brackets that close it."""
        numbers, number, ended = np.empty(self.n, np.int64), 0, False
        for place, surface in enumerate(self.stripped):
            if self.tokens.special[place] or not surface:
                numbers[place] = -1 - place
                continue
            # A closing mark belongs to the run before it, unless a space stands between them.
            closes = surface[0] in ends or (surface[0] in "\"'”’»)]}" and not self._is_spaced(place))
            if ended and not closes:
                number, ended = number + 1, False
            numbers[place] = number
            ended = ended or (surface[0] in ends and not surface[0].isalnum())
        return numbers

    def _is_spaced(self, place: int) -> bool:
        """Return whether there is white space before a token."""
        start = int(self.tokens.offsets[place, 0])
        return self.surfaces[place][:1].isspace() or self.tokens.text[max(0, start - 1) : max(0, start)].isspace()


@cache
def _kinds_of(surface: str) -> frozenset[str]:
    """Return the kinds of a token by how it is written; see `TextFacts.classes`."""
    first = surface[0]
    lower = surface.lower()
    is_mark = all(unicodedata.category(character)[0] in "PS" for character in surface)
    # By the first character, by the whole of it, then by lists of English words.
    of_signs = {name for name, signs in _SIGNS.items() if first in signs}
    tests = {
        "punctuation": is_mark,
        "sentence_end": is_mark and first in _SENTENCE_ENDS,
        "digit": any(map(str.isdigit, surface)),
        "capital": first.isupper(),
        "word": any(map(str.isalpha, surface)),
    }
    of_words = {name for name, words in CLOSED_CLASSES.items() if lower in words}
    open_class = {class_of(lower)} & set(OPEN_CLASSES)
    return frozenset(of_signs | {name for name, holds in tests.items() if holds} | of_words | open_class)
