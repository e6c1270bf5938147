"""Choose and compute the 95% intervals of measures of heads, for `studies.heads.roles`.

A measure is a ratio of sums over texts; `<name>_active` is the same measure of the attention outside sinks alone. The
methods are those of `core.intervals`. They allow for unseen texts: texts of a kind that the sample lacks. This module
says which method each measure takes, and which values it may have in unseen texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import MEASURES, PairMeasure
from attnscope.core.intervals import (
    DEPENDENCE,
    END,
    RARELY,
    TextSums,
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

MIN_ACTIVE_SHARE = 0.1
"""The least share of attention outside sinks at which an `_active` measure has an interval, and may give a role.

It is a share of the attention of those queries that the measure counts, as a head may be active for few queries. An
induction head, over all queries, leaves 95% and more on sinks: wherever there is nothing to repeat.
"""

NON_SHARE_MEASURES = tuple(
    name for name, measure in MEASURES.items() if measure.low < 0 or measure.high > 1
)
"""Measures that may be below 0 or above 1, such as distances; all others are taken as shares."""

_HIT_MEASURES = ("rarest_token",)
"""Shares of queries: each query counts 1 or 0. Other shares are of attention, so a query counts anything in between."""

_MEAN_MEASURES = ("relative_entropy",)
"""Means from 0 to 1 that are a share of nothing."""

_TEXT_LEVEL_MEASURES = ("resting", "punctuation", "distance_tokens", "signed_distance_tokens")
"""Measures that differ more between texts than within them, so that their intervals count texts as the units.

How much a head leaves on sinks depends on what a text offers it, and distances on the length of the text. A decoder's
head that rests on the first token always attends to punctuation in the few texts that begin with a mark.

If their queries depended on each other as those of other measures do (`DEPENDENCE`), the intervals from ten texts would
hold in 85% of draws at worst for `resting` and in 82% for distances; those from 40 texts in 68% for `punctuation`."""

_SOME_QUERY_MEASURES = tuple(
    name
    for name, measure in MEASURES.items()
    if isinstance(measure.family, PairMeasure) and measure.family.is_set and not measure.family.offsets
)
"""Measures of attention to a set of keys that depends on the query, such as earlier copies of its token. Only queries
that have such a key count.

In web text an eighth of the queries have an earlier copy, but in texts such as "______" and "dancing!!!!!!!" all do.
One such text weighs as much as eight others, and its value is often near 1."""

_MAX_DISTANCE_RATIO = 4.5
"""The largest distance in unseen texts, in multiples of the mean distance of uniform attention.

