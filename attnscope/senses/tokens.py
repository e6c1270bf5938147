"""Make the tokens of what is no text: the patches of a picture, the frames of a recording, learned queries."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.results.tokens import Tokens


def patch_tokens(grid: tuple[int, int], before: tuple[str, ...], source: str) -> Tokens:
    """Return the tokens of a picture: those `before` that stand for no place ("CLS"), then patches "row,column".

    `grid` is how many rows and columns of patches there are.
    """
    labels = list(before)
    for row, column in np.ndindex(grid):
        labels.append(f"{row},{column}")
    is_special = np.arange(len(labels)) < len(before)
    return _tokens(source, labels, is_special)


def key_tokens(n: int, labels: Mapping[int, str], sources: Sequence[str]) -> Tokens:
    """Return n keys of cross-attention from words or learned queries: patches, and tokens without a place in a picture.

    `labels` name keys "row,column", or "CLS"; the others are there to fill up.
    """
    names = [labels.get(number, "filling") for number in range(n)]
    is_special = np.array(["," not in name for name in names])
    return _tokens(", ".join(sources), names, is_special, words=_no_words(n))


def query_tokens(n: int, objects: Mapping[int, str] | None = None) -> Tokens:
    """Return queries that a model learned, "Q0", "Q1" …, which stand for no word.

    `objects` are the objects that queries find, by the number of the query: "Q3 cat". Where some do, the others are
    special tokens.
    """
    names = [f"Q{number}" for number in range(n)]
    is_special = np.full(n, bool(objects))
    for number, found_object in (objects or {}).items():
        names[number] += f" {found_object}"
        is_special[number] = False
    return _tokens("", names, is_special, words=_no_words(n))


def frame_tokens(n: int, seconds_per_frame: float, source: str) -> Tokens:
    """Return the frames of a recording as an encoder has them, each named by when it begins."""
    # As many decimals as tell frames apart, at least two.
    _, _, decimals = f"{seconds_per_frame:g}".partition(".")
    n_decimals = max(2, len(decimals))
    labels = [f"{frame * seconds_per_frame:.{n_decimals}f}s" for frame in range(n)]
    return _tokens(source, labels, np.zeros(n, np.bool_))


def _no_words(n: int) -> NDArray[np.int32]:
    """Return the words of tokens that are part of none: -1, (token,)."""
    return np.full(n, -1, np.int32)


def _tokens(
    text: str,
    labels: Sequence[str],
    is_special: NDArray[np.bool_],
    words: NDArray[np.int32] | None = None,
) -> Tokens:
    """Return tokens numbered from 0, none of them a part of a text; without `words` their words are not known."""
    n = len(labels)
    return Tokens(
        text=text,
        ids=np.arange(n, dtype=np.int64),
        labels=tuple(labels),
        offsets=np.full((n, 2), -1, np.int32),
        special=is_special,
        words=words,
        segments=np.zeros(n, np.int32),
    )
