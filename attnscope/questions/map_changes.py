"""Change maps of weights: leave out keys, merge word pieces and patches, average heads. NumPy only.

The maps (`questions.maps.HeadMaps`) hold an array of weights, (layer, head, query, key), and the tokens along its last
two axes. No function changes its input: each returns a copy. A *part* is a map cropped to some of its rows and columns;
the field `part` then says where it lies in the whole map.
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
"""The smallest sum of a row, after keys were left out, at which the row is still shown. Rows below it become zeros."""

MEAN_NAME_PREFIX = "mean of "
"""The beginning of a mean's name, which stands in place of a head's name, such as "mean of 3 heads"."""

MEAN_AXES: dict[str, tuple[int, ...]] = {"heads": (1,), "layers": (0,), "all": (0, 1)}
"""The axes to average, out of (layer, head, query, key), by the kind of mean."""


def merge_weights(
    weights: NDArray[Any], query_groups: Sequence[Sequence[int]], key_groups: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Return the weights between groups of tokens, such as words: summed over keys, averaged over queries.

    Args:
        weights: (layer, head, query, key).
        query_groups: The token indices of each group. Together the groups hold every query once, in order, so a group
            holds consecutive tokens.
        key_groups: The same for keys.
    """
    first_queries = [group[0] for group in query_groups]
    first_keys = [group[0] for group in key_groups]
    # (layer, head, query, key group). `reduceat` sums from each group's first token up to the next group.
    summed = np.add.reduceat(weights.astype(np.float64), first_keys, axis=3)
    # (layer, head, query group, key group). Rows of zeros, which have no attention left, do not count in the mean.
    n_filled = np.add.reduceat(summed.any(-1), first_queries, axis=2, dtype=np.int64)
    means = np.add.reduceat(summed, first_queries, axis=2) / np.maximum(n_filled, 1)[..., None]
    return np.asarray(means, np.float32)


