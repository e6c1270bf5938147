"""Declare the head measures: the name, meaning and formula of each. Loads no torch.

Every measure is a mean over queries q, of one of three numbers of the row A_q of weights, and its entry says which:

    Keys     sum over k of A_qk f(k),     such as the attention to punctuation
    Pairs    sum over k of A_qk f(q, k),  such as the attention to the token before
    Row      another statistic of A_q,    such as its entropy

So `core.masked_texts` and `core.measures`, which compute them, need to know these three families and no single measure.
They return `MeasureSums`. Roles and intervals are left to `studies.heads`. *Sinks* are the keys on which heads rest
when they have nothing to do: special tokens and a text's first token. *Active* attention is that on all other keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope import plugins

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class KeyMeasure:
    """Define a measure as a sum over keys k of A_qk f(k).

    Attributes:
        fact: The name of f: one of `facts.key_facts`, or "outlying", which differs from layer to layer (`OUTLYING`).
        is_set: Whether f is 1 on a set of keys and 0 elsewhere. Queries that may attend to none of the set are then not
            counted.
    """

    fact: str
    is_set: bool = True


@dataclass(frozen=True)
class PairMeasure:
    """Define a measure as a sum over keys k of A_qk f(q, k), for queries and keys of one text.

    Attributes:
        fact: The name of f: one of `facts.PAIR_FACTS`, or "offset", which is 1 at `offsets` and 0 elsewhere.
        is_set: Whether f is 1 on a set of keys and 0 elsewhere, as in `KeyMeasure`.
        offsets: Distances k - q in tokens; empty for other facts.
        beyond_uniform: Whether the value is subtracted that the same sum of weights would have if it were spread
            evenly over the keys.
    """

    fact: str
    is_set: bool = False
    offsets: tuple[int, ...] = ()
    beyond_uniform: bool = False


@dataclass(frozen=True)
class RowMeasure:
    """Define a measure as another statistic of a row of weights.

    Attributes:
        statistic: "entropy", "relative_entropy", or "rarest": whether the largest weight is on the text's rarest token.
    """

    statistic: str


@dataclass(frozen=True)
class Measure:
    """Describe one head measure: of texts, pictures or recordings.

    Attributes:
        name: Its name in results and records; the unit is part of it where it has one.
        what: The meaning of a large value, in one line.
        formula: Its value for one query q, in terms of weights A, keys k and tokens x; and the divisor, if that is not
            the number of queries.
        source: The publication that the definition is from, or "ours".
        family: How it is computed from the weights; None if `core.measures` does not compute it.
        has_active: Whether there is also `<name>_active`: the same of the active attention alone, divided by the sum
            of these weights.
        unit: The unit of the value: "share" of attention or of queries, "nats", "tokens" ...
        low: Smallest possible value.
        high: Largest possible value.
    """

    name: str
    what: str
    formula: str
    source: str
    family: KeyMeasure | PairMeasure | RowMeasure | None = None
    has_active: bool = False
    unit: str = "share"
    low: float = 0.0
    high: float = 1.0


WINDOW = 3
"""How many tokens before and after the query the measure `window` includes."""

OUTLYING = 3.0
"""A token is outlying in a layer if the norm of its hidden state is more than so many medians of its text's norms."""

UNIT_QUERIES = 512
"""About how many queries make one unit of evidence: the piece of text that counts as independent in intervals. Most
encoders take as many at once, so a text counts alike whatever the model. Longer texts are never batched with others
(`corpus.TOKEN_BUDGET`), so units do not depend on batches."""

MAX_UNITS = 64
"""The most units of one text. With so many, Student's t hardly differs from the normal distribution; and memory, which
grows with units, stays linear in the text's length."""


