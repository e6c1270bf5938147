"""What stands for tokens where there is no text: the patches of a picture, the frames of a recording."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.results.tokens import Tokens


def patch_tokens(grid: tuple[int, int], before: tuple[str, ...], source: str) -> Tokens:
    """Return the tokens of a picture: those `before` that stand for no place ("CLS"), then patches "row,column"."""
    patches = [f"{row},{column}" for row, column in np.ndindex(grid)]
    n = len(before) + len(patches)
    return _tokens(source, (*before, *patches), special=np.arange(n) < len(before))


def key_tokens(n: int, labels: Mapping[int, str], sources: Sequence[str]) -> Tokens:
    """Return n keys of cross-attention from words or learned queries: patches, and tokens without a place in a picture.

    `labels` name keys "row,column", or "CLS"; the others are there to fill up.
    """
    names = [labels.get(number, "filling") for number in range(n)]
    special = np.array(["," not in name for name in names])
    return _tokens(", ".join(sources), names, special, words=np.full(n, -1, np.int32))


def query_tokens(n: int, objects: Mapping[int, str] | None = None) -> Tokens:
    """Return queries that a model learned, "Q0", "Q1" …, which stand for no word.

    Where some find objects ("Q3 cat"), the others are special tokens.
    """
    objects = objects or {}
    names = [f"Q{number} {objects.get(number, '')}".strip() for number in range(n)]
    special = np.array([bool(objects) and number not in objects for number in range(n)])
    return _tokens("", names, special, words=np.full(n, -1, np.int32))


def frame_tokens(n: int, seconds_per_frame: float, source: str) -> Tokens:
    """Return the frames of a recording as an encoder has them, each named by when it begins."""
    digits = max(2, len(f"{seconds_per_frame:g}".partition(".")[2]))
    return _tokens(source, [f"{frame * seconds_per_frame:.{digits}f}s" for frame in range(n)])


def _tokens(
    text: str,
    labels: Sequence[str],
    special: NDArray[np.bool_] | None = None,
    words: NDArray[np.int32] | None = None,
) -> Tokens:
    """Return tokens numbered from 0, none of them a part of a text."""
    n = len(labels)
    return Tokens(
        text=text,
        ids=np.arange(n, dtype=np.int64),
        labels=tuple(labels),
        offsets=np.full((n, 2), -1, np.int32),
        special=np.zeros(n, np.bool_) if special is None else special,
        words=words,
        segments=np.zeros(n, np.int32),
    )
