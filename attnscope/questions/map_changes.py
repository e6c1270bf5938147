"""Change maps of weights: leave out keys, merge word pieces and patches, average heads. NumPy only.

The maps (`questions.maps`) hold an array of weights, (layer, head, query, key), and what its axes stand for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, amount
from attnscope.questions.maps import M, MapPart
from attnscope.questions.places import Picture

MIN_ROW_SUM = 0.01
"""The least sum of a row, after special tokens were left out, for the row to be shown."""

MEAN_NAME_PREFIX = "mean of "
"""The beginning of the names that averaged heads get, such as "mean of 3 heads"."""

MEAN_AXES: dict[str, tuple[int, ...]] = {"heads": (1,), "layers": (0,), "all": (0, 1)}
"""The axes of (layer, head, query, key) that each kind of mean is taken over."""


def merge_weights(
    weights: NDArray[Any], query_groups: Sequence[Sequence[int]], key_groups: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Return weights, (layer, head, query, key), of groups of tokens: summed over keys, averaged over queries.

    Each list of groups holds all tokens in their order; a group holds consecutive ones.
    """
    first_queries = [group[0] for group in query_groups]
    first_keys = [group[0] for group in key_groups]
    # (layer, head, query, word), then (layer, head, word, word).
    summed = np.add.reduceat(weights.astype(np.float64), first_keys, axis=3)
    # Empty rows do not count in the mean over the pieces of a word.
    n_filled = np.add.reduceat(summed.any(-1), first_queries, axis=2, dtype=np.int64)
    means = np.add.reduceat(summed, first_queries, axis=2) / np.maximum(n_filled, 1)[..., None]
    return np.asarray(means, np.float32)


def renormalise(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Return rows of weights, (..., key), from which keys were left out, each divided by its sum.

    A row with a sum below MIN_ROW_SUM becomes zeros; NaN stays.
    """
    exact = weights.astype(np.float64)
    total = exact.sum(-1, keepdims=True)
    # Rows that are not divided keep these values.
    fallback = np.where(np.isnan(exact), np.nan, 0.0)
    shares: NDArray[np.float64] = np.divide(exact, total, out=fallback, where=total >= MIN_ROW_SUM)
    return shares


def average_heads(attention: M, heads: Sequence[tuple[int, int]], over: str) -> M:
    """Return a map of means over heads, each (layer, head); an averaged axis has the size 1.

    `over` is "heads" (a mean for each layer), "layers" (one for each number of a head) or "all" (a single one).
    """
    # (layer, head)
    is_shown = np.zeros(attention.values.shape[:2], bool)
    for pair in heads:
        is_shown[attention.place(*pair)] = True
    # The places of layers and heads on their axes.
    layer_places = np.flatnonzero(is_shown.any(1))
    head_places = np.flatnonzero(is_shown.any(0))
    # (layer, head, query, key), and which of these heads count, (layer, head, 1, 1).
    chosen = np.ix_(layer_places, head_places)
    block = attention.values[chosen]
    is_counted = is_shown[chosen][..., None, None]
    means = np.mean(block, axis=MEAN_AXES[over], dtype=np.float64, where=is_counted, keepdims=True)
    # The layers that the means have, and the names that stand in the place of heads.
    layers: tuple[int, ...] = (0,)
    if over == "heads":
        layers = tuple(attention.layers[place] for place in layer_places)
        names: tuple[str, ...] = (f"{MEAN_NAME_PREFIX}heads",)
    elif over == "layers":
        names = tuple(attention.head_name(attention.heads[place]) for place in head_places)
    else:
        names = (f"{MEAN_NAME_PREFIX}{amount(len(heads), 'head')}",)
    # The weights are the first array of every class of maps.
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
    """Merge the patches of each photo into one key, with the sum of their weights.

    The tokens between the patches of a photo (ends of rows, marks of tiles) become one key more. In cross-attention
    from words to pictures, all other keys become one, "elsewhere".
    """
    is_across = attention.kind == "cross"
    n_keys = len(attention.keys)
    # Photo -> the keys of its patches. A photo may be cut into several pictures; cells without a patch are negative.
    photos: dict[str, list[int]] = {}
    for picture in pictures:
        assert picture.cells is not None
        photos.setdefault(picture.photo, []).extend(picture.cells[picture.cells >= 0].tolist())
    # Name of a new key -> the keys that become it.
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
            # Queries are keys too, and are counted by groups. Of a part without rows, `first_query` is n_keys.
            first_query = int(group_of[min(first_query, n_keys - 1)])
            n_queries = n_groups
        part = MapPart(first_query, 0, n_queries, n_groups)
    changed: dict[str, Any] = {attention.ARRAYS[0]: weights.astype(np.float32)}
    keys = replace(attention.keys.take(firsts), labels=labels)
    return replace(attention, **changed, keys=keys, part=part)


def fill_missing_rows(attention: M, maps: Sequence[M]) -> M:
    """Return a part of a map with empty rows for the missing queries: so a word has the same row in all maps.

    `maps` are all maps of the record. A part of cross-attention whose queries are the keys of none of them is taken as
    whole.

    Raises:
        AttnscopeError: The part lacks some of the keys.
    """
    if attention.part is None:
        return attention
    first_query, first_key, n_queries, n_keys = attention.part
    # In self-attention, queries are the same tokens as keys.
    queries = attention.keys
    if attention.kind == "cross":
        same_length = [m.keys for m in maps if m.kind != "cross" and len(m.keys) == n_queries]
        if not same_length:
            return replace(attention, part=None)
        queries = same_length[0]
    rows = slice(first_query, first_query + len(attention.queries))
    if first_key or len(attention.keys) != n_keys or queries.labels[rows] != attention.queries.labels:
        raise AttnscopeError("a part of a map with some of its keys has no page", "leave out --cols")
    # (layer, head, query, key)
    weights = np.zeros((*attention.values.shape[:2], len(queries), n_keys), np.float32)
    weights[:, :, rows] = attention.values
    changed: dict[str, Any] = {attention.ARRAYS[0]: weights}
    return replace(attention, **changed, queries=queries, part=None)


def yield_largest_pairs(weights: NDArray[Any], n_largest: int) -> Iterator[tuple[int, ...]]:
    """Yield (query, key) of each query's largest weights, the largest first; 0 = all pairs, in the order of keys.

    `weights` are those of one head, (query, key).
    """
    if not n_largest:
        yield from np.ndindex(weights.shape)
        return
    order = np.argsort(-weights, axis=1, kind="stable")[:, :n_largest]
    for query, keys in enumerate(order.tolist()):
        for key in keys:
            yield query, key
