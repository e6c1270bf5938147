"""Change maps of weights: leave out keys, merge word pieces, average heads. NumPy only."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.questions.maps import M

LEAST_LEFT = 0.01
"""What must be left of a row without special tokens for it to be shown."""

MEAN_OF = "mean of "
"""A change that begins so says what was averaged."""

AXES: dict[str, tuple[int, ...]] = {"heads": (1,), "layers": (0,), "all": (0, 1)}


def merge_weights(
    weights: NDArray[Any], rows: Sequence[int], columns: Sequence[int]
) -> NDArray[np.float32]:
    """Return weights, (layer, head, query, key), of groups of tokens: summed over keys, averaged over queries.

    Groups are given by their first places.
    """
    # (layer, head, query, word), then (layer, head, word, word).
    summed = np.add.reduceat(weights.astype(np.float64), columns, axis=3)
    # A piece whose row is empty says nothing of its word.
    filled = np.add.reduceat(summed.any(-1), rows, axis=2, dtype=np.int64)
    means = np.add.reduceat(summed, rows, axis=2) / np.maximum(filled, 1)[..., None]
    return np.asarray(means, np.float32)


def divide_by_rest(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return what is left of rows without some of their keys, (..., key), each divided by its sum.

    A row of which less than 1% is left becomes zeros; NaN stays.
    """
    exact = weights.astype(np.float64)
    total = exact.sum(-1, keepdims=True)
    nothing = np.where(np.isnan(exact), np.nan, 0.0)
    shares: NDArray[np.float64] = np.divide(exact, total, out=nothing, where=total >= LEAST_LEFT)
    return shares


def average(attention: M, heads: Sequence[tuple[int, int]], over: str) -> M:
    """Return a map of means of some heads, (layer, head, query, key) with 1 in place of what is averaged over."""
    is_shown = np.zeros(attention.values.shape[:2], bool)
    for pair in heads:
        is_shown[attention.place(*pair)] = True
    rows, columns = np.flatnonzero(is_shown.any(1)), np.flatnonzero(is_shown.any(0))
    block, counted = (
        attention.values[np.ix_(rows, columns)],
        is_shown[np.ix_(rows, columns)][..., None, None],
    )
    means = np.asarray(np.mean(block, axis=AXES[over], dtype=np.float64, where=counted, keepdims=True))
    # What the layers and the heads are called now.
    names = tuple(attention.head_name(attention.heads[column]) for column in columns)
    if over != "layers":
        names = (f"{MEAN_OF}{amount(len(heads), 'head')}",) if over == "all" else (f"{MEAN_OF}heads",)
    has_layers = over == "heads"
    changed: dict[str, Any] = {attention.ARRAYS[0]: means.astype(np.float32)}
    return replace(
        attention,
        **changed,
        layers=tuple(attention.layers[row] for row in rows) if has_layers else (0,),
        heads=tuple(range(len(names))),
        n_layers=attention.n_layers if has_layers else 1,
        n_heads=len(names),
        n_kv_heads=len(names),
        head_names=names,
    )


def largest_of_rows(weights: NDArray[Any], most: int) -> Iterator[tuple[int, ...]]:
    """Yield places in weights, (query, key), query by query: all keys, or those with the largest weights first."""
    if not most:
        yield from np.ndindex(weights.shape)
        return
    order = np.argsort(-weights, axis=1, kind="stable")[:, :most]
    for query, keys in enumerate(order.tolist()):
        for key in keys:
            yield query, key
