"""From which queries a head does something else: known classes of queries, screened together with features of keys.

A gate g is a class of queries. Let a be the mean of E_A[f] over rows, π that of E_p[f], and b(a, π) = a ln(a / π) +
(1 - a) ln((1 - a) / (1 - π)) the lower bound on what f can gain (`descriptions`). A weight of f on each side of the
gate gains more than one weight for all rows, by about

    split(g, f) = W_g b(a_g, π_g) + W_h b(a_h, π_h) - b(a, π),      a = W_g a_g + W_h a_h

where h are the queries outside the gate and W what rows weigh. b is convex, so split >= 0; it is 0 where the gate says
nothing about f.

Source: ours. Splitting rows by what gains most: Morgan & Sonquist 1963.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.core.fit_tables import Floats
from attnscope.core.sampled_rows import Rows

N_GATED = 4
"""Most pairs of a gate and a feature that a head gets as candidates."""

LEAST_SPLIT = 0.005
"""Share of the head's nats that a gate must gain for a feature to be a candidate."""

GATED_RANK = 5
"""How simple a known feature from known queries is: it is taken before features that are fitted to the head."""

FEWEST_ROWS, FEWEST_TEXTS = 8, 3
"""Queries that must lie on either side of a gate, and their texts."""

TINY = 1e-9
"""Instead of 0, whose logarithm is not finite."""

_ENTRIES_AT_ONCE = 2**16


def usable_gates(part: Rows) -> NDArray[np.int64]:
    """The gates with enough rows on either side."""

    def has_enough(side: NDArray[np.bool_]) -> bool:
        return side.sum() >= FEWEST_ROWS and len(np.unique(part.texts[side])) >= FEWEST_TEXTS

    usable = [number for number, inside in enumerate(part.gates) if has_enough(inside) and has_enough(~inside)]
    return np.array(usable, np.int64)


def screen_gates(
    part: Rows,
    heads: Sequence[int],
    p: NDArray[np.floating],
    candidates: Sequence[int],
) -> list[tuple[tuple[int, int], ...]]:
    """The gates and features that say most together, beyond what each feature says of all queries.

    Args:
        part: The rows to fit.
        heads: Which heads.
        p: (head, entry): the expected attention, times what its row counts; sums to 1.
        candidates: The features.

    Returns:
        For each head up to `N_GATED` pairs of a gate and a feature, the largest gain first, each feature once.
    """
    gates = usable_gates(part)
    if not len(gates) or not len(candidates):
        return [()] * len(heads)
    inside = part.gates[gates].astype(np.float64)
    weights = part.weights[list(heads)]
    on = np.stack([part.scaled(head) for head in heads]) * weights[:, part.row_of]
    both = _sums(part, np.concatenate([on, p]), inside > 0, candidates)
    pairs: list[tuple[tuple[int, int], ...]] = []
    for at, head in enumerate(heads):
        gains = split_gains(both[:, at], both[:, at + len(heads)], inside @ weights[at])
        picked: list[tuple[int, int]] = []
        while len(picked) < N_GATED and gains.max() >= LEAST_SPLIT * part.mean_nats[head]:
            gate, feature = divmod(int(gains.argmax()), gains.shape[1])
            picked.append((int(gates[gate]), int(candidates[feature])))
            gains[:, feature] = -1.0
        pairs.append(tuple(picked))
    return pairs


def split_gains(a: Floats, pi: Floats, weights: Floats) -> Floats:
    """split(g, f) of the module's docstring, (gate, feature), in nats.

    Args:
        a: (gate + 1, feature): Σ w E_A[f] over the rows of each gate, and in the last row over all rows.
        pi: (gate + 1, feature): the same of p.
        weights: (gate,): W_g, what each gate's rows weigh, 0 to 1.
    """
    w = np.clip(weights, 1e-9, 1 - 1e-9)[:, None]
    sides = [
        share * least_gain(side_a / share, side_pi / share)
        for share, side_a, side_pi in ((w, a[:-1], pi[:-1]), (1 - w, a[-1] - a[:-1], pi[-1] - pi[:-1]))
    ]
    return sides[0] + sides[1] - least_gain(a[-1], pi[-1])


def least_gain(a: Floats, pi: Floats) -> Floats:
    """b(a, π) of the module's docstring, in the shape of both, in nats; both are cut to 1e-9 from 0 and 1."""
    a, pi = np.clip(a, TINY, 1 - TINY), np.clip(pi, TINY, 1 - TINY)
    return a * np.log(a / pi) + (1 - a) * np.log((1 - a) / (1 - pi))


def _sums(part: Rows, values: Floats, inside: NDArray[np.bool_], candidates: Sequence[int]) -> Floats:
    """Σ value f over the entries of each gate, and over all: (gate + 1, values, feature)."""
    # Gates overlap: rows are summed by the set of gates that they are in, and these sums are added.
    sets, of_row = np.unique(inside, axis=1, return_inverse=True)
    chosen = np.asarray(candidates)
    sums = np.zeros((sets.shape[1], len(values), len(chosen)))
    of_entry = of_row.ravel()[part.row_of]
    for start in range(0, part.size, _ENTRIES_AT_ONCE):
        some = np.arange(start, min(part.size, start + _ENTRIES_AT_ONCE))
        some = some[np.argsort(of_entry[some], kind="stable")]
        levels = part.features[np.ix_(chosen, some)].astype(np.float32)
        ends = np.searchsorted(of_entry[some], np.arange(sets.shape[1] + 1))
        for number, (low, high) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            if low < high:
                sums[number] += values[:, some[low:high]].astype(np.float32) @ levels[:, low:high].T
    of_gates = np.einsum("gs,shf->ghf", np.vstack([sets, np.ones((1, sets.shape[1]), np.bool_)]).astype(float), sums)
    scaled: Floats = of_gates / (part.levels[chosen] - 1)
    return scaled
