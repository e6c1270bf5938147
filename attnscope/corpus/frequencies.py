"""Count how often each token occurs in a corpus. Tokenising is left to the caller's function."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.corpus.batching import Encode, tokens_of
from attnscope.corpus.texts import CorpusText


class TokenCounts:
    """Hold how often each token occurs; the order of adding does not matter.

    Attributes:
        counts: By token number, int64; as long as the largest number that was seen needs.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def total(self) -> int:
        """Return the number of tokens counted."""
        return int(self.counts.sum())

    def add(self, ids: ArrayLike) -> None:
        """Count the tokens of a text."""
        numbers = np.asarray(ids, np.int64).ravel()
        n_missing = numbers.max(initial=-1) + 1 - len(self.counts)
        if n_missing > 0:
            self.counts = np.pad(self.counts, (0, n_missing))
        np.add.at(self.counts, numbers, 1)

    def log_frequency(self, n_vocab: int) -> NDArray[np.float64]:
        """Return the natural logarithm of each token's relative frequency, (token number,), below 0.

        Add-one smoothing: ln((count + 1) / (total + n_vocab)), so that a token never seen has a frequency too and all
        of them sum to 1.

        `n_vocab` is at least the largest number that was counted, and one.
        """
        counts = np.pad(self.counts, (0, n_vocab - len(self.counts)))
        return np.log((counts + 1) / (self.total + n_vocab))


def count_tokens(
    texts: Iterable[CorpusText],
    encode: Encode,
    special_ids: Iterable[int] = (),
    tell: Callable[[int, int], None] | None = None,
) -> TokenCounts:
    """Count the tokens of a corpus, special ones left out, in one pass and constant memory.

    `special_ids` are the special tokens of texts that come as numbers. After each text `tell` is told how many texts
    and tokens there were.
    """
    counts = TokenCounts()
    special = frozenset(special_ids)
    n_tokens = 0
    for number, text in enumerate(texts, 1):
        tokens = tokens_of(text, encode, special)
        counts.add(tokens.ids[~tokens.special])
        n_tokens += len(tokens)
        if tell is not None:
            tell(number, n_tokens)
    return counts
