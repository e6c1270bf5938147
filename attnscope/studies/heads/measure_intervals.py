"""Choose and compute the 95% intervals of measures of heads, for `studies.heads.roles`.

The methods are those of `core.intervals`. This module says which method a measure takes, and which values it may have
in texts of a kind that the sample lacks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import MEASURES, Pairs
from attnscope.core.intervals import (
    DEPENDENCE,
    END,
    RARELY,
    Sample,
    allow_for_unseen,
    allow_share_for_unseen,
    independent_units,
    mean_interval,
    share_interval,
    unseen_share,
    weight_of_unseen,
)
from attnscope.core.sums import RunningSums

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LEAST_ACTIVE = 0.1
"""The least share of attention outside sinks at which an `_active` measure has an interval, and may give a role.

It is a share of the attention of those queries that the measure counts. An induction head rests wherever there is
nothing to repeat: over all queries 95% of the time and more.
"""

NO_SHARES = tuple(name for name, measure in MEASURES.items() if measure.low < 0 or measure.high > 1)
"""Measures that may be below 0 or above 1."""

_HITS = ("rarest_token",)
"""Shares of queries, each of which counts 1 or 0; other shares are shares of attention."""

_MEANS = ("relative_entropy",)
"""Means from 0 to 1 that are no share of anything."""

_OF_WHOLE_TEXTS = ("resting", "punctuation", "distance_tokens", "signed_distance_tokens")
"""Measures that differ more between texts than within them: how much a head leaves on sinks depends on what a whole
text offers, and distances on its length. A decoder's head that rests on the first token attends to punctuation all the
time in the few texts that begin with a mark. Their intervals count texts as the units. With `DEPENDENCE` those of ten
texts hold in 85% of draws at worst (`resting`), and in 82% (distances); those of 40 in 68% (`punctuation`)."""

_OF_SOME_QUERIES = tuple(
    name
    for name, measure in MEASURES.items()
    if isinstance(measure.family, Pairs) and measure.family.is_set and not measure.family.offsets
)
"""Measures that count only those queries that have a key of the measure's kind, such as an earlier copy of the token.

In web text an eighth of the queries have one, but in texts such as "______" and "dancing!!!!!!!" all have one. One such
text weighs as much as eight others, and its value is often near 1."""

_FAR = 4.5
"""How many times as far as uniform attention a head may look.

In a text of the mean length, the farthest token is three times as far as the mean one if both sides are seen, and twice
as far if one side is; and some texts are several times as long."""

_RARE = 1.25
"""How many times as rare as for uniform attention keys may be. In 258 sentences times 270 heads it is 1.27 at most."""

SIMILAR = 0.75
"""How similar to the query the keys may be, or how dissimilar. In 99.9% of 300 texts times 72 heads it is less."""


class _Kinds(NamedTuple):
    """Hold which kind of number each measure is, in arrays (measure,).

    Attributes:
        are_shares: From 0 to 1; `are_means` and `are_hits` are some of these.
        are_hits: Shares of queries, see `_HITS`.
        are_means: Means, see `_MEANS`.
        are_of_some_queries: See `_OF_SOME_QUERIES`.
        dependence: As `core.intervals.independent_units` takes it: 1 where whole texts are the units.
    """

    are_shares: Bools
    are_hits: Bools
    are_means: Bools
    are_of_some_queries: Bools
    dependence: Floats


def measure_intervals(
    sums: RunningSums,
    names: Sequence[str],
    units: Floats | float = 1.0,
    uniform: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Return the 95% intervals of measures.

    Shares have the intervals of shares, other measures Student's t. Both allow for texts of a kind that the sample
    lacks. In such texts, measures of some queries may count all queries, and may be 1. (They may be 0 too, but few are:
    the low end holds without.) Other measures may have values there between 0 and that of uniform attention, or a
    multiple of it (`_range`).

    If a head has less than LEAST_ACTIVE of its attention outside sinks, a few texts hold all that an `_active` measure
    counts, and the sample may lack them. Then the interval of a share contains both ends that such texts could lead to;
    other measures have no interval.

    Args:
        sums: The sums of the measures, (…, measure).
        names: The names of the measures.
        units: As `core.intervals.independent_units` takes them.
        uniform: The values of uniform attention, (…, measure); None = only shares allow for unseen texts.

    Returns:
        The low and the high ends, (…, measure); NaN where there is none.
    """
    sample = sums.sample()
    kinds = kinds_of(names)

    # Intervals from the texts that were seen.
    low, high = mean_interval(sample)
    low_of_shares, high_of_shares = share_interval(
        sample, hits=kinds.are_hits, unseen=~kinds.are_means, dependence=kinds.dependence, units=units
    )
    low = np.where(kinds.are_shares, low_of_shares, low)
    high = np.where(kinds.are_shares, high_of_shares, high)
    if uniform is None:
        return low, high

    # Shares: which part of the counts unseen texts may hold that are at 0 (below), or at 1 (above).
    unseen_weight, active_share = _weights(sample, names, units, kinds)
    is_active = active_share >= LEAST_ACTIVE
    below = np.where(is_active, 0.0, unseen_weight)
    above = np.where(kinds.are_of_some_queries, np.fmax(below, _weight_of_full_texts(sample)), below)
    of_shares = np.stack(allow_share_for_unseen(sample.ratio, low, high, below, above))

    # Other measures: by the range of their values, (end, …, measure).
    lowest, highest = _range(names, uniform)
    of_others = np.stack(allow_for_unseen(sample.ratio, low, high, unseen_weight, lowest, highest))
    of_others = np.where(is_active, of_others, np.nan)
    of_others = np.where(kinds.are_means, np.clip(of_others, 0, 1), of_others)
    low, high = np.where(kinds.are_shares & ~kinds.are_means, of_shares, of_others)
    return low, high


