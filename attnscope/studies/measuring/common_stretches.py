"""One text as two tokenizers cut it, and the shortest stretches that both cut alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.records.maps.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Stretches:
    """Where the tokens of one model lie among the stretches of a text.

    Weights to the tokens of a stretch are summed, weights from them averaged, as for words (Clark et al. 2019, section
    4.1). All special tokens together are one key more, the last, and no query.

    Attributes:
        of_token: The number of the stretch that a token is part of, (token,); `n` for special tokens. Ascending without
            these.
        n: How many stretches there are.
    """

    of_token: NDArray[np.int64]
    n: int

    def pool(self, walk: Iterator[tuple[slice, NDArray[Any]]]) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Rows of tokens, (head, query, key), some queries after the others, as rows of stretches, (head, n, n + 1)."""
        n_queries = 1 + int(np.flatnonzero(self.of_token < self.n)[-1])
        waiting, unfinished = np.zeros((0, 0, 0)), np.zeros(0, np.int64)
        start = 0
        for queries, weights in walk:
            stretches = self.of_token[queries]
            rows = self._pool_keys(weights[:, stretches < self.n])
            stretches = stretches[stretches < self.n]
            if len(unfinished):
                rows, stretches = np.concatenate([waiting, rows], 1), np.concatenate([unfinished, stretches])
            # The last stretch may go on in the next rows.
            is_whole = np.full(len(stretches), queries.stop >= n_queries) | (stretches != stretches[-1:])
            waiting, unfinished = rows[:, ~is_whole], stretches[~is_whole]
            if is_whole.any():
                _, first, counts = np.unique(stretches[is_whole], return_index=True, return_counts=True)
                means = np.add.reduceat(rows[:, is_whole], first, axis=1) / counts[:, None]
                yield slice(start, start + len(first)), means.astype(weights.dtype)
                start += len(first)

    @cached_property
    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens in the order of their stretches, the stretches that have any, and where each begins in that order."""
        order = np.argsort(self.of_token, kind="stable")
        return order, *np.unique(self.of_token[order], return_index=True)

    def _pool_keys(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        order, there, first = self._runs
        pooled = np.zeros((*rows.shape[:2], self.n + 1))
        pooled[..., there] = np.add.reduceat(rows[..., order], first, axis=2, dtype=np.float64)
        return pooled

    def any_of(self, tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which keys hold one of these tokens, (n + 1,)."""
        flags = np.zeros(self.n + 1, np.bool_)
        flags[self.of_token[tokens]] = True
        return flags


def common_stretches(first: Tokens, second: Tokens) -> tuple[Stretches, Stretches] | None:
    """The stretches of a text between the cuts that two tokenizations have in common.

    White space belongs to what stands before it, and so do tokens of nothing else. None where a tokenizer cannot tell
    which characters its tokens stand for.
    """
    if first.text != second.text or not first.text.strip():
        return None
    of_character = [_token_of_characters(tokens) for tokens in (first, second)]
    if any(numbers is None for numbers in of_character):
        return None
    # A cut is where both go on to another token.
    cuts = np.logical_and(*(np.diff(numbers) > 0 for numbers in of_character if numbers is not None))
    stretch = np.concatenate([[0], np.cumsum(cuts)])
    n = int(stretch[-1]) + 1
    sides = []
    for tokens in (first, second):
        of_token = np.full(len(tokens), n)
        ordinary = ~tokens.special
        of_token[ordinary] = stretch[_first_characters(tokens)[0][ordinary]]
        if np.unique(of_token[ordinary]).size < n or (np.diff(of_token[ordinary]) < 0).any():
            return None
        sides.append(Stretches(of_token, n))
    return sides[0], sides[1]


def _first_characters(tokens: Tokens) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The first character of each token that is no white space, (token,), and which tokens are white space alone.

    Of these, the last character before them.
    """
    dark = np.flatnonzero([not character.isspace() for character in tokens.text])
    starts, ends = tokens.offsets.astype(np.int64).T
    place = np.searchsorted(dark, np.maximum(starts, 0))
    first = dark[np.minimum(place, len(dark) - 1)]
    is_blank = (place == len(dark)) | (first >= ends)
    return np.where(is_blank, dark[np.maximum(place - 1, 0)], first), is_blank


def _token_of_characters(tokens: Tokens) -> NDArray[np.int64] | None:
    """The number of the token that holds each character, (character,), ascending; None where that is not known.

    What no token holds belongs to the token before it. Of several tokens of one character, bytes of it, the first
    counts.
    """
    ordinary = ~tokens.special
    if (tokens.offsets[ordinary] < 0).any() or (tokens.segments[ordinary] > 0).any():
        return None
    first, is_blank = _first_characters(tokens)
    first = first[ordinary & ~is_blank]
    if not len(first) or (np.diff(first) < 0).any():
        return None
    token = np.searchsorted(first, np.arange(len(tokens.text)), side="right") - 1
    numbers: NDArray[np.int64] = np.searchsorted(first, first[np.maximum(token, 0)])
    return numbers
