"""Sum attention by offset and by item, compare it with an even share, and keep the largest weights of rows.

An *item* is a type of token, or a pair of them: a query's and a key's. Its *even share* is what it would get if queries
spread their attention evenly, and a head's *lift* on it is its attention divided by that. The atlas decides which items
and texts these are. Ours.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from attnscope.core.intervals import TAIL_PROBABILITY, Floats, skewed_interval, unseen_share


def offset_masses(
    weights: Float[Tensor, "head query key"],
    furthest: int,
    first: int,
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
    # Reverse each row, and shift it one column further to the right than the row before: then each column holds one
    # offset. Padding rows to n_offsets + 1 columns, and reading n_offsets at a time, shifts them. With 2 queries and 3
    # keys, c b a 0 0 f e d 0 0 is read as
    #     c b a 0
    #     0 f e d
    padded = weights.new_zeros(n_heads, n_queries, n_offsets + 1)
    padded[..., :n_keys] = weights.flip(-1)
    shifted = padded.flatten(1)[:, : n_queries * n_offsets].view(n_heads, n_queries, n_offsets)
    by_offset = shifted.sum(1)
    # The offset of each column, from n_keys - 1 - first down. Those beyond the furthest go to the end columns.
    offsets = n_keys - 1 - first - torch.arange(n_offsets, device=weights.device)
    columns = offsets.clamp(-furthest - 1, furthest + 1) + furthest + 1
    masses = weights.new_zeros(n_heads, 2 * furthest + 3)
    return masses.index_add_(1, columns, by_offset)


def even_weights(allowed: Bool[Tensor, "query key"]) -> Float[Tensor, "query key"]:
    """Return uniform attention over the keys that each query may attend to, float32; 0 for a query without keys."""
    n_keys = allowed.sum(-1, keepdim=True)
    return allowed.float() / n_keys.clamp(min=1)


class Lifts(NamedTuple):
    """Attention on some items, and how it compares with an even share, (item, head) each.

    Attributes:
        mass: Mean weight that a query gives the item if it can see it, as a mean over texts, 0 to 1.
        lift: Weight divided by the even share, as a mean over texts, at least 0; NaN if no text has the item.
        low: Lower end of the 95% interval of the lift, over texts; NaN if fewer than two have the item.
        high: Upper end.
        counts: How many queries could see the item.
        n_texts: How many texts have the item.
    """

    mass: Floats
    lift: Floats
    low: Floats
    high: Floats
    counts: Floats
    n_texts: Floats


class ItemSums:
    """The attention of heads on some items, added up over texts.

    In a text t, a head's lift on an item is s_t / u_t: its weight divided by the even share. The lift is the mean of
    these ratios over the T texts that have the item, so all texts weigh the same. It is not Σ s_t / Σ u_t, where one
    text may outweigh all others: one that repeats the item, or the only one in which the head does not rest on sinks.
    An interval from a sample without such a text would fail.

    The standard error is that of a mean, with Student's t of T - 1 degrees of freedom. The ends are those of
    `skewed_interval`, which allows for texts of a kind that no text of the sample is: these give the item nothing, or
    as much as is possible in any text.
    """

    def __init__(self, n_items: int, n_heads: int) -> None:
        # Sums over texts of the lift, its square, the mass, the number of queries, and 1, (5, item, head).
        self._sums = np.zeros((5, n_items, n_heads))
        self._largest_possible = np.zeros((n_items, n_heads))

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
            heads: Which heads of this object they are.
            items: Which of its items the text has, each once, (item,).
            masses: The weights that the items get, summed over queries, (head, item).
            even: The even shares of the items, summed over queries, (head, item). An item whose share is 0 is skipped.
            counts: How many queries could see them, (item,).
            most: The largest lift that is possible in such a text, (item,).
        """
        # An item that no query could see adds 0 to every sum: weights over infinity are 0.
        is_seen = even > 0
        lifts = masses / np.where(is_seen, even, np.inf)
        means = masses / np.where(is_seen, counts, np.inf)
        # (5, head, item) becomes (5, item, head).
        terms = np.stack([lifts, lifts**2, means, counts * is_seen, is_seen])
        self._sums[:, items, heads] += terms.swapaxes(1, 2)
        largest = (most * is_seen).T
        self._largest_possible[items, heads] = np.maximum(self._largest_possible[items, heads], largest)

    def lifts(self) -> Lifts:
        """Return the means over texts, with their intervals."""
        sums, squares, means, counts, n_texts = self._sums
        with np.errstate(invalid="ignore", divide="ignore"):
            # Mean lift, the variance of that mean, and half of its interval without unseen texts, (item, head).
            lift = sums / n_texts
            degrees = n_texts - 1
            variance = np.maximum(squares - n_texts * lift**2, 0.0) / degrees / n_texts
            quantile = stdtrit(np.maximum(degrees, 1), 1 - TAIL_PROBABILITY)
            half = np.where(degrees > 0, quantile * np.sqrt(variance), np.nan)
            low, high = skewed_interval(lift, half, unseen_share(n_texts), self._largest_possible)
            return Lifts(means / n_texts, lift, low, high, counts, n_texts)


class KeptRows(NamedTuple):
    """The keys of the largest weights of some rows, row after row.

    Attributes:
        starts: Where each row's keys begin, and where those of the last row end, (query + 1,), int64.
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
    # A key is kept while the larger ones before it hold less than the share; 1e-7 is the rounding of float32.
    before = np.cumsum(largest, 1) - largest
    is_kept = before < share * totals[:, None] - 1e-7
    is_kept &= codes > 0
    n_kept = np.cumsum(is_kept.sum(1))
    starts = np.append(np.int64(0), n_kept)
    return KeptRows(starts, keys[is_kept], codes[is_kept])