def kinds_of(names: Sequence[str]) -> _Kinds:
    """Return which kind of number each measure is."""
    whole = [name.removesuffix("_active") for name in names]
    return _Kinds(
        are_shares=~np.isin(whole, NO_SHARES),
        are_hits=np.isin(names, _HITS),
        are_means=np.isin(names, _MEANS),
        are_of_some_queries=np.isin(whole, _OF_SOME_QUERIES),
        dependence=np.where(np.isin(whole, _OF_WHOLE_TEXTS), 1.0, DEPENDENCE),
    )


def _weights(
    sample: Sample, names: Sequence[str], units: Floats | float, kinds: _Kinds
) -> tuple[Floats, Floats]:
    """Return two arrays (…, measure): which share of its count unseen texts may hold, and which share is active.

    An `_active` measure counts the attention outside sinks. A text of an unseen kind may have all of its attention
    there, so it weighs more than other texts if the head mostly rests. Of whole measures the active share is 1.
    """
    unseen_texts = unseen_share(independent_units(sample, kinds.dependence, units), END)
    unseen_weight = unseen_texts.copy()
    active_share = np.ones_like(unseen_texts)
    for column, name in enumerate(names):
        whole = name.removesuffix("_active")
        if whole != name and whole in names:
            of_whole = names.index(whole)
            active = divide(sample.total[..., column], sample.total[..., of_whole])
            active_share[..., column] = active
            unseen_weight[..., column] = weight_of_unseen(unseen_texts[..., of_whole], active)
    return unseen_weight, active_share


def _weight_of_full_texts(sample: Sample) -> Floats:
    """Return which share of each count unseen texts may hold if all of their queries count, (…, measure)."""
    # The measure with the largest count counts all queries: take its count, and to how many texts it amounts.
    largest = sample.total.argmax(-1, keepdims=True)
    every = np.take_along_axis(sample.total, largest, -1)
    n_texts = np.take_along_axis(sample.n_texts, largest, -1)
    return weight_of_unseen(unseen_share(n_texts, RARELY), divide(sample.total, every))


def _range(names: Sequence[str], uniform: Floats) -> tuple[Floats, Floats]:
    """Return the least and the largest value that measures have in texts of an unseen kind, (…, measure) each."""
    # Between 0 and the value of uniform attention, except for the measures below.
    lowest = np.fmin(uniform, 0.0)
    highest = np.fmax(uniform, 0.0)
    for column, name in enumerate(names):
        distance = name.removeprefix("signed_")
        if distance != name and distance in names:
            far = _FAR * uniform[..., names.index(distance)]
            lowest[..., column] = uniform[..., column] - far
            highest[..., column] = uniform[..., column] + far
        elif "distance" in name:
            highest[..., column] *= _FAR
        elif name.startswith("rarity"):
            highest[..., column] *= _RARE
        elif name.startswith("similar_token"):
            lowest[..., column] = -SIMILAR
            highest[..., column] = SIMILAR
    return lowest, highest


def divide(a: Floats, b: Floats, undefined: float = np.nan) -> Floats:
    """Return a / b; `undefined` where b is 0."""
    result: Floats = np.divide(a, b, out=np.full(np.shape(a), undefined), where=b > 0)
    return result
