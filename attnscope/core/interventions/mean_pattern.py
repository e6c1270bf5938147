"""The mean attention pattern of heads: where each attends on average, whatever the tokens are.

A mean over equal positions needs texts of one length. Ours is over queries that may attend to about as many keys, and
over classes of keys: the first key, the last one, and all others by their offset from the query.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import SumsOverQueries
from attnscope.core.attention.seam import AttentionCall, attend_with_weights, may_attend
from attnscope.core.interventions.replaced import scores_of

DOUBLINGS = 12
"""Offsets below 16 and counts of keys below 8 are classes of their own; above, each doubling has 4 and 2 classes."""

STEPS, ROWS = 16 + 4 * DOUBLINGS, 8 + 2 * DOUBLINGS
FIRST, LAST, BACK, AHEAD = 0, 1, 2, 2 + STEPS
N_CLASSES = 2 + 2 * STEPS


def key_cells(seen: Bool[Tensor, "text 1 query key"]) -> Int[Tensor, "text 1 query key"]:
    """The cell of each key for each query: the class of how many keys the query sees, and the class of the key.

    `seen` are the keys that the mask allows. The first and last keys are those that any query may attend to: padding is
    neither. A cell is N_CLASSES x row + class, from 0 to N_CLASSES x ROWS - 1.
    """
    n_queries, n_keys = seen.shape[-2:]
    offsets = (torch.arange(n_keys) - torch.arange(n_queries)[:, None]).to(seen.device)
    classes = _steps(offsets.abs(), 16, 4) + torch.where(offsets > 0, AHEAD, BACK)
    keys, number = seen.any(-2, keepdim=True), torch.arange(n_keys, device=seen.device)
    last = torch.where(keys, number, -1).amax(-1, keepdim=True)
    first = torch.where(keys, number, n_keys).amin(-1, keepdim=True)
    # The last query of a decoder sees itself as the last key; it counts as itself, as for all other queries.
    classes = torch.where((number == last) & (offsets > 0), LAST, classes)
    return N_CLASSES * _steps(seen.sum(-1, keepdim=True), 8, 2) + torch.where(number == first, FIRST, classes)


def _steps(numbers: Tensor, exact: int, a_doubling: int) -> Tensor:
    far = exact + ((numbers / exact).clamp(min=1).log2() * a_doubling).long()
    return torch.where(numbers < exact, numbers, far).clamp(max=exact + a_doubling * DOUBLINGS - 1)


class MeanPattern(SumsOverQueries):
    """Adds up the weights of heads, and over how many keys, by cell: `sums` are (n_heads, 2, cell); see `key_cells`."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention, and adds up its weights; shape and dtype: see `Probe`."""
        output, weights = attend_with_weights(call)
        place, real, seen = (call.kind, call.layer), self._real.get(call.kind), may_attend(call)
        counted = seen if real is None else seen & real.to(seen.device)[:, None, :, None]
        cells = key_cells(seen)[counted]
        picked = weights.detach().movedim(1, 0)[:, counted[:, 0]].to(sum_dtype(weights.device))
        sums = picked.new_zeros(2, call.n_heads, N_CLASSES * ROWS)
        sums[0].index_add_(-1, cells, picked)
        sums[1].index_add_(-1, cells, torch.ones_like(picked))
        self._add(place, sums.movedim(0, 1), int(counted.any(-1).sum()))
        return output


def pattern_scores(
    sums: Float[Tensor, "2 cell"], seen: Bool[Tensor, "text 1 query key"]
) -> Float[Tensor, "text 1 query key"]:
    """Scores whose softmax over the allowed keys is a head's mean pattern.

    Each key gets the mean weight of its cell over all queries and keys that were added up; the softmax scales the
    weights of a query to 1. A class of keys that no query with about as many keys has seen gets the mean of queries
    with fewer keys, else with more; an unseen offset gets that of the next nearer one.

    Args:
        sums: Of the head, as `MeanPattern.sums`; a common factor does not matter.
        seen: Which keys the mask allows.

    Source:
        Constant attention, Hassid et al. 2022, arXiv 2211.03495: the mean of a head's weights at equal positions.
    """
    weight, count = sums.numpy().reshape(2, ROWS, N_CLASSES)
    is_known = count > 0
    means = np.divide(weight, count, out=np.zeros_like(weight), where=is_known)
    means, is_known = _carry(means, is_known)
    means, is_known = _carry(means[::-1], is_known[::-1])
    means, is_known = means[::-1], is_known[::-1]
    for side in (slice(BACK, AHEAD), slice(AHEAD, None)):
        means[:, side] = _carry(means[:, side].T, is_known[:, side].T)[0].T
    return scores_of(torch.from_numpy(means.copy()).to(seen.device, torch.float32).flatten()[key_cells(seen)])


def _carry(values: NDArray[np.float64], is_known: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Fills each unknown value with the last known one before it; and which are known then."""
    above = np.maximum.accumulate(np.where(is_known, np.arange(len(values))[:, None], 0))
    return np.take_along_axis(values, above, 0), np.logical_or.accumulate(is_known)
