"""How often each token comes: counted in a corpus, or read from a list of words."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.corpus.batching import Encode, tokens_of
from attnscope.corpus.formats import LARGEST_ID, Problem, format_of, is_id, is_unicode, is_whole, json_object, shorten
from attnscope.corpus.lines import UnreadableError, decompress, lines_of, read_pieces
from attnscope.corpus.texts import CorpusText
from attnscope.errors import AttnscopeError
from attnscope.pipes import open_input

_MOST_TIMES = 10**15


class TokenCounts:
    """How often each token comes: an empty one is the identity of `merge`, and the order of adding is no matter."""

    def __init__(self) -> None:
        self._n = 0
        self._held = np.zeros(64, np.int64)  # with room to grow

    @property
    def counts(self) -> NDArray[np.int64]:
        """By token number, int64; as long as the largest number that was seen needs."""
        return self._held[: self._n].copy()

    @property
    def total(self) -> int:
        """The number of tokens counted."""
        return int(self._held.sum())

    def add(self, ids: ArrayLike, times: int = 1) -> None:
        """Counts the tokens of a text, each `times` times.

        Raises:
            ValueError: A number is negative, or beyond 2^24, which no vocabulary reaches.
        """
        numbers = np.asarray(ids, np.int64).ravel()
        if not len(numbers) or not times:
            return
        if numbers.min() < 0 or numbers.max() > LARGEST_ID:
            raise ValueError(f"token numbers are 0 to 2^24; got {numbers.min()} to {numbers.max()}")
        self._reach(int(numbers.max()) + 1)
        np.add.at(self._held, numbers, times)

    def merge(self, other: "TokenCounts") -> "TokenCounts":
        """The counts of both; neither is changed."""
        whole = TokenCounts()
        for part in (self, other):
            whole._reach(part._n)
            whole._held[: part._n] += part._held[: part._n]
        return whole

    def log_frequency(self, n_vocab: int) -> NDArray[np.float64]:
        """The natural logarithm of each token's relative frequency, (token number,), below 0.

        Add-one smoothing: ln((count + 1) / (total + n_vocab)), so that a token never seen has a frequency too and all
        of them sum to 1.

        Raises:
            AttnscopeError: Tokens were counted that the vocabulary does not have.
        """
        if self._n > n_vocab:
            raise AttnscopeError(f"token {self._n - 1} was counted, but the vocabulary has {n_vocab}")
        seen = np.flatnonzero(self._held)  # few of a large vocabulary
        logs = np.log((np.append(self._held[seen], 0) + 1) / (self.total + n_vocab))
        frequency: NDArray[np.float64] = np.full(n_vocab, logs[-1])
        frequency[seen] = logs[:-1]
        return frequency

    def _reach(self, n: int) -> None:
        self._n = max(n, self._n)
        if n > len(self._held):
            longer = np.zeros(max(n, 2 * len(self._held)), np.int64)  # takes memory where it is written alone
            longer[: len(self._held)] = self._held
            self._held = longer


def count_tokens(
    texts: Iterable[CorpusText],
    encode: Encode,
    special_ids: Iterable[int] = (),
    tell: Callable[[int, int], None] | None = None,
) -> TokenCounts:
    """Counts the tokens of a corpus, special ones left out, in one pass and constant memory.

    `special_ids` are the special tokens of texts that come as numbers. After each text `tell` is told how many texts
    and tokens there were.
    """
    counts, special = TokenCounts(), frozenset(special_ids)
    n_tokens = 0
    for number, text in enumerate(texts, 1):
        tokens = tokens_of(text, encode, special)
        counts.add(tokens.ids[~tokens.special])
        n_tokens += len(tokens)
        if tell is not None:
            tell(number, n_tokens)
    return counts


def read_frequencies(path: str | Path, encode: Encode) -> TokenCounts:
    """Token counts from a list of words: `word<tab>count` a line, or jsonl with `word` (or `id`) and `count`.

    Each token of a word gets the word's count. A word is tokenised as it is and as it is after a space, for many
    tokenizers have two tokens for that; where they differ, the tokens of both get the count. A list may be gzipped.

    Raises:
        AttnscopeError: It cannot be read, a line is malformed, or there is no line.
    """
    name, hint = str(path), "a list of frequencies has word, tab, count on each line"
    counts: TokenCounts | None = None
    read_frequency = _json_frequency if format_of(name) == "jsonl" else _tab_frequency
    try:
        with open_input(Path(path)) as file:
            for number, line in enumerate(lines_of(decompress(read_pieces(file, lambda n: None), name)), 1):
                if not line.strip():
                    continue
                counts = counts or TokenCounts()
                word, count = read_frequency(line, number)
                if isinstance(word, int):
                    counts.add([word], count)
                    continue
                encoded = [encode(form) for form in (word, f" {word}")]
                for ids in {tuple(tokens.ids[~tokens.special].tolist()) for tokens in encoded}:
                    counts.add(ids, count)
    except UnreadableError as error:
        raise AttnscopeError(str(Problem(name, error.line, error.reason)), hint) from None
    except OSError as error:
        raise AttnscopeError(f"cannot read {name}: {error.strerror or error}") from None
    if counts is None:
        raise AttnscopeError(f"{name} is empty", hint)
    return counts


def _tab_frequency(line: str, number: int) -> tuple[str | int, int]:
    word, _, count = line.rpartition("\t")
    if not word or not (count := count.strip()).isdecimal() or len(count) > 15:
        raise UnreadableError(f"not a word, a tab and a whole number: {shorten(line)}", number)
    return word, int(count)


def _json_frequency(line: str, number: int) -> tuple[str | int, int]:
    entry = json_object(line)
    if isinstance(entry, str):
        raise UnreadableError(entry, number)
    word: Any = entry.get("id", entry.get("word"))
    count: Any = entry.get("count")
    is_known = is_id(word) if "id" in entry else isinstance(word, str) and is_unicode(word)
    if not is_known or not is_whole(count, _MOST_TIMES):
        raise UnreadableError(f'no "word" (or "id") and whole "count": {shorten(line)}', number)
    return word, count
