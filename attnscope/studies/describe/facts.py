"""Work out the facts of one text that features need: kinds of tokens, sentences, lines and brackets.

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
Numbers = NDArray[np.int64]

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
        tokens = self.tokens
        surfaces = []
        for place, label in enumerate(tokens.labels):
            # The text itself, because the tokenizer's label may have lost case or line breaks.
            start, stop = tokens.offsets[place].tolist()
            text = tokens.pair if tokens.segments[place] else tokens.text
            written = (text or "")[start:stop] if 0 <= start < stop else ""
            if not written and not tokens.special[place]:
                written = label.removeprefix("##").replace("·", " ")
            surfaces.append(written)
        return tuple(surfaces)

    @cached_property
    def stripped(self) -> tuple[str, ...]:
        """Return each token as in `surfaces`, without white space around it."""
        return tuple(surface.strip() for surface in self.surfaces)

    @cached_property
    def classes(self) -> Mapping[str, Flags]:
        """Return kinds of tokens, each (token,)."""
        is_ordinary = ~self.tokens.special
        kinds = [_kinds_of(surface) for surface in self.stripped]
        flags = {name: np.array([name in of_token for of_token in kinds], np.bool_) & is_ordinary for name in _KINDS}
        is_piece = self.piece
        # A name is capitalised and begins no sentence, and follows no mark that opens one.
        is_start: Flags = np.append(True, self.sentence[1:] != self.sentence[:-1])
        is_start[1:] |= (is_start & flags["opening"])[:-1]
        flags["capital"] &= ~is_piece
        flags["name"] = flags["capital"] & ~is_start
        flags["piece"] = is_piece
        flags["frequent"] = flags["word"] & self.frequent & ~is_piece
        flags["infrequent"] = flags["word"] & ~self.frequent & ~is_piece
        # Tokens with a line break in them; where the tokenizer drops line breaks, there are none.
        flags["newline"] = np.array(["\n" in surface for surface in self.surfaces], np.bool_) & is_ordinary
        for name in OPEN_CLASSES:
            flags[name] &= ~is_piece
        return flags

    @cached_property
    def piece(self) -> Flags:
        """Return which tokens go on with a word that has begun."""
        words = self.tokens.words
        if words is None:
            return np.zeros(self.n, np.bool_)
        # The same word as the token before, in the same segment.
        segments = self.tokens.segments
        goes_on = (words[1:] == words[:-1]) & (segments[1:] == segments[:-1]) & (words[1:] >= 0)
        return np.append(False, goes_on) & ~self.tokens.special

    @cached_property
    def sentence(self) -> Numbers:
        """Return the number of each token's sentence; special tokens are in none, each with a number of its own.

        A sentence ends with a mark and the quotes and brackets that close it.
        """
        numbers = -1 - np.arange(self.n)
        number = 0
        has_ended = False
        for place, surface in enumerate(self.stripped):
            if self.tokens.special[place] or not surface:
                continue
            # A closing mark belongs to the sentence before it, unless a space stands between them.
            is_end = surface[0] in _SENTENCE_ENDS
            start = max(0, int(self.tokens.offsets[place, 0]))
            # The space is the character before the token, or the first one in it.
            around_start = self.tokens.text[max(0, start - 1) : start] + self.surfaces[place][:1]
            closes = is_end or (surface[0] in _CLOSING and not any(map(str.isspace, around_start)))
            if has_ended and not closes:
                number += 1
                has_ended = False
            numbers[place] = number
            has_ended = has_ended or is_end
        return numbers

    @cached_property
    def line(self) -> Numbers:
        """Return the number of each token's line; a token without a place in the text has a number of its own."""
        # Offsets count characters, so line breaks are found in code points, not bytes.
        starts = self.tokens.offsets[:, 0]
        breaks = np.flatnonzero(np.frombuffer(self.tokens.text.encode("utf-32-le"), "<u4") == ord("\n"))
        return np.where(starts >= 0, np.searchsorted(breaks, starts), -1 - np.arange(self.n))

    @cached_property
    def opener(self) -> Numbers:
        """Return the token with the innermost bracket that each token stands in, opens or closes; -1 = none."""
        # Brackets that stand open, each with the token it is in.
        standing = [("", -1)]
        openers = np.full(self.n, -1, np.int64)
        for place, surface in enumerate(self.stripped):
            innermost = standing[-1][1]
            # A closing bracket ends the innermost open one, if it is of the same kind.
            signs = "" if self.tokens.special[place] else surface
            for sign in signs:
                if sign in _BRACKETS.values():
                    standing.append((sign, place))
                elif sign in _BRACKETS and standing[-1][0] == _BRACKETS[sign]:
                    standing.pop()
            # A token that closes a bracket has the innermost one before it, one that opens a bracket itself.
            openers[place] = max(innermost, standing[-1][1])
        return openers


@cache
def _kinds_of(surface: str) -> frozenset[str]:
    """Return the kinds of a token by how it is written; see `TextFacts.classes`."""
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
