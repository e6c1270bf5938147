"""Hold the tokens of a text: find them, merge them into words, keep them as a table. NumPy only."""

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

_PLACES = re.compile(r"@([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenised text, token by token.

    Attributes:
        text: The text that was tokenised (of a pair: the first).
        ids: The tokenizer's numbers, (token,), int64; -1 for words that were merged from several tokens.
        labels: What to show for each token: pieces as the tokenizer writes them (`##ing`), a leading space as `·`,
            bytes that are no character by themselves as `<0xE4>`. Never empty.
        offsets: First and last + 1 character of each token in its text, (token, 2), int32; (-1, -1) for tokens that
            stand for no text, such as [CLS], and for all tokens where the tokenizer cannot tell.
        special: Whether the tokenizer added the token ([CLS], [SEP], <s>), (token,), bool.
        words: Number of the word that a token is part of, from 0 in each segment, (token,), int32; -1 = part of none.
            None where the tokenizer cannot tell.
        segments: 0 for tokens of the first text, 1 for those of the second of a pair, (token,), int32.
        pair: The second text of a pair, else None.
        n_given: How many tokens were given, the rest was written by the model itself; -1 = all were given.
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
        """Return the tokens at the places `keep` (numbers or a boolean mask), in that order."""
        # Without a list of all places: each chunk of a long text is taken from the whole.
        places = (
            np.flatnonzero(keep)
            if keep.dtype == np.bool_
            else np.where(keep < 0, keep + len(self), keep)
        )
        n_given = self.n_given if self.n_given < 0 else int((places < self.n_given).sum())
        return replace(
            self,
            ids=self.ids[places],
            labels=tuple(self.labels[i] for i in places),
            offsets=self.offsets[places],
            special=self.special[places],
            words=None if self.words is None else self.words[places],
            segments=self.segments[places],
            n_given=n_given,
        )

    def sinks(self, kind: str) -> NDArray[np.bool_]:
        """On which tokens heads rest in a kind of attention, (token,), bool: what `--hide-special` leaves out.

        Special tokens; of a decoder the first token too, whatever it is (Xiao et al. 2024): many decoders, such as
        GPT-2, are given no special one.
        """
        sinks = self.special.copy()
        sinks[:1] |= kind == "decoder"  # a text may have no first token
        return sinks

    def find(self, wanted: str) -> tuple[int, ...]:
        """Place of the tokens that a user means by `wanted`.

        `@9` is the token at place 9, `@3-5` those from 3 to 5. Anything else is a whole word (all its pieces), else a
        label as it is, else a label without the mark of a word piece or a space; then the same without regard to case;
        else a phrase, wherever it stands in the text. What none of these is may be a list, such as `it,cat` or `@3,@7`.

        Returns:
            The places, in order; empty if there is none, or none for one of a list.
        """
        if (places := self.find_one(wanted)) or "," not in wanted:
            return places
        parts = [self.find_one(part.strip()) for part in wanted.split(",")]
        return tuple(sorted({*itertools.chain(*parts)})) if all(parts) else ()

    def find_part(self, wanted: str) -> tuple[int, ...]:
        """Find tokens as `find` does; `A` and `B` are all tokens of a pair's two texts, without special ones."""
        if self.pair is None or wanted not in ("A", "B"):
            return self.find(wanted)
        return tuple(np.flatnonzero((self.segments == (wanted == "B")) & ~self.special).tolist())

    def refuse(self, wanted: str, *others: Tokens) -> AttnscopeError:
        """Return what to raise where `find` finds nothing, here and in other tokens: says which tokens there are."""
        # Every token with its place, as `find` takes it: `@0 [CLS]  @1 it`.
        sides = [
            "  ".join(f"@{n} {label}" for n, label in enumerate(side.labels)) for side in (self, *others)
        ]
        labels = "; ".join(dict.fromkeys(sides))
        # Of a list, those that are nowhere.
        parts = map(str.strip, wanted.split(","))
        missing = [
            part for part in parts if not any(tokens.find_one(part) for tokens in (self, *others))
        ]
        return AttnscopeError(
            f"no token is {','.join(missing) or wanted!r}", f"the tokens are: {labels}"
        )

    def find_one(self, wanted: str) -> tuple[int, ...]:
        """Return the places of a token or phrase as `find` does, without lists."""
        if match := _PLACES.fullmatch(wanted):
            first, last = int(match[1]), int(match[2] or match[1])
            return tuple(range(first, last + 1)) if first <= last < len(self) else ()
        # The word of each token; empty where words are not known.
        spelled = [""] * len(self)
        groups = [] if self.words is None else self.word_groups()
        for group in groups:
            for i in group:
                spelled[i] = self._surface(group)
        for fold in (str, str.casefold):
            # Words come first: the end of "bandit" is a piece "it", and is not what is meant.
            for names in (spelled, self.labels, [_bare(label) for label in self.labels]):
                if places := tuple(
                    i for i, name in enumerate(names) if name and fold(name) == fold(wanted)
                ):
                    return places
        return self._find_phrase(wanted.split())

    def _find_phrase(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens of several words that stand one after the other, in any case of letters."""
        # One word is found by its label.
        if len(words) < 2:
            return ()
        phrase = r"\s+".join(map(re.escape, words))
        pattern = re.compile(rf"(?<!\w){phrase}(?!\w)", re.IGNORECASE)
        # Tokens that overlap a match, in the text or in the second of a pair.
        starts, stops = self.offsets.T
        is_found = np.zeros(len(self), bool)
        for segment, text in enumerate((self.text, self.pair or "")):
            for match in pattern.finditer(text):
                is_found |= (self.segments == segment) & (starts < match.end()) & (stops > match.start())
        return tuple(np.flatnonzero(is_found & (starts >= 0)).tolist())

    def with_words(self, words: Sequence[str]) -> Tokens:
        """Return the same tokens, of which those of a listed word are one word; others stay as they are.

        Words that make up the whole text are taken in their order, others wherever they stand, the longest first.
        """
        numbers = np.full(len(self), -1, np.int32) if self.words is None else self.words.copy()
        first_new = int(numbers.max(initial=-1)) + 1
        for segment, text in enumerate((self.text, self.pair or "")):
            for number, (start, stop) in enumerate(_spans_of(words, text), first_new):
                is_inside = (
                    (self.offsets[:, 0] < stop)
                    & (self.offsets[:, 1] > start)
                    & (self.offsets[:, 0] >= 0)
                )
                numbers[is_inside & (self.segments == segment) & ~self.special] = number
        return replace(self, words=numbers)

    def word_groups(self) -> list[list[int]]:
        """Return tokens grouped by word, in order; a token without a word is a group by itself."""
        groups: list[list[int]] = []
        # A word of the second text may have the number of one of the first.
        last: tuple[int, int] | None = None
        for i in range(len(self)):
            word = -1 if self.words is None else int(self.words[i])
            current = (int(self.segments[i]), word)
            if word >= 0 and current == last:
                groups[-1].append(i)
            else:
                groups.append([i])
            last = current if word >= 0 else None
        return groups

    def merge(self, groups: Sequence[Sequence[int]]) -> Tokens:
        """Return one token for each group of tokens, labelled with the text that the group covers."""
        # The first token of each group stands for it.
        firsts = self.take(np.array([group[0] for group in groups], np.int64))
        sizes = np.array([len(group) for group in groups])
        # A group's offsets reach from its first token to its last character.
        stops = np.array([max(self.offsets[i, 1] for i in group) for group in groups], np.int32)
        return replace(
            firsts,
            ids=np.where(sizes == 1, firsts.ids, -1),
            labels=tuple(self.labels[g[0]] if self.special[g[0]] else self._surface(g) for g in groups),
            offsets=np.stack([firsts.offsets[:, 0], stops], 1),
        )

    def _surface(self, group: Sequence[int]) -> str:
        """Return the text that neighbouring tokens cover; their labels where the text is not known."""
        text = self.text if int(self.segments[group[0]]) == 0 or self.pair is None else self.pair
        start, stop = int(self.offsets[group[0], 0]), max(int(self.offsets[i, 1]) for i in group)
        covered = text[start:stop].strip() if start >= 0 else ""
        if covered and covered.isprintable():
            return covered
        return "".join(_bare(self.labels[i]) for i in group)

    def __repr__(self) -> str:
        return f"Tokens({len(self)}: {' '.join(self.labels[:12])}{' …' if len(self) > 12 else ''})"

    def require_whole(self) -> None:
        """Refuse tokens of unequal numbers, and those that can be neither drawn nor printed."""
        sizes = {len(self.ids), len(self.offsets), len(self.special), len(self.segments), len(self)}
        if len(sizes) > 1 or (self.words is not None and len(self.words) != len(self)):
            raise ValueError("what is known of its tokens is of unequal length")
        for text in (self.text, self.pair or "", *self.labels):
            text.encode()  # fails on lone surrogates
        if not all(self.labels):
            raise ValueError("a token has no label")


def _spans_of(words: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return where words stand in a text, as (first, last + 1) character."""
    whole = re.fullmatch(r"\s*" + r"\s*".join(f"({re.escape(word)})" for word in words) + r"\s*", text)
    if whole is not None:
        return [whole.span(number) for number in range(1, len(words) + 1)]
    longest = sorted(set(words), key=len, reverse=True)
    return [match.span() for match in re.finditer("|".join(map(re.escape, longest)), text)]


_PIECE_MARKS = ("##", "·")


def _bare(label: str) -> str:
    """Return a label without the mark of a word piece or of a leading space."""
    for mark in _PIECE_MARKS:
        if label.startswith(mark) and len(label) > len(mark):
            return label[len(mark) :]
    return label


def tokens_table(tokens: Tokens) -> Table:
    """Return the tokens of a text as a table. The text itself is not in it."""
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
    """Return the tokens that a table holds.

    Args:
        table: The table.
        text: The text that was tokenised, or the first of two.
        pair: The second one.

    Raises:
        ValueError: A token has no label, or generated tokens stand before others.
    """
    # The prompt's tokens come first.
    generated = table["generated"]
    n_given = int((~generated).sum())
    if generated[:n_given].any():
        raise ValueError("tokens that the model wrote stand before others")
    # One unknown word makes all of them unknown.
    words = table["word"].astype(np.int32)
    is_unknown = bool((words == UNKNOWN_WORD).any())
    tokens = Tokens(
        text=text,
        ids=table["id"].astype(np.int64),
        labels=tuple(table["token"].tolist()),
        offsets=np.stack([table["start"], table["stop"]], -1).astype(np.int32),
        special=table["special"],
        words=None if is_unknown else words,
        segments=table["segment"].astype(np.int32),
        pair=pair,
        n_given=n_given,
    )
    tokens.require_whole()
    return tokens
