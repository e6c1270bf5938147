"""Change maps of weights: leave out keys, merge word pieces and patches, average heads. NumPy only."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, amount
from attnscope.questions.maps import M
from attnscope.questions.places import Picture

LEAST_LEFT = 0.01
"""What must be left of a row without special tokens for it to be shown."""

MEAN_OF = "mean of "
"""A change that begins so says what was averaged."""

AXES: dict[str, tuple[int, ...]] = {"heads": (1,), "layers": (0,), "all": (0, 1)}
"""The axes of maps, (layer, head, query, key), that a mean is over."""


def merge_weights(
    weights: NDArray[Any], rows: Sequence[Sequence[int]], columns: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Return weights, (layer, head, query, key), of groups of tokens: summed over keys, averaged over queries."""
    first_rows = [group[0] for group in rows]
    first_columns = [group[0] for group in columns]
    # (layer, head, query, word), then (layer, head, word, word).
    summed = np.add.reduceat(weights.astype(np.float64), first_columns, axis=3)
    # A piece whose row is empty says nothing of its word.
    n_filled = np.add.reduceat(summed.any(-1), first_rows, axis=2, dtype=np.int64)
    means = np.add.reduceat(summed, first_rows, axis=2) / np.maximum(n_filled, 1)[..., None]
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
    """Return a map of means of some heads over "heads", "layers" or "all"; an averaged axis has the size 1."""
    # (layer, head)
    is_shown = np.zeros(attention.values.shape[:2], bool)
    for pair in heads:
        is_shown[attention.place(*pair)] = True
    rows = np.flatnonzero(is_shown.any(1))
    columns = np.flatnonzero(is_shown.any(0))
    # (layer, head, query, key), and which of these heads count, (layer, head, 1, 1).
    chosen = np.ix_(rows, columns)
    block = attention.values[chosen]
    is_counted = is_shown[chosen][..., None, None]
    means = np.mean(block, axis=AXES[over], dtype=np.float64, where=is_counted, keepdims=True)
    # What is left of the layers, and what stands in the place of heads.
    layers: tuple[int, ...] = (0,)
    names: tuple[str, ...] = (f"{MEAN_OF}{amount(len(heads), 'head')}",)
    if over == "heads":
        layers = tuple(attention.layers[row] for row in rows)
        names = (f"{MEAN_OF}heads",)
    elif over == "layers":
        names = tuple(attention.head_name(attention.heads[column]) for column in columns)
    changed: dict[str, Any] = {attention.ARRAYS[0]: np.asarray(means, np.float32)}
    return replace(
        attention,
        **changed,
        layers=layers,
        heads=tuple(range(len(names))),
        n_layers=attention.n_layers if over == "heads" else 1,
        n_heads=len(names),
        n_kv_heads=len(names),
        head_names=names,
    )


def merge_pictures(attention: M, pictures: Sequence[Picture]) -> M:
    """Return a map with each photo as one key, that gets what all its patches get: a map of words is left.

    What stands between its patches (ends of rows, marks of tiles) is one key more. Where words attend across to the
    pictures, all else that they look at is one key.
    """
    is_across = attention.kind == "cross"
    n_keys = len(attention.keys)
    # The patches of each photo, of which there may be several pictures.
    photos: dict[str, list[int]] = {}
    for picture in pictures:
        assert picture.cells is not None
        photos.setdefault(picture.photo, []).extend(picture.cells[picture.cells >= 0].tolist())
    # The keys that become one, by its name.
    merged = {**photos}
    if is_across:
        patches = list(chain(*photos.values()))
        merged["elsewhere"] = np.setdiff1d(np.arange(n_keys), patches).tolist()
    else:
        for photo, patches in photos.items():
            between = np.arange(min(patches), max(patches))
            merged[f"marks of {photo}"] = np.setdiff1d(between, patches).tolist()
    # For each key the first one of its group, (key,); a key that stays is a group by itself.
    first_of = np.arange(n_keys)
    names = {}
    for name, group in merged.items():
        if group:
            names[min(group)] = name
            first_of[group] = min(group)
    # The first key of each group, (group,), and the group of each key, (key,).
    firsts, group_of = np.unique(first_of, return_inverse=True)
    n_groups = len(firsts)
    labels = tuple(names.get(first, attention.keys.labels[first]) for first in firsts.tolist())
    # Weights, (layer, head, query, key), summed by group.
    order = np.argsort(group_of, kind="stable")
    starts = np.searchsorted(group_of[order], np.arange(n_groups))
    weights = np.add.reduceat(attention.values[..., order], starts, axis=3, dtype=np.float64)
    part = attention.part
    if part is not None:
        first_query, _, n_queries, _ = part
        if not is_across:
            # Queries are counted among the keys. Where no row is kept, the first one lies behind all keys.
            first_query = int(group_of[min(first_query, n_keys - 1)])
            n_queries = n_groups
        part = (first_query, 0, n_queries, n_groups)
    changed: dict[str, Any] = {attention.ARRAYS[0]: weights.astype(np.float32)}
    keys = replace(attention.keys.take(firsts), labels=labels)
    return replace(attention, **changed, keys=keys, part=part)


def with_all_rows(attention: M, maps: Sequence[M]) -> M:
    """Return a part with empty rows for the queries that it lacks: a word has the same row in all maps of a record.

    A part of cross-attention stays as it is where no other map has its queries as keys.

    Raises:
        AttnscopeError: It is a part that holds some of the keys alone.
    """
    if attention.part is None:
        return attention
    first_query, first_key, n_queries, n_keys = attention.part
    queries = attention.keys
    if attention.kind == "cross":
        others = [m.keys for m in maps if m.kind != "cross" and len(m.keys) == n_queries]
        if not others:
            return replace(attention, part=None)
        queries = others[0]
    rows = slice(first_query, first_query + len(attention.queries))
    if first_key or len(attention.keys) != n_keys or queries.labels[rows] != attention.queries.labels:
        raise AttnscopeError("a part of a map with some of its keys has no page", "leave out --cols")
    # (layer, head, query, key)
    weights = np.zeros((*attention.values.shape[:2], len(queries), n_keys), np.float32)
    weights[:, :, rows] = attention.values
    changed: dict[str, Any] = {attention.ARRAYS[0]: weights}
    return replace(attention, **changed, queries=queries, part=None)


def largest_of_rows(weights: NDArray[Any], most: int) -> Iterator[tuple[int, ...]]:
    """Yield (query, key) of the `most` largest weights of each query, the largest first; 0 = of all, in their order."""
    if not most:
        yield from np.ndindex(weights.shape)
        return
    order = np.argsort(-weights, axis=1, kind="stable")[:, :most]
    for query, keys in enumerate(order.tolist()):
        for key in keys:
            yield query, key
