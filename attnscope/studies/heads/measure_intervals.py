"""Choose and compute the 95% confidence intervals of measures of heads, for `studies.heads.roles`.

A measure is a ratio of sums over texts, sum / count. It comes in two forms, such as `window` and `window_active`:

- *whole*: of all attention;
- *active*: of the attention outside sinks alone. A sink is a key that a head attends to when it has nothing to do.

`core.intervals` has the methods. They allow for *unseen texts*: texts of a kind that the sample lacks. This module says
which method each measure takes, and which values the measure may have in unseen texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnscope.arrays import Flags, Floats, divide
from attnscope.core.catalogue import MEASURES, PairMeasure
from attnscope.core.intervals import (
    DEPENDENCE,
    TAIL_PROBABILITY,
    UNSEEN_TAIL_PROBABILITY,
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

MIN_ACTIVE_SHARE = 0.1
"""The least share of attention outside sinks at which an `_active` measure has an interval, and may give a role.

The share is of the attention of the queries that the measure counts, as a head may be active for few queries. For
example, an induction head attends to sinks wherever there is nothing to repeat: over all queries, 95% and more.
"""

NON_SHARE_MEASURES = tuple(
    name for name, measure in MEASURES.items() if measure.low < 0 or measure.high > 1
)
"""Measures that may be below 0 or above 1, such as distances. All others are treated as shares."""

_HIT_MEASURES = ("rarest_token",)
"""Shares of queries: each query adds 1 or 0. All other shares are of attention: a query adds any number from 0 to 1."""

_MEAN_MEASURES = ("relative_entropy",)
"""Means of numbers from 0 to 1 that are no shares of queries or of attention."""

_TEXT_LEVEL_MEASURES = ("resting", "punctuation", "distance_tokens", "signed_distance_tokens")
"""Measures that differ more between texts than within them, so that their intervals count texts as the units.

- `resting`, the attention to sinks, depends on what else a text offers the head.
- Distances depend on the length of the text.
- `punctuation`: if a decoder's head has its sink on the first token, and a text begins with a punctuation mark, all of
  its queries attend to punctuation. Few texts begin so.

With the `DEPENDENCE` of other measures, the coverage of 95% intervals would be too low: at worst 85% for `resting` and
82% for distances with ten texts, and 68% for `punctuation` with 40 texts."""

_SOME_QUERY_MEASURES = tuple(
    name
    for name, measure in MEASURES.items()
    if isinstance(measure.family, PairMeasure)
    and measure.family.is_indicator
    and not measure.family.offsets
)
"""Measures of attention to a set of keys that depends on the query, such as earlier copies of the query's token. Only
queries with at least one key in their set count.

In web text, an eighth of the queries have an earlier copy. In texts such as "______" and "dancing!!!!!!!", all have.
One text like these weighs as much as eight others, and its value is often near 1."""

_MAX_DISTANCE_RATIO = 4.5
"""The largest distance in unseen texts, in multiples of the mean distance of uniform attention.

