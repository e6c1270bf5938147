"""Sum rows of attention by token and by offset, and compare the sums with an even share.

A *lift* is the attention of a head on an item (a token, or a pair of tokens), divided by an even share of it. The
atlas decides which items and texts these are. Ours.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from attnscope.core.intervals import skewed_interval, unseen_share

Floats = NDArray[np.float64]


def offset_masses(
    weights: Float[Tensor, "head query key"], furthest: int, first: int = 0
) -> Float[Tensor, "head {2*furthest+3}"]:
    """Sum attention by how many tokens the key is from the query, over consecutive queries from `first` on.

    Returns:
        Further back than `furthest`, -furthest to furthest, further ahead; each at least 0.

    Source:
        Ours; by position as in Clark et al. 2019, section 3.1.
    """
    n_heads, n_queries, n_keys = weights.shape
    width = n_queries + n_keys - 1
    # Shift each row one column further to the right than the one before, so that each column holds one offset.
    padded = weights.new_zeros(n_heads, n_queries, n_queries + n_keys)
    padded[..., :n_keys] = weights.flip(-1)
    skewed = padded.flatten(1)[:, : n_queries * width].view(n_heads, n_queries, width).sum(1)
    # Offsets beyond the furthest fall into the first and the last column.
    offsets = n_keys - 1 - torch.arange(width, device=weights.device) - first
    masses = weights.new_zeros(n_heads, 2 * furthest + 3)
    return masses.index_add_(1, offsets.clamp(-furthest - 1, furthest + 1) + furthest + 1, skewed)


def even_weights(allowed: Bool[Tensor, "query key"]) -> Float[Tensor, "query key"]:
    """Return uniform attention over the keys that each query may attend to, float32; 0 for a query without keys."""
    return allowed.float() / allowed.sum(-1, keepdim=True).clamp(min=1)


def members(tokens: Int[Tensor, " position"], n_tokens: int) -> Float[Tensor, "position {n_tokens}"]:
    """Return 1 where a position has the token 0 to n_tokens - 1, else 0, float32; -1 is none of them.

    Its product with weights sums these by token, which is faster than adding them one by one.
    """
    return (tokens[:, None] == torch.arange(n_tokens, device=tokens.device)).float()


class Lifts(NamedTuple):
    """Attention on some items beside an even share of it, (item, head) each.

    Attributes:
        mass: Mean weight of a query that could see the item, as a mean over texts.
        lift: The same over an even share, as a mean over texts; NaN if no text has the item.
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

    In a text t, a head's lift on an item is s_t / u_t: what it gave, over an even share. The lift is the mean of these
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
        self, heads: slice, items: NDArray[np.int64], masses: Floats, even: Floats, counts: Floats, most: Floats
    ) -> None:
        """Add the attention of some heads in one text.

        Args:
            heads: Their numbers.
            items: The items of the text, each once.
            masses: Their attention, summed over queries, (head, item).
            even: An even share of it, (head, item); items whose share is 0 are skipped.
            counts: How many queries could see them, (item,).
            most: The largest lift that is possible in such a text, (item,).
        """
        # Items that no query could see say nothing of the head.
        seen = even > 0
        nothing = np.zeros(masses.shape)
        lifts = np.divide(masses, even, out=nothing.copy(), where=seen)
        means = np.divide(masses, counts, out=nothing.copy(), where=seen)
        parts = np.stack([lifts, lifts**2, means, counts * seen, seen])  # (5, head, item)
        self._sums[:, items, heads] += parts.swapaxes(1, 2)
        self._most[items, heads] = np.maximum(self._most[items, heads], (most * seen).T)

    def lifts(self) -> Lifts:
        """Return the means over texts, with their intervals."""
        sums, squares, masses, counts, n = self._sums
        with np.errstate(invalid="ignore", divide="ignore"):
            # Mean lift over the n texts, its variance and Student's t, (item, head).
            lift = sums / n
            variance = np.maximum(squares - n * lift**2, 0.0) / (n - 1) / n
            half = np.where(n > 1, stdtrit(np.maximum(n - 1, 1), 0.975) * np.sqrt(variance), np.nan)
            low, high = skewed_interval(lift, half, unseen_share(n), self._most)
            return Lifts(masses / n, lift, low, high, counts, n)


class KeptRows(NamedTuple):
    """The keys that hold most of some rows.

    Attributes:
        starts: Where each row's keys begin, and where the last ends, (query + 1,), int64.
        keys: The keys, the largest weight of a row first, uint8.
        codes: Their weights x 255, rounded, uint8.
    """

    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]
    codes: NDArray[np.uint8]


def keep_rows(weights: NDArray[np.floating], totals: NDArray[np.floating], share: float, most: int) -> KeptRows:
    """Keep the fewest keys that hold a share of each row, up to a number of keys; of equal weights the earlier key.

    Args:
        weights: (query, key), at most 256 keys.
        totals: (query,): the sum of each row over all keys, including those that are not here.
        share: The share of it to keep.
        most: How many keys of a row are kept at most.
    """
    # The largest keys of each row, (query, most), and the sum of the larger ones before each.
    order = np.argsort(-weights, axis=1, kind="stable")[:, :most]
    largest = np.take_along_axis(weights, order, 1).astype(np.float64)
    before = np.cumsum(largest, 1) - largest
    codes = np.rint(255 * np.clip(largest, 0, 1)).astype(np.uint8)
    # A key is kept while those before it do not yet hold the share.
    is_kept = (before < share * totals[:, None] - 1e-7) & (codes > 0)
    starts = np.concatenate([[0], np.cumsum(is_kept.sum(1))])
    return KeptRows(starts.astype(np.int64), order[is_kept].astype(np.uint8), codes[is_kept])
