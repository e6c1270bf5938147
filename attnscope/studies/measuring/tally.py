"""What a study of heads adds up over texts, for one kind of attention: mergeable, of a fixed size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import OFFSETS
from attnscope.core.sums import RunningSums

PAIR_MEASURES = ("same_token", "induction")
"""Measures of links between two tokens of the text, which a head of a fixed offset may hit by chance."""

OF_TEXTS = ("sink",)
"""Measures of which each text counts 1, whatever its length."""

_PARTS = ("measures", "uniform", "offsets", "offsets_uniform", "pairs", "lengths")


@dataclass(frozen=True, eq=False)
class Tally:
    """Sums over texts for the heads of one kind of attention.

    Attributes:
        layers: Numbers of the layers, in the order of the first axis.
        names: The measures, in the order of the last axis.
        measures: Each measure, (layer, head, measure).
        uniform: The same under uniform attention over the keys that the mask allows, (layer, head, measure).
        offsets: The share of queries whose largest weight is at an offset, (layer, head, offset).
        offsets_uniform: The same under uniform attention.
        pairs: What a head would reach that always looked at one offset, (pair measure, offset).
        lengths: 1 / n of each text of n queries (`weigh_units`).
    """

    kind: str
    layers: tuple[int, ...]
    names: tuple[str, ...]
    measures: RunningSums
    uniform: RunningSums
    offsets: RunningSums
    offsets_uniform: RunningSums
    pairs: RunningSums
    lengths: RunningSums

    @classmethod
    def empty(cls, kind: str, layers: Sequence[int], n_heads: int, names: Sequence[str]) -> "Tally":
        """A tally of no text."""
        shape = (len(layers), n_heads)
        return cls(
            kind,
            tuple(layers),
            tuple(names),
            RunningSums((*shape, len(names))),
            RunningSums((*shape, len(names))),
            RunningSums((*shape, len(OFFSETS))),
            RunningSums((*shape, len(OFFSETS))),
            RunningSums((len(PAIR_MEASURES), len(OFFSETS))),
            RunningSums(),
        )

    @property
    def n_texts(self) -> int:
        """How many texts are in it."""
        return self.measures.n_texts

    @property
    def queries_per_count(self) -> float:
        """How many queries a count of 1 stands for: the harmonic mean length of texts; 1 without any."""
        return 1 / float(self.lengths.ratio()) if self.lengths.n_texts else 1.0

    def units(self, names: Sequence[str]) -> NDArray[np.float64]:
        """What `RunningSums.share_interval` takes as `units`, for each measure."""
        return np.where(np.isin(names, OF_TEXTS), 1.0, self.queries_per_count)

    def merge(self, other: "Tally") -> "Tally":
        """The sums over the texts of both."""
        return Tally(
            self.kind,
            self.layers,
            self.names,
            *(getattr(self, part).merge(getattr(other, part)) for part in _PARTS),
        )


_LEAST_COUNT = 1e-9
"""The least count of a unit of evidence, as a share of its queries: less is rounding, and counts nothing."""


def weigh_units(
    names: Sequence[str], weights: NDArray[np.float64], sums: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Sums and counts of units of evidence, (unit, ...), each times the weight of its text, except those of OF_TEXTS.

    `names` are the measures on the last axis of "sum", "count" and "uniform_sum". The weight is 1 / n for a text of n
    queries, so that all texts weigh the same.
    """
    weighed = {}
    for name, array in sums.items():
        weighed[name] = array * weights.reshape(-1, *[1] * (array.ndim - 1))
        if name in ("sum", "count", "uniform_sum"):
            unweighted = np.isin(names, OF_TEXTS)
            weighed[name][..., unweighted] = array[..., unweighted]
    # A head that puts everything on sinks leaves 1e-40 elsewhere: its ratios would be those of rounding.
    negligible = weighed["count"] < _LEAST_COUNT
    for name in ("sum", "count", "uniform_sum"):
        weighed[name] = np.where(negligible, 0.0, weighed[name])
    return weighed


def pair_hits(
    ids: NDArray[np.int64], *, causal: bool, context: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For a head that always looked `offset` tokens further: how much of each pair measure it would reach.

    Tokens of the context, (token,), count nothing as queries.

    Returns:
        Hits and counts, each (pair measure, offset): the counts are the queries that have such a key on the side of the
        offset. For a head that looks both ways that is too much to ask, and for one that looks back only just right,
        wherever in a model it is.
    """
    n = len(ids)
    places = np.arange(n)
    asks = np.ones(n, np.bool_) if context is None else ~context
    order = np.lexsort((places, ids))
    again = np.append(False, ids[order][1:] == ids[order][:-1])
    # The nearest earlier place of the same token, -1 = none; and the one before that.
    nearest = np.full(n, -1)
    nearest[order[again]] = order[np.flatnonzero(again) - 1]
    second = np.where(nearest >= 0, nearest[nearest], -1)
    has_later = np.zeros(n, np.bool_)
    has_later[nearest[nearest >= 0]] = True
    # Induction looks at key j + 1 where x_j = x_i, j < i; j = i - 1 would be the query itself.
    followed = (nearest >= 0) & ((nearest < places - 1) | (second >= 0))
    hits, counts = np.zeros((2, len(PAIR_MEASURES), len(OFFSETS)))
    before, after = np.array(OFFSETS) < 0, (np.array(OFFSETS) > 0) & (not causal)
    counts[0, before], counts[0, after] = ((nearest >= 0) & asks).sum(), (has_later & asks).sum()
    counts[1, before] = (followed & asks).sum()
    for column, offset in enumerate(OFFSETS):
        for row, distance in ((0, offset), (1, offset - 1)):
            hidden = offset > 0 and (causal or row == 1)
            if offset == 0 or hidden or abs(distance) >= n:
                continue
            first, later = (
                slice(max(0, -distance), n - max(0, distance)),
                slice(max(0, distance), n - max(0, -distance)),
            )
            hits[row, column] = ((ids[first] == ids[later]) & asks[first]).sum()
    return hits, counts
