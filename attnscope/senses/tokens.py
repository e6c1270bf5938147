"""Make Tokens of what is no text: the patches of a picture, the frames of a recording, learned queries."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.results.tokens import Tokens


def patch_tokens(grid: tuple[int, int], special_labels: tuple[str, ...], source: str) -> Tokens:
    """Return the tokens of a picture: special ones such as "CLS", then the patches, "row,column".

    Args:
        grid: How many rows and columns of patches there are.
        special_labels: The labels of the special tokens.
        source: What to call the picture.
    """
    labels = list(special_labels)
    for row, column in np.ndindex(grid):
        labels.append(f"{row},{column}")
    is_special = np.arange(len(labels)) < len(special_labels)
    return _tokens(source, labels, is_special)


def key_tokens(n: int, labels: Mapping[int, str], sources: Sequence[str]) -> Tokens:
    """Return the keys of a cross-attention to pictures.

    Args:
        n: How many keys there are.
        labels: By the index of a key: "row,column" of a patch, or "CLS" of a special token. Keys without a label are
            padding.
        sources: What to call the pictures.
    """
    names = [labels.get(index, "filling") for index in range(n)]
    # The labels of patches, and only they, have a comma.
    is_special = np.array(["," not in name for name in names])
    return _tokens(", ".join(sources), names, is_special, in_no_word=True)


def query_tokens(n: int, objects: Mapping[int, str] | None = None) -> Tokens:
    """Return queries that a model learned, "Q0", "Q1" …, which stand for no word.

    Args:
        n: How many queries there are.
        objects: The objects that some queries found, by the index of the query: {3: "cat"} makes "Q3 cat". If there
            are any, all other queries are special tokens.
    """
    names = [f"Q{index}" for index in range(n)]
    is_special = np.zeros(n, np.bool_)
    if objects:
        is_special[:] = True
        for index, label in objects.items():
            names[index] += f" {label}"
            is_special[index] = False
    return _tokens("", names, is_special, in_no_word=True)


def frame_tokens(n: int, seconds_per_frame: float, source: str) -> Tokens:
    """Return the frames of a recording that an encoder attends to, each labelled with when it begins: "0.02s"."""
    # Enough decimals to tell frames apart, at least two.
    _, _, decimals = f"{seconds_per_frame:g}".partition(".")
    n_decimals = max(2, len(decimals))
    labels = [f"{frame * seconds_per_frame:.{n_decimals}f}s" for frame in range(n)]
    return _tokens(source, labels, np.zeros(n, np.bool_))


def _tokens(
    text: str,
    labels: Sequence[str],
    is_special: NDArray[np.bool_],
    in_no_word: bool = False,
) -> Tokens:
    """Return tokens with the ids 0, 1, 2 …, none of them a part of a text.

    If they are in no word, the words of all are -1; else whether they form words is not known.
    """
    n = len(labels)
    return Tokens(
        text=text,
        ids=np.arange(n, dtype=np.int64),
        labels=tuple(labels),
        offsets=np.full((n, 2), -1, np.int32),
        special=is_special,
        words=np.full(n, -1, np.int32) if in_no_word else None,
        segments=np.zeros(n, np.int32),
    )
