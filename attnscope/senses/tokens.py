"""Make `Tokens` for inputs that are not text: image patches, audio frames, learned queries (as in a Q-Former).

Their labels serve as names in heatmaps. No token has a word, an offset or an id of a tokenizer.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.results.tokens import Tokens


def make_patch_tokens(grid: tuple[int, int], special_labels: tuple[str, ...], source: str) -> Tokens:
    """Return the tokens of a picture: special tokens such as "CLS", then the patches, each labelled "row,column".

    Args:
        grid: The number of rows and the number of columns of patches.
        special_labels: The labels of the special tokens.
        source: The name of the picture, which becomes the text of the tokens.
    """
    labels = list(special_labels)
    for row, column in np.ndindex(grid):
        labels.append(f"{row},{column}")
    is_special = np.arange(len(labels)) < len(special_labels)
    return _make_tokens(source, labels, is_special)


def make_key_tokens(n_keys: int, labels: Mapping[int, str], sources: Sequence[str]) -> Tokens:
    """Return the tokens that a cross-attention to pictures has as keys.

    Args:
        n_keys: The number of keys.
        labels: By the index of a key, its label: "row,column" for a patch, a word such as "CLS" for a special token. A
            key without a label is padding.
        sources: The names of the pictures.
    """
    key_labels = [labels.get(index, "filling") for index in range(n_keys)]
    # Only the labels of patches, "row,column", have a comma. Padding counts as special.
    is_special = np.array(["," not in label for label in key_labels])
    return _make_tokens(", ".join(sources), key_labels, is_special, has_no_words=True)


def make_query_tokens(n_queries: int, objects: Mapping[int, str] | None = None) -> Tokens:
    """Return tokens for the learned queries of a model, labelled "Q0", "Q1", ….

    Args:
        n_queries: The number of queries.
        objects: By the index of a query, the object that it detected: {3: "cat"} makes the label "Q3 cat". If there are
            any objects, the queries without one become special tokens.
    """
    labels = [f"Q{index}" for index in range(n_queries)]
    is_special = np.full(n_queries, bool(objects))
    for index, object_name in (objects or {}).items():
        labels[index] += f" {object_name}"
        is_special[index] = False
    return _make_tokens("", labels, is_special, has_no_words=True)


def make_frame_tokens(n_frames: int, seconds_per_frame: float, source: str) -> Tokens:
    """Return the tokens of a recording, one per frame of the audio encoder, labelled with its start time: "0.02s"."""
    # The labels get as many decimals as the seconds per frame have, at least two, so that no two labels are equal.
    _, _, decimals = f"{seconds_per_frame:g}".partition(".")
    n_decimals = max(2, len(decimals))
    labels = [f"{frame * seconds_per_frame:.{n_decimals}f}s" for frame in range(n_frames)]
    return _make_tokens(source, labels, np.zeros(n_frames, np.bool_))


def _make_tokens(
    text: str,
    labels: Sequence[str],
    is_special: NDArray[np.bool_],
    has_no_words: bool = False,
) -> Tokens:
    """Return tokens with the ids 0, 1, 2, … and without offsets (-1), because they stand for no characters of a text.

    Args:
        text: The text of the tokens.
        labels: Their labels.
        is_special: Which tokens are special, (token,).
        has_no_words: True = every token is part of no word (-1). False = the words are unknown (None).
    """
    n_tokens = len(labels)
    return Tokens(
        text=text,
        ids=np.arange(n_tokens, dtype=np.int64),
        labels=tuple(labels),
        offsets=np.full((n_tokens, 2), -1, np.int32),
        special=is_special,
        words=np.full(n_tokens, -1, np.int32) if has_no_words else None,
        segments=np.zeros(n_tokens, np.int32),
    )
