"""Sum attention by offset and by item, compare it with uniform attention, and keep the largest weights of rows.

An *item* is a type of key, or a pair of types: one of the query and one of the key. A type is an entry of the
vocabulary. The *uniform weight* of an item is what the item would get if the same attention were spread evenly over
the keys. A head's *lift* on the item is its weight divided by the uniform weight. The atlas chooses the items, the
texts and the keys. The method is ours.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from attnscope.arrays import Floats
from attnscope.core.intervals import TAIL_PROBABILITY, skewed_interval, unseen_share


def sum_by_offset(
    weights: Float[Tensor, "head query key"],
    max_offset: int,
    first_query: int,
) -> Float[Tensor, "head {2*max_offset+3}"]:
    """Sum attention by offset, over queries. An offset is the key's position minus the query's.

    Args:
        weights: The rows of consecutive queries.
        max_offset: The largest distance, back or ahead, that has a column of its own.
        first_query: The position of the first query in the text.

    Returns:
        The summed weights, at least 0. The first column has all keys further back than max_offset, the last one all
        keys further ahead, and those between have one offset each, from -max_offset to max_offset.

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
    # The offset of each column, descending from n_keys - 1 - first_query. Offsets beyond max_offset go to the end
    # columns.
    offsets = n_keys - 1 - first_query - torch.arange(n_offsets, device=weights.device)
    columns = offsets.clamp(-max_offset - 1, max_offset + 1) + max_offset + 1
    masses = weights.new_zeros(n_heads, 2 * max_offset + 3)
    return masses.index_add_(1, columns, by_offset)


def uniform_weights(allowed: Bool[Tensor, "query key"]) -> Float[Tensor, "query key"]:
    """Return uniform attention over the keys that each query may attend to, float32; 0 for a query without keys."""
    n_keys = allowed.sum(-1, keepdim=True)
    return allowed.float() / n_keys.clamp(min=1)


class Lifts(NamedTuple):
    """Attention on some items, and its ratio to the uniform weight, (item, head) each.

    Attributes:
        mass: Mean weight that a query gives the item if it may attend to it, as a mean over texts, 0 to 1.
        lift: Weight divided by the uniform weight, as a mean over texts, at least 0; NaN if no text has the item.
        low: Lower end of the 95% interval of the lift, over texts; NaN if fewer than two have the item.
        high: Upper end of the same interval.
        counts: How many queries may attend to the item.
        n_texts: How many texts have the item.
    """

    mass: Floats
    lift: Floats
    low: Floats
    high: Floats
    counts: Floats
    n_texts: Floats


class ItemSums:
    """Add up the attention of heads on some items over texts.

    In a text t, a head's lift on an item is s_t / u_t: its weight divided by the uniform weight. The lift is the mean
    of these ratios over the T texts that have the item, so all texts count the same. It is not Σ s_t / Σ u_t, where one
    text may outweigh all others: a text that repeats the item, or the only text in which the head does not rest on
    sinks. An interval from a sample without that text would not cover the true lift.

    The standard error is that of a mean, with Student's t of T - 1 degrees of freedom. `skewed_interval` widens the
    interval for kinds of text that the sample may have missed: texts in which the item gets no attention, or the
    largest lift that is possible.
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
        uniform_masses: Floats,
        counts: Floats,
        max_lifts: Floats,
    ) -> None:
        """Add the attention of some heads in one text.

        Args:
            heads: The indices of these heads among the heads of this object.
            items: The indices of the items that the text has, each once, (item,).
            masses: The weights on the items, summed over queries, (head, item).
            uniform_masses: The uniform weights of the items, summed over queries, (head, item). An item with a mass of
                0 is skipped.
            counts: How many queries may attend to each item, (item,).
            max_lifts: The largest lift that is possible in this text, (item,).
        """
        # An item that no query may attend to adds 0 to every sum, because a mass divided by infinity is 0.
        has_queries = uniform_masses > 0
        lifts = masses / np.where(has_queries, uniform_masses, np.inf)
        means = masses / np.where(has_queries, counts, np.inf)
        # (5, head, item) becomes (5, item, head).
        terms = np.stack([lifts, lifts**2, means, counts * has_queries, has_queries])
        self._sums[:, items, heads] += terms.swapaxes(1, 2)
        largest = (max_lifts * has_queries).T
        self._largest_possible[items, heads] = np.maximum(self._largest_possible[items, heads], largest)

    def compute_lifts(self) -> Lifts:
        """Return the means over texts, with their intervals."""
        sums, squares, means, counts, n_texts = self._sums
        with np.errstate(invalid="ignore", divide="ignore"):
            # Mean lift, the variance of that mean, and half the width of its Student interval, (item, head).
            lift = sums / n_texts
            degrees = n_texts - 1
            variance = np.maximum(squares - n_texts * lift**2, 0.0) / degrees / n_texts
            quantile = stdtrit(np.maximum(degrees, 1), 1 - TAIL_PROBABILITY)
            half_width = np.where(degrees > 0, quantile * np.sqrt(variance), np.nan)
            low, high = skewed_interval(lift, half_width, unseen_share(n_texts), self._largest_possible)
            return Lifts(means / n_texts, lift, low, high, counts, n_texts)


class KeptRows(NamedTuple):
    """The keys of the largest weights of some rows, row after row.

    Attributes:
        starts: Where each row's keys begin, and where those of the last row end, (query + 1,), int64.
        keys: The positions of the keys, in descending order of weight within a row, uint8.
        codes: The weights of these keys times 255, rounded, uint8.
    """

    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]
    codes: NDArray[np.uint8]


def keep_largest_weights(
    weights: NDArray[np.floating],
    totals: NDArray[np.floating],
    share: float,
    max_keys: int,
) -> KeptRows:
    """Keep the fewest keys that hold a share of each row. Of equal weights the earlier key is kept first.

    Args:
        weights: (query, key), at most 256 keys.
        totals: (query,): the sum of each row over all keys, including those that are not here.
        share: The share of a row's total that its kept keys must hold, 0 to 1.
        max_keys: The most keys of a row that are kept, even if they hold less than the share.
    """
    # The keys of the largest weights of each row, and their weights, (query, max_keys).
    keys = np.argsort(-weights, axis=1, kind="stable")[:, :max_keys].astype(np.uint8)
    largest = np.take_along_axis(weights, keys, 1).astype(np.float64)
    codes = np.rint(255 * np.clip(largest, 0, 1)).astype(np.uint8)
    # A key is kept if the larger keys before it hold less than the share; 1e-7 is the rounding of float32.
    mass_before = np.cumsum(largest, 1) - largest
    is_kept = mass_before < share * totals[:, None] - 1e-7
    is_kept &= codes > 0
    n_kept = np.cumsum(is_kept.sum(1))
    starts = np.append(np.int64(0), n_kept)
    return KeptRows(starts, keys[is_kept], codes[is_kept])