In a text of the mean length, the farthest token is at three times the mean distance if heads look to both sides, and at
twice the mean distance if they look to one side. Some texts are several times as long."""

_MAX_RARITY_RATIO = 1.25
"""The largest rarity in unseen texts, in multiples of that of uniform attention. In 258 sentences times 270 heads, the
largest multiple is 1.27."""

MAX_UNSEEN_SIMILARITY = 0.75
"""The largest similarity of query and key in unseen texts (with a minus: the least). In 300 texts times 72 heads, 99.9%
are below it."""


class MeasureKinds(NamedTuple):
    """Hold what kind of number each measure is, in arrays (measure,).

    Attributes:
        are_shares: Measures from 0 to 1; some of them are means or hits.
        are_hits: Shares of queries, see `_HIT_MEASURES`.
        are_means: Means, see `_MEAN_MEASURES`.
        are_of_some_queries: See `_SOME_QUERY_MEASURES`.
        dependence: How much the queries of a text depend on each other, as `core.intervals.independent_units` takes it:
            1 = a text is one unit, however many queries it has.
    """

    are_shares: Bools
    are_hits: Bools
    are_means: Bools
    are_of_some_queries: Bools
    dependence: Floats


def measure_intervals(
    sums: RunningSums,
    names: Sequence[str],
    units: Floats | float,
    uniform: Floats,
) -> tuple[Floats, Floats]:
    """Return the 95% intervals of measures.

    Shares have the intervals of shares, other measures Student's t. Both then allow for unseen texts:

    - A share of the attention of some queries may count all queries of an unseen text, and be 1 there. (It may be 0
      too, but rarely is: the low end holds without allowing for that.)
    - Measures that are no shares, and means, may have any value in the range of `_unseen_range`.
    - If a head has less than MIN_ACTIVE_SHARE of its attention outside sinks, a few texts hold all that an `_active`
      measure counts, and the sample may lack them. Then a share may be 0 or 1 in unseen texts, and other measures have
      no interval.

    Args:
        sums: The sums of the measures, (…, measure).
        names: The names of the measures.
        units: As `core.intervals.independent_units` takes them.
        uniform: The values of uniform attention, (…, measure).

    Returns:
        The low and the high ends, (…, measure); NaN where there is no interval.
    """
    sample = sums.sample()
    kinds = classify_measures(names)

    # Intervals from the texts that were seen. Their shares allow already for unseen units; means are no shares.
    low, high = mean_interval(sample)
    low_of_shares, high_of_shares = share_interval(
        sample, hits=kinds.are_hits, unseen=~kinds.are_means, dependence=kinds.dependence, units=units
    )
    low = np.where(kinds.are_shares, low_of_shares, low)
    high = np.where(kinds.are_shares, high_of_shares, high)

    # Shares: what part of the count may be in unseen texts whose value is 0, and what part in those whose value is 1.
    unseen_weight, active_share = _unseen_weights(sample, names, units, kinds)
    is_active = active_share >= MIN_ACTIVE_SHARE
    weight_at_0 = np.where(is_active, 0.0, unseen_weight)
    at_least_full = np.fmax(weight_at_0, _weight_of_full_texts(sample))
    weight_at_1 = np.where(kinds.are_of_some_queries, at_least_full, weight_at_0)
    of_shares = np.stack(allow_share_for_unseen(sample.ratio, low, high, weight_at_0, weight_at_1))

    # Other measures: by the range of their values in unseen texts, (end, …, measure).
    lowest, highest = _unseen_range(names, uniform)
    of_others = np.stack(allow_for_unseen(sample.ratio, low, high, unseen_weight, lowest, highest))
    of_others = np.where(is_active, of_others, np.nan)
    of_others = np.where(kinds.are_means, np.clip(of_others, 0, 1), of_others)
    low, high = np.where(kinds.are_shares & ~kinds.are_means, of_shares, of_others)
    return low, high


def classify_measures(names: Sequence[str]) -> MeasureKinds:
    """Return what kind of number each measure is, whole or `_active`."""
    whole_names = [name.removesuffix("_active") for name in names]
    return MeasureKinds(
        are_shares=~np.isin(whole_names, NON_SHARE_MEASURES),
        are_hits=np.isin(names, _HIT_MEASURES),
        are_means=np.isin(names, _MEAN_MEASURES),
        are_of_some_queries=np.isin(whole_names, _SOME_QUERY_MEASURES),
        dependence=np.where(np.isin(whole_names, _TEXT_LEVEL_MEASURES), 1.0, DEPENDENCE),
    )


def _unseen_weights(
    sample: TextSums, names: Sequence[str], units: Floats | float, kinds: MeasureKinds
) -> tuple[Floats, Floats]:
    """Return the weight of unseen texts for each measure, and its active share, (…, measure) each.

    The weight is the share of the measure's count that unseen texts may hold. The active share is that of attention
    outside sinks: the count of an `_active` measure over the count of the whole one; 1 for whole measures.

    An unseen text may have all of its attention outside sinks. If the head leaves most of it on sinks elsewhere, that
    text weighs more than others in `_active` measures.
    """
    unseen_texts = unseen_share(independent_units(sample, kinds.dependence, units), END)
    unseen_weight = unseen_texts.copy()
    active_share = np.ones_like(unseen_texts)
    for column, name in enumerate(names):
        whole_name = name.removesuffix("_active")
        if whole_name != name and whole_name in names:
            whole = names.index(whole_name)
            share = divide(sample.total[..., column], sample.total[..., whole])
            active_share[..., column] = share
            unseen_weight[..., column] = weight_of_unseen(unseen_texts[..., whole], share)
    return unseen_weight, active_share


def _weight_of_full_texts(sample: TextSums) -> Floats:
    """Return the share of each count that unseen texts may hold if all of their queries count, (…, measure)."""
    # The largest count is that of a measure that counts all queries.
    largest = sample.total.argmax(-1, keepdims=True)
    all_queries = np.take_along_axis(sample.total, largest, -1)
    n_texts = np.take_along_axis(sample.n_texts, largest, -1)
    return weight_of_unseen(unseen_share(n_texts, RARELY), divide(sample.total, all_queries))


def _unseen_range(names: Sequence[str], uniform: Floats) -> tuple[Floats, Floats]:
    """Return the least and the largest value that measures may have in unseen texts, (…, measure) each."""
    # Between 0 and the value of uniform attention, except for the measures below.
    lowest = np.fmin(uniform, 0.0)
    highest = np.fmax(uniform, 0.0)
    for column, name in enumerate(names):
        unsigned = name.removeprefix("signed_")
        if unsigned != name and unsigned in names:
            far = _MAX_DISTANCE_RATIO * uniform[..., names.index(unsigned)]
            lowest[..., column] = uniform[..., column] - far
            highest[..., column] = uniform[..., column] + far
        elif "distance" in name:
            highest[..., column] *= _MAX_DISTANCE_RATIO
        elif name.startswith("rarity"):
            highest[..., column] *= _MAX_RARITY_RATIO
        elif name.startswith("similar_token"):
            lowest[..., column] = -MAX_UNSEEN_SIMILARITY
            highest[..., column] = MAX_UNSEEN_SIMILARITY
    return lowest, highest


def divide(sums: Floats, counts: Floats, undefined: float = np.nan) -> Floats:
    """Return sums / counts; `undefined` where a count is 0."""
    ratio: Floats = np.divide(sums, counts, out=np.full(np.shape(sums), undefined), where=counts > 0)
    return ratio
