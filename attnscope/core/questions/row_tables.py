"""What rows of attention say of tokens: mass by offset, mass by token, and the few keys that hold most of a row."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from attnscope.core.exact.few_texts import interval_of_few_texts

Floats = NDArray[np.float64]

LEAST_EFFECTIVE = 1.1
"""Effective number of texts below which a lift has no interval."""


def offset_masses(
    weights: Float[Tensor, "head query key"], furthest: int, first: int = 0
) -> Float[Tensor, "head {2*furthest+3}"]:
    """Attention by how many tokens the key is from the query, summed over queries.

    Args:
        weights: Weights of consecutive queries on all keys.
        furthest: Offsets are told apart up to so many tokens.
        first: The position of the first query.

    Returns:
        (head, 2 furthest + 3): further back than `furthest`, -furthest to furthest, further ahead.

    Source:
        Ours; by position as in Clark et al. 2019, section 3.1.
    """
    n_heads, n_queries, n_keys = weights.shape
    width = n_queries + n_keys - 1
    # Each row one column further to the right than the one before: what is at one offset stands in one column.
    padded = weights.new_zeros(n_heads, n_queries, n_queries + n_keys)
    padded[..., :n_keys] = weights.flip(-1)
    skewed = padded.flatten(1)[:, : n_queries * width].view(n_heads, n_queries, width).sum(1)
    offsets = n_keys - 1 - torch.arange(width, device=weights.device) - first
    found = weights.new_zeros(n_heads, 2 * furthest + 3)
    return found.index_add_(1, offsets.clamp(-furthest - 1, furthest + 1) + furthest + 1, skewed)


def even_weights(allowed: Bool[Tensor, "query key"]) -> Float[Tensor, "query key"]:
    """Uniform attention over the keys that each query may attend to.

    Args:
        allowed: Which these are.

    Returns:
        (query, key), float32, 0 to 1: each row sums to 1, that of a query that may attend to nothing to 0.

    Source:
        Ours.
    """
    return allowed.float() / allowed.sum(-1, keepdim=True).clamp(min=1)


def members(tokens: Int[Tensor, " position"], n_tokens: int) -> Float[Tensor, "position {n_tokens}"]:
    """Which of some tokens stands at each position: 1 there, else 0.

    Its product with weights sums these by token, which is faster than adding them one by one.

    Args:
        tokens: The number of the token at each position; -1 = none that is asked for.
        n_tokens: How many there are.

    Returns:
        (position, token), float32, 0 or 1.

    Source:
        Ours.
    """
    return (tokens[:, None] == torch.arange(n_tokens, device=tokens.device)).float()


class Lifts(NamedTuple):
    """What attention lies on some items, beside what uniform attention would give them.

    Attributes:
        mass: (item, head): mean weight of a query that could see the item.
        lift: (item, head): the same over that of uniform attention; NaN where that is 0.
        low: Lower end of the 95% interval of the lift, over texts; NaN where fewer than two have the item, or one has
            nearly all of it.
        high: Upper end.
        counts: (item, layer): queries that could see it.
        n_texts: (item, layer): texts that have it.
    """

    mass: Floats
    lift: Floats
    low: Floats
    high: Floats
    counts: Floats
    n_texts: Floats


class ItemSums:
    """Sums over texts of what heads give to some items (tokens, or pairs of them), and what follows from them.

    A head's lift on an item is the ratio R = Σ_t s_t / Σ_t u_t of what it gave in the texts t and what uniform
    attention over the same allowed keys would have given. Its variance is that of a ratio of sums over texts,

        T / (T - 1) · Σ_t (s_t - R u_t)² / (Σ_t u_t)²,

    (Cochran 1977, Sampling Techniques, section 6.4), with t of m - 1 degrees of freedom for the effective number of
    texts m = (Σ_t u_t)² / Σ_t u_t²: a text that has most of an item is most of what is known of it. A few texts may
    carry s, as weights are mostly small and now and then large. So the ends are those of `interval_of_few_texts`: texts
    that were not seen give the item nothing, or all of their attention.

    Args:
        n_items: How many items.
        n_heads: Heads of each layer.
    """

    def __init__(self, n_items: int, n_heads: list[int]) -> None:
        self._ends = np.concatenate([[0], np.cumsum(n_heads)])
        self._head_sums = np.zeros((3, n_items, int(self._ends[-1])))  # s, s², s u
        self._layer_sums = np.zeros((4, n_items, len(n_heads)))  # u, u², queries, texts

    def add(self, layer: int, items: NDArray[np.int64], masses: Floats, even: Floats, counts: Floats) -> None:
        """Adds what the heads of a layer gave in a text.

        Args:
            layer: Which of the layers.
            items: (item,): the items of the text, each once.
            masses: (item, head): summed over queries.
            even: (item,): the same of uniform attention; items of which it has none are passed over.
            counts: (item,): how many queries could see it.
        """
        seen = even > 0
        items, masses, even, counts = items[seen], masses[seen], even[seen], counts[seen]
        mine = slice(self._ends[layer], self._ends[layer + 1])
        for sums, part in zip(self._head_sums, (masses, masses**2, masses * even[:, None]), strict=True):
            sums[items, mine] += part
        for sums, of_text in zip(self._layer_sums, (even, even**2, counts, np.ones(len(even))), strict=True):
            sums[items, layer] += of_text

    def lifts(self) -> Lifts:
        """What the sums come to."""
        even, even_squares, count, texts = self._layer_sums
        sums, squares, products = self._head_sums
        wide = [np.repeat(one, np.diff(self._ends), 1) for one in (even, even_squares, count, texts)]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = sums / wide[0]
            rest = np.maximum(squares - 2 * ratio * products + ratio**2 * wide[1], 0.0)
            effective = wide[0] ** 2 / wide[1]
            error = np.sqrt(rest * wide[3] / (wide[3] - 1)) / wide[0]
            known = (wide[3] > 1) & (effective >= LEAST_EFFECTIVE)
            error = np.where(known, stdtrit(np.maximum(effective - 1, LEAST_EFFECTIVE - 1), 0.975) * error, np.nan)
            low, high = interval_of_few_texts(ratio, error, effective, wide[2] / wide[0])
            return Lifts(sums / wide[2], ratio, low, high, count, texts)


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
    """The fewest keys that hold a share of each row, at most so many; of equal weights the earlier key.

    Args:
        weights: (query, key), at most 256 keys.
        totals: (query,): what each row sums to over all keys, those too that are not here.
        share: The share of it that is to be kept.
        most: How many keys of a row are kept at most.
    """
    order = np.argsort(-weights, axis=1, kind="stable")[:, :most]
    largest = np.take_along_axis(weights, order, 1).astype(np.float64)
    before = np.cumsum(largest, 1) - largest
    codes = np.rint(255 * np.clip(largest, 0, 1)).astype(np.uint8)
    kept = (before < share * totals[:, None] - 1e-7) & (codes > 0)
    starts = np.concatenate([[0], np.cumsum(kept.sum(1))])
    return KeptRows(starts.astype(np.int64), order[kept].astype(np.uint8), codes[kept])
