"""Hold the tokens of a text: find them by name, merge them into words, store them as a table. Needs NumPy only.

The position of a token is its index among the tokens of the text, from 0. Users write it as `@9`.
"""

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

TOKEN_COLUMNS = (
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
"""The columns of a table with one row per token, see `make_tokens_table`."""

UNKNOWN_WORD = -2
"""The value of the column `word` in all rows if the tokenizer does not tell words apart (`Tokens.words` is None)."""

_POSITIONS = re.compile(r"@([0-9]{1,9})(?:-([0-9]{1,9}))?")
"""A position as users write it, such as @9, or a range of positions, both ends included, such as @3-5."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a text, or of a pair of texts, in order. The index of a token is called its position.

    Attributes:
        text: The text that was tokenised; of a pair, the first text.
        ids: The token ids of the vocabulary, (token,), int64; -1 for a word that was merged from several tokens.
        labels: What to print for each token, never empty. Word pieces are as the tokenizer writes them (`##ing`), a
            leading space is `·`, and a byte that is no character by itself is `<0xE4>`.
        offsets: The character offsets (start, stop) of each token in its text, (token, 2), int32. (-1, -1) for tokens
            that stand for no text, such as [CLS], and for all tokens if the tokenizer has no offsets.
        special: Whether the tokenizer added the token ([CLS], [SEP], <s>), (token,), bool.
        words: The index of the word that each token is part of, from 0 in each segment, (token,), int32; -1 = part of
            no word. None = the tokenizer does not tell words apart.
        segments: 0 for tokens of the first text, 1 for tokens of the second text of a pair, (token,), int32.
        pair: The second text of a pair; None = there is one text.
        n_given: The number of tokens in the prompt. The model generated the tokens after them. -1 = it generated none.
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
        """Return some of the tokens.

        Args:
            keep: A boolean mask, (token,), or the positions of the tokens, in the order that the result has.
        """
        positions = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        n_given = self.n_given
        if n_given >= 0:
            n_given = int((positions < n_given).sum())
        return replace(
            self,
            ids=self.ids[positions],
            labels=tuple(self.labels[position] for position in positions),
            offsets=self.offsets[positions],
            special=self.special[positions],
            words=None if self.words is None else self.words[positions],
            segments=self.segments[positions],
            n_given=n_given,
        )

    def sinks(self, kind: str) -> NDArray[np.bool_]:
        """Return which tokens count as attention sinks, for one kind of attention, (token,), bool.

        A sink is a token to which heads attend when no other token is relevant. All special tokens are sinks. In a
        decoder the first token is one, too, even if it is an ordinary token (Xiao et al. 2024): many decoders, such as
        GPT-2, read no special token. `--hide-special` hides the sinks.
        """
        sinks = self.special.copy()
        # The slice selects nothing if there are no tokens, where an index would raise.
        if kind == "decoder":
            sinks[:1] = True
        return sinks

    def find(self, query: str) -> tuple[int, ...]:
        """Return the positions of the tokens that a user names.

        `@9` is the token at position 9, and `@3-5` are the tokens at the positions 3, 4 and 5. Any other name is
        compared in these ways, in this order, until one way finds tokens:

        1. With whole words (all tokens of the word match), then with labels, then with labels without `##` or `·`.
        2. With the same three, ignoring case.
        3. As a phrase of two or more words, at all its occurrences in the text.
        4. As a list of names, such as `it,cat` or `@3,@7`.

        Returns:
            The positions, ascending. () if no token matches, or if any name of a list matches no token.
        """
        positions = self.find_one(query)
        if positions or "," not in query:
            return positions
        positions_by_name = [self.find_one(name.strip()) for name in query.split(",")]
        if not all(positions_by_name):
            return ()
        return tuple(sorted({*itertools.chain(*positions_by_name)}))

    def find_part(self, query: str) -> tuple[int, ...]:
        """Return positions as `find` does. In a pair of texts "A" is all of the first, "B" all of the second.

        Neither includes special tokens.
        """
        if self.pair is None or query not in ("A", "B"):
            return self.find(query)
        segment = "AB".index(query)
        return tuple(np.flatnonzero((self.segments == segment) & ~self.special).tolist())

    def not_found(self, query: str, *others: Tokens) -> AttnscopeError:
        """Return the error for a name that `find` found neither in these tokens nor in `others`, such as the keys.

        Its hint lists all tokens with their positions, as `find` takes them: `@0 [CLS]  @1 it`.
        """
        searched = (self, *others)
        # A dict used as an ordered set: in self-attention queries and keys make equal lines, and the hint has one.
        lines: dict[str, None] = {}
        for tokens in searched:
            line = "  ".join(f"@{position} {label}" for position, label in enumerate(tokens.labels))
            lines[line] = None
        # From a list of names, only the names that match no token.
        names = map(str.strip, query.split(","))
        missing = [name for name in names if not any(tokens.find_one(name) for tokens in searched)]
        return AttnscopeError(
            f"no token is {','.join(missing) or query!r}", f"the tokens are: {'; '.join(lines)}"
        )

    def find_one(self, query: str) -> tuple[int, ...]:
        """Return the positions of the tokens that a single name names; `find` takes lists of names, too."""
        if match := _POSITIONS.fullmatch(query):
            first = int(match[1])
            last = int(match[2] or match[1])
            return tuple(range(first, last + 1)) if first <= last < len(self) else ()
        # The whole word that each token is part of; "" if words are unknown.
        words = [""] * len(self)
        if self.words is not None:
            for group in self.word_groups():
                for position in group:
                    words[position] = self._covered_text(group)
        # Compare with case first, then without. Words come before labels: the last piece of "bandit" is "it", and
        # users who say "it" mean the word.
        bare_labels = [_strip_marks(label) for label in self.labels]
        for normalise in (str, str.casefold):
            for names in (words, self.labels, bare_labels):
                positions = [
                    position
                    for position, name in enumerate(names)
                    if normalise(name) == normalise(query)
                ]
                # An empty query would match the "" of unknown words.
                if query and positions:
                    return tuple(positions)
        return self._find_phrase(query.split())

    def _find_phrase(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of the tokens of all occurrences of a phrase of two or more words, ignoring case."""
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
        """Return which tokens overlap the characters start to stop of a segment's text, (token,), bool."""
        starts, stops = self.offsets.T
        overlaps: NDArray[np.bool_] = (starts < stop) & (stops > start) & (starts >= 0)
        overlaps &= self.segments == segment
        return overlaps

    def with_words(self, words: Sequence[str]) -> Tokens:
        """Return the tokens with new word boundaries: the tokens of each occurrence of one of `words` become one word.

        If `words` joined together are the whole text, each stands for one occurrence, in order. Otherwise every
        occurrence of each is used; where two overlap, the longer one wins. Other tokens keep their word.
        """
        # New indices follow the largest old one, so no new word shares its index with an old word.
        word_indices = np.full(len(self), -1, np.int32) if self.words is None else self.words.copy()
        first_new_word = int(word_indices.max(initial=-1)) + 1
        for segment, text in enumerate((self.text, self.pair or "")):
            for word, (start, stop) in enumerate(_find_spans(words, text), first_new_word):
                word_indices[self._overlaps(segment, start, stop) & ~self.special] = word
        return replace(self, words=word_indices)

    def word_groups(self) -> list[list[int]]:
        """Return the positions of the tokens of each word, in order; a token without a word is a group by itself."""
        groups: list[list[int]] = []
        # In a pair of texts both segments count words from 0, so only (segment, word) identifies a word.
        previous: tuple[int, int] | None = None
        for position in range(len(self)):
            word = -1 if self.words is None else int(self.words[position])
            current = (int(self.segments[position]), word)
            if word >= 0 and current == previous:
                groups[-1].append(position)
            else:
                groups.append([position])
            previous = current
        return groups

    def merge(self, groups: Sequence[Sequence[int]]) -> Tokens:
        """Return one token for each group of positions, as from `word_groups`, labelled with the text it covers."""
        # A merged token is the first token of its group with another stop, another label, and the id -1. Special tokens
        # keep their labels, and groups of one token their ids.
        first_tokens = self.take(np.array([group[0] for group in groups], np.int64))
        labels = list(first_tokens.labels)
        offsets = first_tokens.offsets.copy()
        ids = first_tokens.ids.copy()
        for index, group in enumerate(groups):
            offsets[index, 1] = self.offsets[list(group), 1].max()
            if len(group) > 1:
                ids[index] = -1
            if not first_tokens.special[index]:
                labels[index] = self._covered_text(group)
        return replace(first_tokens, ids=ids, labels=tuple(labels), offsets=offsets)

    def _covered_text(self, group: Sequence[int]) -> str:
        """Return the text that neighbouring tokens cover; their joined labels if it is unknown or not printable."""
        text = self.pair if self.pair is not None and self.segments[group[0]] else self.text
        start = int(self.offsets[group[0], 0])
        stop = int(self.offsets[list(group), 1].max())
        covered = text[start:stop].strip() if start >= 0 else ""
        if covered and covered.isprintable():
            return covered
        return "".join(_strip_marks(self.labels[position]) for position in group)

    def __repr__(self) -> str:
        more = " …" if len(self) > 12 else ""
        return f"Tokens({len(self)}: {' '.join(self.labels[:12])}{more})"

    def require_whole(self) -> None:
        """Refuse damaged tokens: fields of unequal length, empty labels, texts with lone surrogates.

        Raises:
            ValueError: The tokens are damaged.
        """
        sizes = {len(self.ids), len(self.offsets), len(self.special), len(self.segments), len(self)}
        if len(sizes) > 1 or (self.words is not None and len(self.words) != len(self)):
            raise ValueError("what is known of its tokens is of unequal length")
        # A text with a lone surrogate can be neither printed nor drawn. `encode` raises UnicodeEncodeError for it, a
        # subclass of ValueError.
        for text in (self.text, self.pair or "", *self.labels):
            text.encode()
        if not all(self.labels):
            raise ValueError("a token has no label")


def _find_spans(words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return the (start, stop) characters of words in a text, by the rules of `Tokens.with_words`."""
    # A pattern for all words in order, such as "(New York)\s*(sleeps)". Group 0 is the whole match, group 1 a word.
    pattern = r"\s*".join(f"({re.escape(word)})" for word in words)
    match_of_all = re.fullmatch(rf"\s*{pattern}\s*", text)
    if match_of_all is not None:
        return [match_of_all.span(group) for group in range(1, len(words) + 1)]
    # An alternation takes the first alternative that matches, so the longest word comes first.
    longest_first = sorted(set(words), key=len, reverse=True)
    return [match.span() for match in re.finditer("|".join(map(re.escape, longest_first)), text)]


def _strip_marks(label: str) -> str:
    """Return a label without a leading ## (which marks a word piece) or · (which stands for a space)."""
    for mark in ("##", "·"):
        if label.startswith(mark) and len(label) > len(mark):
            return label[len(mark) :]
    return label


def make_tokens_table(tokens: Tokens) -> Table:
    """Return tokens as a table with one row each. It does not hold their texts."""
    n_tokens = len(tokens)
    n_given = n_tokens if tokens.n_given < 0 else tokens.n_given
    words = np.full(n_tokens, UNKNOWN_WORD) if tokens.words is None else tokens.words
    return Table.of_arrays(
        TOKEN_COLUMNS,
        token=tokens.labels,
        id=tokens.ids,
        start=tokens.offsets[:, 0],
        stop=tokens.offsets[:, 1],
        special=tokens.special,
        word=words,
        segment=tokens.segments,
        generated=np.arange(n_tokens) >= n_given,
    )


def tokens_from_table(table: Table, text: str, pair: str | None = None) -> Tokens:
    """Return the tokens of a table: the inverse of `make_tokens_table`.

    Args:
        table: The table.
        text: The text that was tokenised, or the first text of a pair.
        pair: The second text of a pair; None = there is one text.

    Raises:
        ValueError: A token has no label, or a generated token stands before a token of the prompt.
    """
    # The prompt comes first, then the tokens that the model generated.
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
