"""Sum rows of attention by token and by offset, and compare the sums with an even share; keep the rows in short.

A *lift* is the attention of a head on an item (a token, or a pair of tokens), divided by an even share: what the item
would get if queries spread their attention evenly. The atlas decides which items and texts these are. Ours.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from attnscope.core.intervals import END, Floats, skewed_interval, unseen_share


def offset_masses(
    weights: Float[Tensor, "head query key"],
    furthest: int,
    first: int = 0,
) -> Float[Tensor, "head {2*furthest+3}"]:
    """Sum attention over queries by its offset: how many tokens the key is behind (-) or ahead (+) of the query.

    Args:
        weights: The rows of consecutive queries.
        furthest: The largest offset with a column of its own.
        first: The position of the first of these queries.

    Returns:
        One column each for: all further back, -furthest to furthest, all further ahead. Each at least 0.

    Source:
        Ours; by position as in Clark et al. 2019, section 3.1.
    """
    n_heads, n_queries, n_keys = weights.shape
    n_offsets = n_queries + n_keys - 1
    # Shift each row one column further to the right than the one before, so that each column holds one offset. Rows
    # padded to n_offsets + 1 columns, but read n_offsets at a time, are shifted so: (head, query, n_offsets).
    padded = weights.new_zeros(n_heads, n_queries, n_offsets + 1)
    padded[..., :n_keys] = weights.flip(-1)
    shifted = padded.flatten(1)[:, : n_queries * n_offsets].view(n_heads, n_queries, n_offsets)
    by_offset = shifted.sum(1)
    # The offset of each column; those beyond the furthest are added to the first and the last column.
    last_offset = n_keys - 1 - first
    offsets = last_offset - torch.arange(n_offsets, device=weights.device)
    columns = offsets.clamp(-furthest - 1, furthest + 1) + furthest + 1
    masses = weights.new_zeros(n_heads, 2 * furthest + 3)
    return masses.index_add_(1, columns, by_offset)


def even_weights(allowed: Bool[Tensor, "query key"]) -> Float[Tensor, "query key"]:
    """Return uniform attention over the keys that each query may attend to, float32; 0 for a query without keys."""
    n_keys = allowed.sum(-1, keepdim=True)
    return allowed.float() / n_keys.clamp(min=1)


def members(tokens: Int[Tensor, " position"], n_tokens: int) -> Float[Tensor, "position {n_tokens}"]:
    """Return 1 where a position has a token, else 0, float32. Tokens are 0 to n_tokens - 1; -1 is none of them.

    The product of weights (query, position) with it sums them by token, faster than adding them one by one.
    """
    every_token = torch.arange(n_tokens, device=tokens.device)
    return (tokens[:, None] == every_token).float()


class Lifts(NamedTuple):
    """Attention on some items, and how it compares with an even share, (item, head) each.

    Attributes:
        mass: Mean weight that a query gives the item if it can see it, as a mean over texts, 0 to 1.
        lift: Weight over an even share, as a mean over texts, at least 0; NaN if no text has the item.
        low: Lower end of the 95% interval of the lift, over texts; NaN if fewer than two have the item.
        high: Upper end.
        counts: Queries that could see it.
        n_texts: Texts that have it.
    """

    mass: Floats
    lift: Floats
    low: Floats
    high: Floats
    counts: Floats
    n_texts: Floats


class ItemSums:
    """The attention of heads on some items, added up over texts.

    In a text t, a head's lift on an item is s_t / u_t: its weight over an even share. The lift is the mean of these
    over the T texts that have the item, so all texts weigh the same. In Σ s_t / Σ u_t one text may outweigh all others:
    one that repeats the item, or the only one in which the head does not rest on sinks. A sample that lacks such a text
    cannot show that there is one, and intervals from it fail.

    The standard error is that of a mean, with Student's t of T - 1 degrees of freedom. The ends are those of
    `skewed_interval`: texts of an unseen kind give the item nothing, or as much as is possible in any text.
    """

    def __init__(self, n_items: int, n_heads: int) -> None:
        # Lift, its square, mass, queries and texts, (5, item, head).
        self._sums = np.zeros((5, n_items, n_heads))
        self._most = np.zeros((n_items, n_heads))

    def add(
        self,
        heads: slice,
        items: NDArray[np.int64],
        masses: Floats,
        even: Floats,
        counts: Floats,
        most: Floats,
    ) -> None:
        """Add the attention of some heads in one text.

        Args:
            heads: Their numbers.
            items: The items of the text, each once.
            masses: The weights that the items get, summed over queries, (head, item).
            even: What the items would get by an even share, summed over queries, (head, item); items whose share is 0
                are skipped.
            counts: How many queries could see them, (item,).
            most: The largest lift that is possible in such a text, (item,).
        """
        # Items that no query could see say nothing of the head: 0 is added, and no text counted.
        is_seen = even > 0
        lifts = masses * is_seen / np.where(is_seen, even, 1.0)
        means = masses * is_seen / np.where(is_seen, counts, 1.0)
        # (5, head, item) becomes (5, item, head).
        parts = np.stack([lifts, lifts**2, means, counts * is_seen, is_seen])
        self._sums[:, items, heads] += parts.swapaxes(1, 2)
        largest = (most * is_seen).T
        self._most[items, heads] = np.maximum(self._most[items, heads], largest)

    def lifts(self) -> Lifts:
        """Return the means over texts, with their intervals."""
        sums, squares, means, counts, n_texts = self._sums
        with np.errstate(invalid="ignore", divide="ignore"):
            # Mean lift, the variance of that mean, and half of its interval by Student's t, (item, head).
            lift = sums / n_texts
            degrees = n_texts - 1
            variance = np.maximum(squares - n_texts * lift**2, 0.0) / degrees / n_texts
            quantile = stdtrit(np.maximum(degrees, 1), 1 - END)
            half = np.where(degrees > 0, quantile * np.sqrt(variance), np.nan)
            # Both ends allow for texts of a kind that none of these is.
            low, high = skewed_interval(lift, half, unseen_share(n_texts), self._most)
            return Lifts(means / n_texts, lift, low, high, counts, n_texts)


class KeptRows(NamedTuple):
    """The keys that hold most of some rows, row after row.

    Attributes:
        starts: Where each row's keys begin, and where the last ends, (query + 1,), int64.
        keys: The keys, the largest weight of a row first, uint8.
        codes: Their weights x 255, rounded, uint8.
    """

    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]
    codes: NDArray[np.uint8]


def keep_rows(
    weights: NDArray[np.floating],
    totals: NDArray[np.floating],
    share: float,
    most: int,
) -> KeptRows:
    """Keep the fewest keys that hold a share of each row, up to a number of keys; of equal weights the earlier key.

    Args:
        weights: (query, key), at most 256 keys.
        totals: (query,): the sum of each row over all keys, including those that are not here.
        share: Which share of a row's total its kept keys must hold, 0 to 1.
        most: How many keys of a row are kept at most.
    """
    # The keys of the largest weights of each row, and these weights, (query, most).
    keys = np.argsort(-weights, axis=1, kind="stable")[:, :most].astype(np.uint8)
    largest = np.take_along_axis(weights, keys, 1).astype(np.float64)
    codes = np.rint(255 * np.clip(largest, 0, 1)).astype(np.uint8)
    # A key is kept while the larger ones before it hold less than the share, by more than float32 rounds.
    before = np.cumsum(largest, 1) - largest
    is_kept = before < share * totals[:, None] - 1e-7
    is_kept &= codes > 0
    n_kept = np.cumsum(is_kept.sum(1))
    starts = np.append(np.int64(0), n_kept)
    return KeptRows(starts, keys[is_kept], codes[is_kept])
