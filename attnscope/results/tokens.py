"""Hold the tokens of a text: find them by name, merge them into words, keep them as a table. NumPy only."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.results.table import Table, count, flag
from attnscope.results.table import text as text_column

TOKENS = (
    text_column("token", "the token as the tokenizer writes it; a leading space as ·"),
    count(
        "id",
        "its number in the vocabulary; -1 = a word that was merged from several tokens",
        range=(-1, None),
    ),
    count("start", "its first character in the text; -1 = it stands for no text", range=(-1, None)),
    count("stop", "the character after its last one", range=(-1, None)),
    flag("special", "whether the tokenizer added it, such as [CLS]"),
    count(
        "word",
        "the word that it is part of, from 0; -1 = none; -2 = the tokenizer cannot tell",
        range=(-2, None),
    ),
    count("segment", "0 = of the first text, 1 = of the second one of a pair", range=(0, 1)),
    flag("generated", "whether the model wrote it itself"),
)
"""The columns of a table of tokens."""

UNKNOWN_WORD = -2
"""The value of the column `word` if the tokenizer cannot tell words."""

_PLACES = re.compile(r"@([0-9]{1,9})(?:-([0-9]{1,9}))?")
"""The place of a token in the text, counted from 0, as users write it: @9; or a range of places: @3-5."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a text, or of a pair of texts, in their order. The index of a token is called its place.

    Attributes:
        text: The text that was tokenised (of a pair: the first).
        ids: The tokenizer's numbers, (token,), int64; -1 for words that were merged from several tokens.
        labels: A text to show for each token: pieces as the tokenizer writes them (`##ing`), a leading space as `·`,
            bytes that are no character by themselves as `<0xE4>`. Never empty.
        offsets: First and last + 1 character of each token in its text, (token, 2), int32; (-1, -1) for tokens that
            stand for no text, such as [CLS], and for all tokens where the tokenizer cannot tell.
        special: Whether the tokenizer added the token ([CLS], [SEP], <s>), (token,), bool.
        words: The index of the word that a token is part of, from 0 in each segment, (token,), int32; -1 = part of no
            word. None where the tokenizer cannot tell.
        segments: 0 for tokens of the first text, 1 for tokens of the second text of a pair, (token,), int32.
        pair: The second text of a pair, else None.
        n_given: How many tokens, the first ones, were given to the model; it wrote the others itself. -1 = all were.
    """

    text: str
    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    offsets: NDArray[np.int32]
    special: NDArray[np.bool_]
    words: NDArray[np.int32] | None
    segments: NDArray[np.int32]
    pair: str | None = None
    n_given: int = -1

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, keep: NDArray[Any]) -> Tokens:
        """Return some of the tokens: those of a boolean mask, or those at some places, in the order of the places."""
        places = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        n_given = self.n_given
        if n_given >= 0:
            n_given = int((places < n_given).sum())
        return replace(
            self,
            ids=self.ids[places],
            labels=tuple(self.labels[place] for place in places),
            offsets=self.offsets[places],
            special=self.special[places],
            words=None if self.words is None else self.words[places],
            segments=self.segments[places],
            n_given=n_given,
        )

    def sinks(self, kind: str) -> NDArray[np.bool_]:
        """Return which tokens are attention sinks, where heads put attention that they have no use for, (token,), bool.

        They are special tokens and, in a decoder, the first token, whatever it is (Xiao et al. 2024): many decoders,
        such as GPT-2, get no special token. `--hide-special` hides them.
        """
        sinks = self.special.copy()
        # This is a slice because a text may be empty.
        if kind == "decoder":
            sinks[:1] = True
        return sinks

    def find(self, wanted: str) -> tuple[int, ...]:
        """Return the places of the tokens that a user names.

        `@9` is the token at place 9, and `@3-5` are those at the places 3, 4 and 5. Any other name is read in these
        ways, in this order, until one finds tokens:

        1. A whole word (all its pieces); a label as it is; a label without the mark of a word piece or a space.
        2. The same three, without regard to case.
        3. A phrase, wherever it stands in the text.
        4. A list of names, such as `it,cat` or `@3,@7`.

        Returns:
            The places, ascending; empty if there is no such token, or none for one name of a list.
        """
        places = self.find_one(wanted)
        if places or "," not in wanted:
            return places
        places_by_name = [self.find_one(name.strip()) for name in wanted.split(",")]
        if not all(places_by_name):
            return ()
        return tuple(sorted({*itertools.chain(*places_by_name)}))

    def find_part(self, wanted: str) -> tuple[int, ...]:
        """Return places as `find` does. Of a pair, "A" is its first text and "B" its second, without special tokens."""
        if self.pair is None or wanted not in ("A", "B"):
            return self.find(wanted)
        segment = "AB".index(wanted)
        return tuple(np.flatnonzero((self.segments == segment) & ~self.special).tolist())

    def not_found(self, wanted: str, *others: Tokens) -> AttnscopeError:
        """Return the error for a name that `find` found neither in these tokens nor in `others`, such as the keys.

        Its hint lists all tokens with their places, as `find` takes them: `@0 [CLS]  @1 it`.
        """
        searched = (self, *others)
        # The keys of a dict, so that equal lines of queries and keys stand there once.
        lines: dict[str, None] = {}
        for tokens in searched:
            lines["  ".join(f"@{place} {label}" for place, label in enumerate(tokens.labels))] = None
        # Of a list of names, those that were found nowhere.
        names = map(str.strip, wanted.split(","))
        missing = [name for name in names if not any(tokens.find_one(name) for tokens in searched)]
        return AttnscopeError(
            f"no token is {','.join(missing) or wanted!r}", f"the tokens are: {'; '.join(lines)}"
        )

    def find_one(self, wanted: str) -> tuple[int, ...]:
        """Return the places of the tokens that one name names; `find` takes lists of names, too."""
        if match := _PLACES.fullmatch(wanted):
            first = int(match[1])
            last = int(match[2] or match[1])
            return tuple(range(first, last + 1)) if first <= last < len(self) else ()
        # The whole word that each token is part of; empty where words are not known.
        words = [""] * len(self)
        if self.words is not None:
            for group in self.word_groups():
                for place in group:
                    words[place] = self._surface(group)
        # Letters have to agree in case first, then in any case. Words come before labels: the last piece of "bandit" is
        # "it", and users who say "it" mean the word.
        bare_labels = [_bare(label) for label in self.labels]
        for normalise in (str, str.casefold):
            for names in (words, self.labels, bare_labels):
                places = [
                    place for place, name in enumerate(names) if normalise(name) == normalise(wanted)
                ]
                if wanted and places:
                    return tuple(places)
        return self._find_phrase(wanted.split())

    def _find_phrase(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the places of two or more words that follow each other in the text, in any case of letters."""
        if len(words) < 2:
            return ()
        phrase = r"\s+".join(map(re.escape, words))
        pattern = re.compile(rf"(?<!\w){phrase}(?!\w)", re.IGNORECASE)
        is_found = np.zeros(len(self), bool)
        for segment, text in enumerate((self.text, self.pair or "")):
            for match in pattern.finditer(text):
                is_found |= self._overlaps(segment, *match.span())
        return tuple(np.flatnonzero(is_found).tolist())

    def _overlaps(self, segment: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens share characters with text[start:stop] of a segment, (token,), bool."""
        starts, stops = self.offsets.T
        overlaps: NDArray[np.bool_] = (starts < stop) & (stops > start) & (starts >= 0)
        overlaps &= self.segments == segment
        return overlaps

    def with_words(self, words: Sequence[str]) -> Tokens:
        """Return the same tokens, grouped into other words: those that cover one of `words` become one word.

        If `words` make up the whole text, they are taken in their order. Otherwise each is found wherever it stands,
        the longest first. Tokens that cover none of them keep their word.
        """
        word_indices = np.full(len(self), -1, np.int32) if self.words is None else self.words.copy()
        first_new = int(word_indices.max(initial=-1)) + 1
        for segment, text in enumerate((self.text, self.pair or "")):
            for word, (start, stop) in enumerate(_spans_of(words, text), first_new):
                word_indices[self._overlaps(segment, start, stop) & ~self.special] = word
        return replace(self, words=word_indices)

    def word_groups(self) -> list[list[int]]:
        """Return the places of the tokens of each word, in order; a token without a word is a group by itself."""
        groups: list[list[int]] = []
        # Both texts of a pair count their words from 0: a word is (segment, word).
        previous: tuple[int, int] | None = None
        for place in range(len(self)):
            word = -1 if self.words is None else int(self.words[place])
            current = (int(self.segments[place]), word)
            if word >= 0 and current == previous:
                groups[-1].append(place)
            else:
                groups.append([place])
            previous = current
        return groups

    def merge(self, groups: Sequence[Sequence[int]]) -> Tokens:
        """Return one token for each group of places, such as `word_groups`; its label is the text that it covers."""
        # A merged token is the first one of its group, with another end, another label, and no id.
        firsts = self.take(np.array([group[0] for group in groups], np.int64))
        labels = list(firsts.labels)
        offsets = firsts.offsets.copy()
        ids = firsts.ids.copy()
        for index, group in enumerate(groups):
            offsets[index, 1] = self.offsets[list(group), 1].max()
            if len(group) > 1:
                ids[index] = -1
            if not firsts.special[index]:
                labels[index] = self._surface(group)
        return replace(firsts, ids=ids, labels=tuple(labels), offsets=offsets)

    def _surface(self, group: Sequence[int]) -> str:
        """Return the text that neighbouring tokens cover; their labels if it is not known or cannot be printed."""
        text = self.pair if self.pair is not None and self.segments[group[0]] else self.text
        start = int(self.offsets[group[0], 0])
        stop = int(self.offsets[list(group), 1].max())
        covered = text[start:stop].strip() if start >= 0 else ""
        if covered and covered.isprintable():
            return covered
        return "".join(_bare(self.labels[place]) for place in group)

    def __repr__(self) -> str:
        more = " …" if len(self) > 12 else ""
        return f"Tokens({len(self)}: {' '.join(self.labels[:12])}{more})"

    def require_whole(self) -> None:
        """Refuse damaged tokens: fields of unequal length, empty labels, texts that cannot be encoded.

        Raises:
            ValueError: They are damaged.
        """
        sizes = {len(self.ids), len(self.offsets), len(self.special), len(self.segments), len(self)}
        if len(sizes) > 1 or (self.words is not None and len(self.words) != len(self)):
            raise ValueError("what is known of its tokens is of unequal length")
        # Lone surrogates cannot be encoded, thus neither drawn nor printed: UnicodeEncodeError is a ValueError.
        for text in (self.text, self.pair or "", *self.labels):
            text.encode()
        if not all(self.labels):
            raise ValueError("a token has no label")


def _spans_of(words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return where words stand in a text, as (first, last + 1) character; see `Tokens.with_words`."""
    # The whole text in the order of words, a group of the pattern for each; group 0 is the whole match.
    pattern = r"\s*".join(f"({re.escape(word)})" for word in words)
    whole = re.fullmatch(rf"\s*{pattern}\s*", text)
    if whole is not None:
        return [whole.span(group) for group in range(1, len(words) + 1)]
    longest = sorted(set(words), key=len, reverse=True)
    return [match.span() for match in re.finditer("|".join(map(re.escape, longest)), text)]


def _bare(label: str) -> str:
    """Return a label without the mark of a word piece (##) or of a leading space (·)."""
    for mark in ("##", "·"):
        if label.startswith(mark) and len(label) > len(mark):
            return label[len(mark) :]
    return label


def tokens_table(tokens: Tokens) -> Table:
    """Return tokens as a table. Their texts are not in it."""
    n_tokens = len(tokens)
    n_given = n_tokens if tokens.n_given < 0 else tokens.n_given
    words = np.full(n_tokens, UNKNOWN_WORD) if tokens.words is None else tokens.words
    return Table.of_arrays(
        TOKENS,
        token=tokens.labels,
        id=tokens.ids,
        start=tokens.offsets[:, 0],
        stop=tokens.offsets[:, 1],
        special=tokens.special,
        word=words,
        segment=tokens.segments,
        generated=np.arange(n_tokens) >= n_given,
    )


def tokens_of(table: Table, text: str, pair: str | None = None) -> Tokens:
    """Return the tokens that `tokens_table` made a table of.

    Args:
        table: The table.
        text: The text that was tokenised, or the first text of a pair.
        pair: The second text of a pair.

    Raises:
        ValueError: A token has no label, or one that the model wrote stands before one that it was given.
    """
    # Those that were given come first.
    generated = table["generated"]
    n_given = int((~generated).sum())
    if generated[:n_given].any():
        raise ValueError("tokens that the model wrote stand before others")
    words = table["word"].astype(np.int32)
    tokens = Tokens(
        text=text,
        ids=table["id"].astype(np.int64),
        labels=tuple(table["token"].tolist()),
        offsets=np.stack([table["start"], table["stop"]], -1).astype(np.int32),
        special=table["special"],
        words=None if UNKNOWN_WORD in words else words,
        segments=table["segment"].astype(np.int32),
        pair=pair,
        n_given=n_given,
    )
    tokens.require_whole()
    return tokens