def unit_queries(n_queries: int) -> int:
    """Return how many queries of a text make one unit: about UNIT_QUERIES, in a very long text a MOST_UNITS-th of it.

    All units of a text are equally long, up to rounding, because each counts as much as a short text.

    Blocks of queries are units, because queries near each other depend on each other, while long blocks are nearly
    independent (the block bootstrap: Künsch 1989; Politis & Romano 1994, JASA 89).
    """
    n_units = min(MAX_UNITS, round(n_queries / UNIT_QUERIES))
    # Round up, so that no short unit is left over.
    return -(-n_queries // n_units) if n_units > 1 else max(UNIT_QUERIES, n_queries)


_CLARK = "Clark et al. 2019, section 3"
_NEAR = tuple(range(-WINDOW, WINDOW + 1))

_TEXT_MEASURES = (
    Measure(
        "resting",
        "attends to sinks: special tokens or the first one",
        "sum of A_qk over k special or first",
        "ours; " + _CLARK,
        KeyMeasure("resting", is_set=False),
    ),
    Measure(
        "entropy_nats",
        "spreads over many keys",
        "- sum over k of A_qk ln A_qk",
        _CLARK + ".3",
        RowMeasure("entropy"),
        unit="nats",
        high=math.inf,
    ),
    Measure(
        "relative_entropy",
        "spreads evenly over the keys that the mask allows",
        "entropy_nats_q / ln n_q, n_q >= 2 keys allowed",
        "ours",
        RowMeasure("relative_entropy"),
    ),
    Measure(
        "previous_token",
        "attends to the token before",
        "A[q, q-1]",
        _CLARK + ".1",
        PairMeasure("offset", True, (-1,)),
        has_active=True,
    ),
    Measure(
        "self_token",
        "attends to the token itself",
        "A[q, q]",
        _CLARK + ".1",
        PairMeasure("offset", True, (0,)),
        has_active=True,
    ),
    Measure(
        "next_token",
        "attends to the token after",
        "A[q, q+1]",
        _CLARK + ".1",
        PairMeasure("offset", True, (1,)),
        has_active=True,
    ),
    Measure(
        "window",
        "attends within three tokens",
        "sum of A_qk over |q - k| <= 3",
        "ours",
        PairMeasure("offset", True, _NEAR),
        has_active=True,
    ),
    Measure(
        "distance_tokens",
        "attends far away",
        "sum over k of A_qk |k - q|",
        "Vig and Belinkov 2019, section 4.2",
        PairMeasure("distance"),
        has_active=True,
        unit="tokens",
        high=math.inf,
    ),
    Measure(
        "signed_distance_tokens",
        "attends ahead (positive) or back (negative)",
        "sum over k of A_qk (k - q)",
        "ours",
        PairMeasure("signed_distance"),
        has_active=True,
        unit="tokens",
        low=-math.inf,
        high=math.inf,
    ),
    Measure(
        "first_token",
        "attends to the text's first token",
        "A[q, first]",
        "Xiao et al. 2024, section 3.1",
        KeyMeasure("first"),
    ),
    Measure(
        "outlier_token",
        "attends to tokens of outlying norm, special ones and the first apart: second sinks",
        "sum of A_qk over k with |h_k| > 3 medians of the text's, h_k the hidden state that the layer reads",
        "ours; Sun et al. 2024, section 2",
        KeyMeasure("outlying"),
        has_active=True,
    ),
    Measure("cls", "attends to [CLS]", "sum of A_qk over k = [CLS]", _CLARK + ".2", KeyMeasure("cls")),
    Measure("sep", "attends to [SEP]", "sum of A_qk over k = [SEP]", _CLARK + ".2", KeyMeasure("sep")),
    Measure(
        "special",
        "attends to special tokens",
        "sum of A_qk over k special",
        "Kovaleva et al. 2019, section 4.1",
        KeyMeasure("special"),
    ),
    Measure(
        "punctuation",
        "attends to punctuation",
        "sum of A_qk over k punctuation",
        _CLARK + ".2",
        KeyMeasure("punctuation"),
        has_active=True,
    ),
    Measure(
        "same_token",
        "attends to the same token elsewhere in the text",
        "sum of A_qk over k != q with x_k = x_q",
        "ours",
        PairMeasure("same_token", is_set=True),
        has_active=True,
    ),
    Measure(
        "induction",
        "attends to what followed the same token before",
        "sum of A[q, j+1] over j < q with x_j = x_q, j+1 != q",
        "Olsson et al. 2022, section 2",
        PairMeasure("induction", is_set=True),
        has_active=True,
    ),
    Measure(
        "similar_token",
        "attends to tokens of similar static embedding, more than uniform attention does",
        "sum over k of A_qk (cos(e_q, e_k) - m_q), m_q the mean of cos(e_q, e_j) over the n_q keys j",
        "ours",
        PairMeasure("cosine", beyond_uniform=True),
        has_active=True,
        unit="cosine",
        low=-2,
        high=2,
    ),
    Measure(
        "rarest_token",
        "has its largest weight on the text's rarest token",
        "1/r if one of the r rarest keys (but the first) has the largest A_qk (1/(r t) if t share it)",
        "Voita et al. 2019, rare words",
        RowMeasure("rarest"),
    ),
    Measure(
        "rarity",
        "attends to rare tokens",
        "- sum over k of A_qk ln frequency(x_k)",
        "ours",
        KeyMeasure("rarity", is_set=False),
        has_active=True,
        unit="nats",
        high=math.inf,
    ),
)

MEASURES: dict[str, Measure] = {
    measure.name: measure for measure in (*_TEXT_MEASURES, *plugins.load_measures())
}
"""The measures of texts by name: these, then those that plugins add."""

_DOSOVITSKIY = "Dosovitskiy et al. 2021, appendix D.7 (there in pixels)"

_PICTURE_MEASURES = (
    Measure(
        "distance_patches",
        "attends far away in the picture",
        "sum of A_qk times the Euclidean distance of patches q and k, a patch being 1 / sum of a_q",
        _DOSOVITSKIY,
        PairMeasure("grid_distance"),
        has_active=True,
        unit="patches",
        high=math.inf,
    ),
    Measure(
        "near_patches",
        "attends to the up to 8 patches around, without itself",
        "sum of A_qk over k != q at most 1 row and 1 column away / sum of a_q",
        "ours",
        PairMeasure("grid_neighbour"),
        has_active=True,
    ),
    Measure(
        "self_patch",
        "attends to the patch itself",
        "sum of A_qq / sum of a_q",
        "ours",
        PairMeasure("offset", offsets=(0,)),
        has_active=True,
    ),
    Measure(
        "entropy_nats",
        "spreads over many keys",
        "- sum over all k of A_qk ln A_qk / patches",
        _CLARK + ".3",
        RowMeasure("entropy"),
        unit="nats",
        high=math.inf,
    ),
    Measure(
        "resting",
        "rests on tokens that are no patch",
        "sum of A_qk over k that are no patch / patches",
        "ours",
        KeyMeasure("special", is_set=False),
    ),
)

PICTURE_MEASURES: dict[str, Measure] = {measure.name: measure for measure in _PICTURE_MEASURES}
"""The measures of pictures by name. q runs over the patches, and a_q is the sum of A_qk over patches k: the active
attention. Of a measure that `has_active`, only the `_active` value is shown."""

_SOUND_MEASURES = (
    Measure(
        "monotonicity",
        "listens further on from token to token",
        "Kendall's tau of the tokens' order and their times t_q: mean of sign(t_r - t_q) over pairs q < r of a "
        "recording; mean over recordings",
        "ours; tau: Kendall 1938, Biometrika 30",
        unit="rank correlation",
        low=-1,
    ),
    Measure(
        "sound",
        "attends to sound, not to the silence behind it",
        "sum of a_q / tokens, a_q = sum of A_qk over frames k with sound",
        "ours",
    ),
)

SOUND_MEASURES: dict[str, Measure] = {measure.name: measure for measure in _SOUND_MEASURES}
"""The measures of recordings by name. t_q = sum of A_qk (k + 1/2) s / a_q is the time that token q listens to, over
frames k with sound, of s seconds each."""


def measure_names(catalogue: Mapping[str, Measure] = MEASURES) -> tuple[str, ...]:
    """Return the names of all values: the measures in the catalogue's order, `…_active` after each that has one."""
    names: list[str] = []
    for name, measure in catalogue.items():
        names.append(name)
        if measure.has_active:
            names.append(f"{name}_active")
    return tuple(names)


class MeasureColumns:
    """Lay out a catalogue's measures as the columns of arrays: those of keys, then those of pairs, then those of rows.

    The arrays have a first axis of two views, for all attention and for the active attention alone. A value such as
    `window_active` is found by its column (that of `window`) and its view (1).

    Attributes:
        families: The family of each column: a KeyMeasure, PairMeasure or RowMeasure.
        keys: The columns of keys.
        pairs: The columns of pairs.
        rows: The statistics of the columns of rows.
        is_set: `is_set` of each column of keys, then of pairs.
        is_beyond: `beyond_uniform` of each column of pairs.
        facts: The facts that columns of pairs need, apart from offsets.
        offsets: The distances k - q, in tokens, that columns of pairs need, ascending.
        pair_map: Which sums over a row each column of pairs adds up, (part, pair), 0 or 1. The parts are the sum of
            the weights ("mass"), then that of weights times each of `facts`, then the weight at each of `offsets`.
        names: `measure_names`: the values of a result.
        view_of_sum: The view of each of these values: 0 = all attention, 1 = active attention.
        column_of_sum: The column of each of these values.
    """

    def __init__(self, catalogue: Mapping[str, Measure]) -> None:
        # Order the columns by family.
        names: list[str] = []
        for family in (KeyMeasure, PairMeasure, RowMeasure):
            names += [name for name, measure in catalogue.items() if isinstance(measure.family, family)]
        self.families = [catalogue[name].family for name in names]
        self.keys = [family for family in self.families if isinstance(family, KeyMeasure)]
        self.pairs = [family for family in self.families if isinstance(family, PairMeasure)]
        self.rows = [family.statistic for family in self.families if isinstance(family, RowMeasure)]
        # Collect what the engine asks of each column, and which facts and offsets it has to compute.
        self.is_set = [family.is_set for family in self.keys]
        self.is_set += [family.is_set for family in self.pairs]
        self.is_beyond = [family.beyond_uniform for family in self.pairs]
        # Several measures may read one fact, which is one part of the sums.
        self.facts = list(dict.fromkeys(family.fact for family in self.pairs if not family.offsets))
        self.offsets = sorted(set().union(*(family.offsets for family in self.pairs)))
        self.pair_map = []
        for part in ("mass", *self.facts, *self.offsets):
            self.pair_map.append([int(part in (family.fact, *family.offsets)) for family in self.pairs])
        # Find each value of a result: its view and its column.
        self.names = measure_names(catalogue)
        self.view_of_sum = [int(name.endswith("_active")) for name in self.names]
        self.column_of_sum = [names.index(name.removesuffix("_active")) for name in self.names]


@dataclass(frozen=True, eq=False)
class MeasureSums:
    """Hold the measures of one layer on one batch, as sums and counts for each unit.

    A unit is a text; or, if texts are long (`catalogue.unit_queries`), a block of a text's queries. All units of the
    first text come before those of the second, and each text has as many.

    Attributes:
        sum: (measure, unit, head), in the order of `names`: the sum of the measure over the queries that count.
        count: (measure, unit, head): how many queries count. In `…_active` each counts by its sum of active attention.
            A value is sum / count; over several units, both are added up first. Undefined where 0.
        uniform_sum: (measure, unit, head): the sum under uniform attention over the keys that the mask allows, for the
            same count. In `…_active` a query's active attention keeps its sum, and is spread evenly over the keys that
            are no sinks. So a head that does just this has the value of uniform attention, however much it rests.
        names: The measures: `catalogue.measure_names`.
    """

    sum: Sums
    count: Sums
    uniform_sum: Sums
    names: tuple[str, ...]

    def value(self, name: str) -> Sums:
        """Return a measure's value over the whole batch, sum / count, (head,); NaN where nothing was counted."""
        index = self.names.index(name)
        total = self.sum[index].sum(0)
        count = self.count[index].sum(0)
        ratio: Sums = np.full_like(total, np.nan)
        np.divide(total, count, out=ratio, where=count != 0)
        return ratio