def renormalise(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Divide each row of weights by its sum, so that rows from which keys were left out sum to 1 again.

    `weights` are (..., key). A row with a sum below MIN_ROW_SUM becomes zeros. NaN, of a missing head, stays NaN.
    """
    rows = weights.astype(np.float64)
    row_sums = rows.sum(-1, keepdims=True)
    # `divide` leaves these values in the rows that `where` excludes.
    fallback = np.where(np.isnan(rows), np.nan, 0.0)
    normalised_rows: NDArray[np.float64] = np.divide(
        rows, row_sums, out=fallback, where=row_sums >= MIN_ROW_SUM
    )
    return normalised_rows


def average_heads(attention: M, heads: Sequence[tuple[int, int]], over: str) -> M:
    """Return a map of means over `heads`, each (layer, head). An averaged axis has the size 1.

    `over` is "heads" (one mean per layer), "layers" (one mean per head number) or "all" (a single mean).
    """
    # (layer, head): heads that are not shown do not count in a mean.
    is_shown = np.zeros(attention.values.shape[:2], bool)
    for pair in heads:
        is_shown[attention.place(*pair)] = True
    # Indices on the first two axes of the layers and heads of which anything is shown.
    layer_indices = np.flatnonzero(is_shown.any(1))
    head_indices = np.flatnonzero(is_shown.any(0))
    block = np.ix_(layer_indices, head_indices)
    # (shown layer, shown head, query, key)
    weights = attention.values[block]
    # (shown layer, shown head, 1, 1)
    is_counted = is_shown[block][..., None, None]
    means = np.mean(weights, axis=MEAN_AXES[over], dtype=np.float64, where=is_counted, keepdims=True)
    # Means over layers are stored as layer 0. Means over heads get names, as no head number fits them.
    layers: tuple[int, ...] = (0,)
    if over == "heads":
        layers = tuple(attention.layers[index] for index in layer_indices)
        names: tuple[str, ...] = (f"{MEAN_NAME_PREFIX}heads",)
    elif over == "layers":
        names = tuple(attention.head_name(attention.heads[index]) for index in head_indices)
    else:
        names = (f"{MEAN_NAME_PREFIX}{amount(len(heads), 'head')}",)
    # The first array of every class of maps holds the weights.
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

    In self-attention, the tokens between the patches of a photo (ends of rows, marks of tiles) become a second key,
    "marks of" the photo. In cross-attention from words to pictures, all keys that are no patch become one, "elsewhere".
    """
    is_cross = attention.kind == "cross"
    n_keys = len(attention.keys)
    # Key indices of the patches, by photo. A model may see one photo as several pictures, such as a small one of all of
    # it and details. A cell of -1 is a patch without a token.
    patches_by_photo: dict[str, list[int]] = {}
    for picture in pictures:
        assert picture.cells is not None
        patches_by_photo.setdefault(picture.photo, []).extend(picture.cells[picture.cells >= 0].tolist())
    # The key indices that are merged, by the name of the new key.
    keys_by_name = {**patches_by_photo}
    if is_cross:
        patches = list(chain(*patches_by_photo.values()))
        keys_by_name["elsewhere"] = np.setdiff1d(np.arange(n_keys), patches).tolist()
    else:
        for photo, patches in patches_by_photo.items():
            between = np.arange(min(patches), max(patches))
            keys_by_name[f"marks of {photo}"] = np.setdiff1d(between, patches).tolist()
    # The first key of each key's group, (key,). A key that is not merged is a group by itself.
    group_first_key = np.arange(n_keys)
    name_by_first_key = {}
    for name, group in keys_by_name.items():
        if group:
            name_by_first_key[min(group)] = name
            group_first_key[group] = min(group)
    # `unique` numbers the groups in the order of their first keys: (group,), and the group of each key, (key,).
    first_keys, group_of = np.unique(group_first_key, return_inverse=True)
    n_groups = len(first_keys)
    labels = tuple(
        name_by_first_key.get(first, attention.keys.labels[first]) for first in first_keys.tolist()
    )
    # Sort keys by group, so that `reduceat` can sum each group's run of keys: (layer, head, query, group).
    keys_by_group = np.argsort(group_of, kind="stable")
    group_starts = np.searchsorted(group_of[keys_by_group], np.arange(n_groups))
    weights = np.add.reduceat(
        attention.values[..., keys_by_group], group_starts, axis=3, dtype=np.float64
    )
    part = attention.part
    if part is not None:
        first_query, _, n_queries, _ = part
        if not is_cross:
            # In self-attention the whole map's rows are the keys, so they are counted by groups. In a part without rows
            # `first_query` may be n_keys, one beyond the last key.
            first_query = int(group_of[min(first_query, n_keys - 1)])
            n_queries = n_groups
        part = MapPart(first_query, 0, n_queries, n_groups)
    changed: dict[str, Any] = {attention.ARRAYS[0]: weights.astype(np.float32)}
    keys = replace(attention.keys.take(first_keys), labels=labels)
    return replace(attention, **changed, keys=keys, part=part)


def fill_missing_rows(attention: M, maps: Sequence[M]) -> M:
    """Return a cropped map with rows of zeros for its missing queries, so that a token has the same row in all maps.

    `maps` are all maps of the same result. A crop of cross-attention takes the labels of its missing queries from the
    self-attention map that has them as keys. If no map has them, the crop counts as a whole map.

    Raises:
        AttnscopeError: The crop lacks some of the keys.
    """
    if attention.part is None:
        return attention
    first_query, first_key, n_queries, n_keys = attention.part
    # In self-attention the queries of the whole map are the same tokens as its keys.
    queries = attention.keys
    if attention.kind == "cross":
        candidates = [m.keys for m in maps if m.kind != "cross" and len(m.keys) == n_queries]
        if not candidates:
            return replace(attention, part=None)
        queries = candidates[0]
    rows = slice(first_query, first_query + len(attention.queries))
    if first_key or len(attention.keys) != n_keys or queries.labels[rows] != attention.queries.labels:
        raise AttnscopeError("a part of a map with some of its keys has no page", "leave out --cols")
    # (layer, head, query, key)
    weights = np.zeros((*attention.values.shape[:2], len(queries), n_keys), np.float32)
    weights[:, :, rows] = attention.values
    changed: dict[str, Any] = {attention.ARRAYS[0]: weights}
    return replace(attention, **changed, queries=queries, part=None)


def yield_largest_pairs(weights: NDArray[Any], n_largest: int) -> Iterator[tuple[int, ...]]:
    """Yield the pairs (query, key) of each query's `n_largest` largest weights, the largest first.

    With `n_largest` 0, yield all pairs in the order of keys. `weights` are of one head, (query, key).
    """
    if not n_largest:
        yield from np.ndindex(weights.shape)
        return
    # (query, n_largest): indices of keys.
    largest_keys = np.argsort(-weights, axis=1, kind="stable")[:, :n_largest]
    for query, keys in enumerate(largest_keys.tolist()):
        for key in keys:
            yield query, key
