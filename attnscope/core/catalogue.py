"""The catalogue of head measures: the name, meaning and formula of each. Loads no torch.

A measure reads attention in one of three ways: by what keys are worth, by what pairs of a query and a key are worth, or
as a number of a row of weights. Its entry says which. The engine (`core.measures`) knows these three and no names. It
returns `Measured`. Roles and intervals are left to `studies.heads`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope import plugins

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Keys:
    """Sum over keys k of A_qk f(k).

    Attributes:
        fact: The name of f: a fact of `facts.key_facts`, or "outlying", a fact of the layer.
        is_set: Whether f is 1 on a set of keys and 0 elsewhere. A query that sees none of the set is then not counted.
    """

    fact: str
    is_set: bool = True


@dataclass(frozen=True)
class Pairs:
    """Sum over keys k of A_qk f(q, k), for queries and keys of one text.

    Attributes:
        fact: The name of f: a fact of `facts.PAIR_FACTS`, or "offset": 1 at `offsets` and 0 elsewhere.
        is_set: Whether f is 1 on a set of keys and 0 elsewhere, as in `Keys`.
        offsets: Key minus query in tokens.
        beyond_uniform: Whether the value of uniform attention of the same mass is subtracted.
    """

    fact: str
    is_set: bool = False
    offsets: tuple[int, ...] = ()
    beyond_uniform: bool = False


@dataclass(frozen=True)
class Row:
    """Hold the name of a number of a row of weights.

    Attributes:
        statistic: "entropy", "relative_entropy", or "rarest": the share of the largest weight on the rarest keys.
    """

    statistic: str


@dataclass(frozen=True)
class Measure:
    """One head measure: of texts, pictures or recordings.

    Attributes:
        name: Its name in results and records; the unit is part of it where it has one.
        what: The meaning of a large value, in one line.
        formula: The sum for one query q, in terms of weights A, keys k and tokens x; and its divisor, if that is no
            count of queries.
        source: The publication that the definition is from, or "ours".
        family: The part of the weights that it reads, and by which fact; None if the engine does not add it up.
        has_active: Whether there is also `<name>_active`: of the attention outside sinks alone, divided by its mass.
        unit: Of the value: "share" of attention or of queries, "nats", "tokens" ...
        low: Smallest possible value.
        high: Largest possible value.
    """

    name: str
    what: str
    formula: str
    source: str
    family: Keys | Pairs | Row | None = None
    has_active: bool = False
    unit: str = "share"
    low: float = 0.0
    high: float = 1.0

    def describe(self) -> dict[str, Any]:
        """Return its entry in a record: the meaning of a large value, the unit, and the range, None = no bound."""
        ends: list[float | None] = []
        for end in (self.low, self.high):
            ends.append(end if math.isfinite(end) else None)
        return {"what": self.what, "unit": self.unit, "range": ends}


WINDOW = 3
"""Tokens before and after the query that `window` takes in."""

OUTLYING = 3.0
"""A token is outlying in a layer if its hidden state is more than this many times the median length of its text."""

UNIT_QUERIES = 512
"""Queries of one unit of evidence. Most encoders take as many at once, so a text counts alike whatever the model. A
longer text is a batch of its own (`corpus.TOKEN_BUDGET`), so units do not depend on batches."""

MOST_UNITS = 64
"""Most units of one text: with so many, Student's t is the normal distribution, and memory by unit stays linear in the
text's length."""