In a text of mean length, the farthest token is at three times the mean distance if heads attend to both sides, and at
twice the mean distance if they only attend back. Some texts are longer than the mean, so the multiple is larger."""

_MAX_RARITY_RATIO = 1.25
"""The largest rarity of the attended tokens in unseen texts, in multiples of the rarity under uniform attention. The
largest multiple of 270 heads in 258 sentences is 1.27."""

MAX_UNSEEN_SIMILARITY = 0.75
"""The largest similarity of query and key in unseen texts; the least is the negative of it. Of the similarities of 72
heads in 300 texts, 99.9% are below it."""


class MeasureKinds(NamedTuple):
    """Hold what kind of number each measure is, in arrays (measure,).

    Attributes:
        are_shares: Whether each measure is from 0 to 1. This includes the hits and means below.
        are_hits: Whether it is a share of queries, see `_HIT_MEASURES`.
        are_means: Whether it is a mean, see `_MEAN_MEASURES`.
        are_of_some_queries: Whether it counts only some queries, see `_SOME_QUERY_MEASURES`.
        dependence: How much the queries of a text depend on each other, from 0 to 1: the intraclass correlation. 1 = a
            text is one unit, however many queries it has.
    """

    are_shares: Flags
    are_hits: Flags
    are_means: Flags
    are_of_some_queries: Flags
    dependence: Floats


def measure_intervals(
    sums: RunningSums,
    names: Sequence[str],
    units: Floats | float,
    uniform: Floats,
) -> tuple[Floats, Floats]:
    """Return the 95% intervals of measures.

    The intervals of shares come from `core.intervals.share_interval`, those of other measures from Student's t. Then
    both are widened for unseen texts:

    - A measure of `_SOME_QUERY_MEASURES` may count all queries of an unseen text, and be 1 there. (It may also be 0
      there, but rarely is, so the low end needs no allowance.)
    - Means, and measures that are no shares, may have any value in the range of `_unseen_range`.
    - If a head has less than MIN_ACTIVE_SHARE of its attention outside sinks, a few texts have all that an `_active`
      measure counts, and the sample may lack these texts. Then a share may be 0 or 1 in unseen texts, and other
      measures have no interval.

    Args:
        sums: The sums of the measures, (…, measure).
        names: The names of the measures.
        units: The number of queries that a count of 1 stands for.
        uniform: The values of uniform attention, (…, measure).

    Returns:
        The low and the high ends, (…, measure); NaN where there is no interval.
    """
    sample = sums.sample()
    kinds = classify_measures(names)

    # Intervals from the texts of the sample, (…, measure). `unseen` = the interval of a share also allows for queries
    # of a kind that the sample lacks.
    low, high = mean_interval(sample)
    low_of_shares, high_of_shares = share_interval(
        sample, hits=kinds.are_hits, unseen=~kinds.are_means, dependence=kinds.dependence, units=units
    )
    low = np.where(kinds.are_shares, low_of_shares, low)
    high = np.where(kinds.are_shares, high_of_shares, high)

    # Widen the intervals of shares. Unseen texts with the value 0 may hold the share `weight_at_0` of the count, and
    # unseen texts with the value 1 the share `weight_at_1`, (…, measure) each.
    unseen_weight, active_share = _unseen_weights(sample, names, units, kinds)
    is_active = active_share >= MIN_ACTIVE_SHARE
    weight_at_0 = np.where(is_active, 0.0, unseen_weight)
    weight_of_full = np.fmax(weight_at_0, _weight_of_full_texts(sample))
    weight_at_1 = np.where(kinds.are_of_some_queries, weight_of_full, weight_at_0)
    share_ends = np.stack(allow_share_for_unseen(sample.ratio, low, high, weight_at_0, weight_at_1))

    # Widen those of other measures by the range of their values in unseen texts. Both ends: (end, …, measure).
    lowest, highest = _unseen_range(names, uniform)
    other_ends = np.stack(allow_for_unseen(sample.ratio, low, high, unseen_weight, lowest, highest))
    other_ends = np.where(is_active, other_ends, np.nan)
    other_ends = np.where(kinds.are_means, np.clip(other_ends, 0, 1), other_ends)
    low, high = np.where(kinds.are_shares & ~kinds.are_means, share_ends, other_ends)
    return low, high


def classify_measures(names: Sequence[str]) -> MeasureKinds:
    """Return what kind of number each measure is, whole or `_active`."""
    # Hits and means have no `_active` form, so full names are enough for them.
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
    """Return the weight of unseen texts in each measure, and the active share, (…, measure) each.

    The weight is the share of the measure's count that unseen texts may hold. The active share is the share of
    attention outside sinks: the count of an `_active` measure divided by the count of its whole measure. It is 1 for
    whole measures.

    The worst case is an unseen text with all of its attention outside sinks. If the head attends mostly to sinks in
    other texts, the unseen text weighs more than they do in `_active` measures.
    """
    unseen_texts = unseen_share(independent_units(sample, kinds.dependence, units), TAIL_PROBABILITY)
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
    # A measure that counts all queries has the largest count. `sample.total` has the counts, (…, measure).
    column = sample.total.argmax(-1, keepdims=True)
    n_queries = np.take_along_axis(sample.total, column, -1)
    n_texts = np.take_along_axis(sample.n_texts, column, -1)
    return weight_of_unseen(
        unseen_share(n_texts, UNSEEN_TAIL_PROBABILITY), divide(sample.total, n_queries)
    )


def _unseen_range(names: Sequence[str], uniform: Floats) -> tuple[Floats, Floats]:
    """Return the least and the largest value that measures may have in unseen texts, (…, measure) each."""
    # Values are between 0 and the value of uniform attention, except for the measures in the loop.
    lowest = np.fmin(uniform, 0.0)
    highest = np.fmax(uniform, 0.0)
    for column, name in enumerate(names):
        unsigned_name = name.removeprefix("signed_")
        if unsigned_name != name and unsigned_name in names:
            # A signed distance, such as "signed_distance_tokens", may be as far to either side as the unsigned one.
            max_distance = _MAX_DISTANCE_RATIO * uniform[..., names.index(unsigned_name)]
            lowest[..., column] = uniform[..., column] - max_distance
            highest[..., column] = uniform[..., column] + max_distance
        elif "distance" in name:
            highest[..., column] *= _MAX_DISTANCE_RATIO
        elif name.startswith("rarity"):
            highest[..., column] *= _MAX_RARITY_RATIO
        elif name.startswith("similar_token"):
            lowest[..., column] = -MAX_UNSEEN_SIMILARITY
            highest[..., column] = MAX_UNSEEN_SIMILARITY
    return lowest, highest