def unit_queries(n_queries: int) -> int:
    """Return how many queries of a text are a unit of evidence: about UNIT_QUERIES, or a MOST_UNITS-th of the text.

    Blocks of one text are equally long, up to rounding: a short one at its end would weigh as much as a text.

    Queries far apart in a text depend on each other little. Long enough blocks of them are nearly independent, while
    the queries of one block are not (the block bootstrap: Künsch 1989; Politis & Romano 1994, JASA 89).
    """
    # Round up, so that no short block is left over.
    units = min(MOST_UNITS, round(n_queries / UNIT_QUERIES))
    return -(-n_queries // units) if units > 1 else max(UNIT_QUERIES, n_queries)


_CLARK = "Clark et al. 2019, section 3"
_NEAR = tuple(range(-WINDOW, WINDOW + 1))

_TEXT_MEASURES = (
    Measure(
        "resting",
        "attends to sinks: special tokens or the first one",
        "sum of A_qk over k special or first",
        "ours; " + _CLARK,
        Keys("resting", is_set=False),
    ),
    Measure(
        "entropy_nats",
        "spreads over many keys",
        "- sum over k of A_qk ln A_qk",
        _CLARK + ".3",
        Row("entropy"),
        unit="nats",
        high=math.inf,
    ),
    Measure(
        "relative_entropy",
        "spreads evenly over the keys that the mask allows",
        "entropy_nats_q / ln n_q, n_q >= 2 keys allowed",
        "ours",
        Row("relative_entropy"),
    ),
    Measure(
        "previous_token",
        "attends to the token before",
        "A[q, q-1]",
        _CLARK + ".1",
        Pairs("offset", True, (-1,)),
        has_active=True,
    ),
    Measure(
        "self_token",
        "attends to the token itself",
        "A[q, q]",
        _CLARK + ".1",
        Pairs("offset", True, (0,)),
        has_active=True,
    ),
    Measure(
        "next_token",
        "attends to the token after",
        "A[q, q+1]",
        _CLARK + ".1",
        Pairs("offset", True, (1,)),
        has_active=True,
    ),
    Measure(
        "window",
        "attends within three tokens",
        "sum of A_qk over |q - k| <= 3",
        "ours",
        Pairs("offset", True, _NEAR),
        has_active=True,
    ),
    Measure(
        "distance_tokens",
        "attends far away",
        "sum over k of A_qk |k - q|",
        "Vig and Belinkov 2019, section 4.2",
        Pairs("distance"),
        has_active=True,
        unit="tokens",
        high=math.inf,
    ),
    Measure(
        "signed_distance_tokens",
        "attends ahead (positive) or back (negative)",
        "sum over k of A_qk (k - q)",
        "ours",
        Pairs("signed_distance"),
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
        Keys("first"),
    ),
    Measure(
        "outlier_token",
        "attends to tokens of outlying norm, special ones and the first apart: second sinks",
        "sum of A_qk over k with |h_k| > 3 medians of the text's, h_k the hidden state that the layer reads",
        "ours; Sun et al. 2024, section 2",
        Keys("outlying"),
        has_active=True,
    ),
    Measure("cls", "attends to [CLS]", "sum of A_qk over k = [CLS]", _CLARK + ".2", Keys("cls")),
    Measure("sep", "attends to [SEP]", "sum of A_qk over k = [SEP]", _CLARK + ".2", Keys("sep")),
    Measure(
        "special",
        "attends to special tokens",
        "sum of A_qk over k special",
        "Kovaleva et al. 2019, section 4.1",
        Keys("special"),
    ),
    Measure(
        "punctuation",
        "attends to punctuation",
        "sum of A_qk over k punctuation",
        _CLARK + ".2",
        Keys("punctuation"),
        has_active=True,
    ),
    Measure(
        "same_token",
        "attends to the same token elsewhere in the text",
        "sum of A_qk over k != q with x_k = x_q",
        "ours",
        Pairs("same_token", is_set=True),
        has_active=True,
    ),
    Measure(
        "induction",
        "attends to what followed the same token before",
        "sum of A[q, j+1] over j < q with x_j = x_q, j+1 != q",
        "Olsson et al. 2022, section 2",
        Pairs("induction", is_set=True),
        has_active=True,
    ),
    Measure(
        "similar_token",
        "attends to tokens of similar static embedding, more than uniform attention does",
        "sum over k of A_qk (cos(e_q, e_k) - m_q), m_q the mean of cos(e_q, e_j) over the n_q keys j",
        "ours",
        Pairs("cosine", beyond_uniform=True),
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
        Row("rarest"),
    ),
    Measure(
        "rarity",
        "attends to rare tokens",
        "- sum over k of A_qk ln frequency(x_k)",
        "ours",
        Keys("rarity", is_set=False),
        has_active=True,
        unit="nats",
        high=math.inf,
    ),
)

MEASURES: dict[str, Measure] = {
    measure.name: measure for measure in (*_TEXT_MEASURES, *plugins.measures())
}
"""The measures of texts by name, then those that plugins add."""

_DOSOVITSKIY = "Dosovitskiy et al. 2021, appendix D.7 (there in pixels)"

_PICTURE_MEASURES = (
    Measure(
        "distance_patches",
        "attends far away in the picture",
        "sum of A_qk times the Euclidean distance of patches q and k, a patch being 1 / sum of a_q",
        _DOSOVITSKIY,
        Pairs("grid_distance"),
        has_active=True,
        unit="patches",
        high=math.inf,
    ),
    Measure(
        "near_patches",
        "attends to the up to 8 patches around, without itself",
        "sum of A_qk over k != q at most 1 row and 1 column away / sum of a_q",
        "ours",
        Pairs("grid_neighbour"),
        has_active=True,
    ),
    Measure(
        "self_patch",
        "attends to the patch itself",
        "sum of A_qq / sum of a_q",
        "ours",
        Pairs("offset", offsets=(0,)),
        has_active=True,
    ),
    Measure(
        "entropy_nats",
        "spreads over many keys",
        "- sum over all k of A_qk ln A_qk / patches",
        _CLARK + ".3",
        Row("entropy"),
        unit="nats",
        high=math.inf,
    ),
    Measure(
        "resting",
        "rests on tokens that are no patch",
        "sum of A_qk over k that are no patch / patches",
        "ours",
        Keys("special", is_set=False),
    ),
)

PICTURE_MEASURES: dict[str, Measure] = {measure.name: measure for measure in _PICTURE_MEASURES}
"""The measures of pictures by name. q runs over the patches, and a_q is the sum of A_qk over patches k. A measure that
`has_active` is shown by its `_active` sum."""

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
"""The measures of recordings by name. t_q = sum of A_qk (k + 1/2) s / a_q over frames k with sound, of s seconds
each."""


def measure_names(catalogue: Mapping[str, Measure] = MEASURES) -> tuple[str, ...]:
    """Return the names of all sums: the measures in the catalogue's order, `…_active` after each that has one."""
    names: list[str] = []
    for name, measure in catalogue.items():
        names.append(name)
        if measure.has_active:
            names.append(f"{name}_active")
    return tuple(names)


class Columns:
    """The columns of a catalogue's measures: first measures of keys, then of pairs, then of rows.

    Sums have a leading axis of two views: of all keys, and of those outside sinks.

    Attributes:
        families: The measure of each column.
        keys: The measures of keys.
        pairs: The measures of pairs.
        rows: The statistics of the measures of rows.
        is_set: Whether each measure of keys, then of pairs, is of a set.
        is_beyond: Whether each measure of pairs subtracts uniform attention.
        facts: The facts of pairs.
        offsets: Key minus query, in tokens, of the measures of offsets.
        pair_map: Which parts of a row each measure of pairs adds up, (part, pair), 0 or 1. The parts are the mass, a
            sum for each of the facts, and the weight at each of the offsets.
        names: The sums that results have, in order.
        views: The view of each of these sums: 0 = all keys, 1 = those outside sinks.
        numbers: The column of each of these sums.
    """

    def __init__(self, catalogue: Mapping[str, Measure]) -> None:
        # Columns are ordered by family: keys, then pairs, then rows.
        names: list[str] = []
        for family in (Keys, Pairs, Row):
            names += [name for name, measure in catalogue.items() if isinstance(measure.family, family)]
        self.families = [catalogue[name].family for name in names]
        self.keys = [family for family in self.families if isinstance(family, Keys)]
        self.pairs = [family for family in self.families if isinstance(family, Pairs)]
        self.rows = [family.statistic for family in self.families if isinstance(family, Row)]
        # Whether each is a set, and the facts and offsets that pairs need.
        sums: list[Keys | Pairs] = [*self.keys, *self.pairs]
        self.is_set = [family.is_set for family in sums]
        self.is_beyond = [family.beyond_uniform for family in self.pairs]
        self.facts = [family.fact for family in self.pairs if not family.offsets]
        self.offsets = sorted(set().union(*(family.offsets for family in self.pairs)))
        # Where each result stands: its view (all keys, or those outside sinks) and its column.
        self.names = measure_names(catalogue)
        self.views = [int(name.endswith("_active")) for name in self.names]
        self.numbers = [names.index(name.removesuffix("_active")) for name in self.names]
        # Which parts of a row each measure of pairs adds up, (part, pair).
        self.pair_map = []
        for part in ("mass", *self.facts, *self.offsets):
            uses_part = [part in family.offsets or part == family.fact for family in self.pairs]
            self.pair_map.append(list(map(int, uses_part)))


@dataclass(frozen=True, eq=False)
class Measured:
    """The measures of one layer on one batch, as sums and counts.

    A unit is a text; or, if texts are long (`catalogue.unit_queries`), a block of a text's queries. All units of the
    first text come before those of the second, and each text has as many.

    Attributes:
        sum: (measure, unit, head), in the order of `names`.
        count: (measure, unit, head): a value is sum / count, pooled over texts by adding both first. Undefined where 0.
        uniform_sum: The sums under uniform attention over the keys that the mask allows, with the same count. In
            `…_active` each query weighs as it does in the head, by the head's mass on keys outside the sinks: a head
            that spreads evenly over them has just this, however much it rests.
        names: The sums that there are: `catalogue.measure_names`.
    """

    sum: Sums
    count: Sums
    uniform_sum: Sums
    names: tuple[str, ...]

    def value(self, name: str) -> Sums:
        """Return a measure's value pooled over the batch, sum / count, (head,); NaN where nothing was counted."""
        number = self.names.index(name)
        total = self.sum[number].sum(0)
        count = self.count[number].sum(0)
        ratio: Sums = np.full_like(total, np.nan)
        np.divide(total, count, out=ratio, where=count != 0)
        return ratio

    def uniform(self, name: str) -> Sums:
        """Return the value under uniform attention, (head,); NaN where nothing was counted."""
        return replace(self, sum=self.uniform_sum).value(name)
