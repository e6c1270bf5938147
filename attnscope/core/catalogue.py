"""Declare the head measures: the name, meaning and formula of each. Loads no torch.

Every measure is a mean over queries q of a statistic of A_q, the row of weights of the query. There are three families
of statistics, and each entry of the catalogue belongs to one:

    KeyMeasure     sum over k of A_qk f(k),     such as the attention to punctuation
    PairMeasure    sum over k of A_qk f(q, k),  such as the attention to the token before
    RowMeasure     another statistic of A_q,    such as its entropy

`core.masked_texts` and `core.measures` compute the measures, and return `MeasureSums`. They know the three families,
but no single measure. Roles and intervals are left to `studies.heads`.

*Sinks* are the keys that take the attention of heads that find nothing to attend to: special tokens and a text's first
token. A head *rests* if it attends to sinks. *Active* attention is the attention to all other keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attnscope import plugins
from attnscope.arrays import Floats, divide


@dataclass(frozen=True)
class KeyMeasure:
    """Define a measure as a sum over keys k of A_qk f(k).

    Attributes:
        fact: The name of the function f: a key of what `facts.key_facts` returns, or "outlying", which is 1 for tokens
            of outlying norm and differs from layer to layer (`OUTLIER_NORM_RATIO`).
        is_indicator: Whether f is the indicator of a set of keys: 1 in the set, 0 elsewhere. If so, a query that may
            attend to no key of the set is not counted.
    """

    fact: str
    is_indicator: bool = True


@dataclass(frozen=True)
class PairMeasure:
    """Define a measure as a sum over keys k of A_qk f(q, k), for queries and keys of one text.

    Attributes:
        fact: The name of the function f: one of `facts.PAIR_FACTS`, or "offset", which is 1 for pairs with k - q in
            `offsets` and 0 for others.
        is_indicator: Whether f is 1 for some keys of a query and 0 for the others, as in `KeyMeasure`.
        offsets: Values of k - q in tokens, such as -1 for the token before. Empty unless `fact` is "offset".
        beyond_uniform: Whether to subtract the value of uniform attention with the same total weight.
    """

    fact: str
    is_indicator: bool = False
    offsets: tuple[int, ...] = ()
    beyond_uniform: bool = False


@dataclass(frozen=True)
class RowMeasure:
    """Define a measure as another statistic of a row of weights.

    Attributes:
        statistic: "entropy"; "relative_entropy"; or "rarest": 1 if the largest weight is on the text's rarest token.
    """

    statistic: str


@dataclass(frozen=True)
class Measure:
    """Describe one head measure of texts, pictures or recordings.

    Attributes:
        name: Its name in results and records, with the unit where it has one, such as `entropy_nats`.
        what: What a head with a large value does, in one line.
        formula: The value for one query q, in terms of weights A, keys k and tokens x. A divisor is given unless it is
            the number of queries.
        source: The publication that the definition is from, or "ours".
        family: How `core.measures` computes it from the weights; None for measures of recordings, which `studies`
            computes.
        has_active: Whether there is also a measure `<name>_active`: the same sum over active attention only, divided by
            the total active attention.
        unit: The unit of the value, such as "nats" or "tokens"; "share" = a share of attention or of queries.
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

OUTLIER_NORM_RATIO = 3.0
"""A token is outlying in a layer if the norm of its hidden state is more than this many times the median norm of its
text."""

QUERIES_PER_UNIT = 512
"""About how many queries make one *unit* of evidence: a piece of text that intervals count as independent of others.

Most encoders take at most 512 tokens at once, so a text gives about the same number of units in every model. Longer
texts are never batched with others (`corpus.TOKEN_BUDGET`), so units do not depend on batches."""

MAX_UNITS = 64
"""The most units of one text. With more, Student's t would hardly come closer to the normal distribution. And memory
grows with units, so the limit keeps it linear in the text's length."""


def queries_per_unit(n_queries: int) -> int:
    """Return how many queries of a text make one unit: about QUERIES_PER_UNIT, but more if MAX_UNITS would be exceeded.

    All units of a text have the same length, up to rounding, because each counts as much as a short text.

    A unit is a block of consecutive queries. Neighbouring queries depend on each other, but long blocks are nearly
    independent (the block bootstrap: Künsch 1989; Politis & Romano 1994, JASA 89).
    """
    n_units = min(MAX_UNITS, round(n_queries / QUERIES_PER_UNIT))
    # Round up, so that no short unit is left over. A text of one unit may be shorter than the number returned.
    return -(-n_queries // n_units) if n_units > 1 else max(QUERIES_PER_UNIT, n_queries)


_CLARK = "Clark et al. 2019, section 3"
_NEAR = tuple(range(-WINDOW, WINDOW + 1))

_TEXT_MEASURES = (
    Measure(
        "resting",
        "attends to sinks: special tokens or the first one",
        "sum of A_qk over k special or first",
        "ours; " + _CLARK,
        KeyMeasure("resting", is_indicator=False),
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
        PairMeasure("same_token", is_indicator=True),
        has_active=True,
    ),
    Measure(
        "induction",
        "attends to what followed the same token before",
        "sum of A[q, j+1] over j < q with x_j = x_q, j+1 != q",
        "Olsson et al. 2022, section 2",
        PairMeasure("induction", is_indicator=True),
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
        KeyMeasure("rarity", is_indicator=False),
        has_active=True,
        unit="nats",
        high=math.inf,
    ),
)

MEASURES: dict[str, Measure] = {
    measure.name: measure for measure in (*_TEXT_MEASURES, *plugins.load_measures())
}
"""The measures of texts by name: those above, then those that plugins add."""

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
        KeyMeasure("special", is_indicator=False),
    ),
)

PICTURE_MEASURES: dict[str, Measure] = {measure.name: measure for measure in _PICTURE_MEASURES}
"""The measures of pictures by name. `entropy_nats` and `resting` are defined for patches here, and differ from those of
texts. q runs over the patches. a_q is the active attention: the sum of A_qk over patches k. Tokens that are no patch
count as special. If a measure `has_active`, only its `_active` value is shown."""

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
"""The measures of recordings by name. t_q is the time in the recording that token q attends to: the sum of
A_qk (k + 1/2) s / a_q over frames k with sound, where a frame lasts s seconds."""


def measure_names(catalogue: Mapping[str, Measure] = MEASURES) -> tuple[str, ...]:
    """Return the names of all values, in the catalogue's order: `<name>`, then `<name>_active` if there is one."""
    names: list[str] = []
    for name, measure in catalogue.items():
        names.append(name)
        if measure.has_active:
            names.append(f"{name}_active")
    return tuple(names)


class MeasureColumns:
    """Lay out a catalogue's measures as columns of arrays: key measures first, then pair measures, then row measures.

    The arrays also have a first axis, *view*, of size two: 0 = all attention, 1 = active attention. So a value such as
    `window_active` is at view 1 and the column of `window`.

    Attributes:
        families: The family of each column: a KeyMeasure, PairMeasure or RowMeasure.
        keys: The families of the key measures' columns.
        pairs: The families of the pair measures' columns.
        rows: The statistics of the row measures' columns, such as "entropy".
        is_indicator: `is_indicator` of each key measure, then of each pair measure.
        is_beyond_uniform: `beyond_uniform` of each pair measure.
        facts: The facts of the pair measures, other than "offset".
        offsets: The offsets k - q, in tokens, that any pair measure needs, ascending.
        pair_map: Matrix of 0 and 1, (part, pair measure), that turns the parts of a row into pair measures. The parts
            are the sum of the weights ("mass"), then the sum of weights times each of `facts`, then the weight at each
            of `offsets`.
        names: `measure_names`: the names of all values of a result.
        view_by_value: The view of each value in `names`.
        column_by_value: The column of each value in `names`.
    """

    def __init__(self, catalogue: Mapping[str, Measure]) -> None:
        # Order the columns by family; other measures, such as those of recordings, get none.
        names: list[str] = []
        for family in (KeyMeasure, PairMeasure, RowMeasure):
            names += [name for name, measure in catalogue.items() if isinstance(measure.family, family)]
        self.families = [catalogue[name].family for name in names]
        self.keys = [family for family in self.families if isinstance(family, KeyMeasure)]
        self.pairs = [family for family in self.families if isinstance(family, PairMeasure)]
        self.rows = [family.statistic for family in self.families if isinstance(family, RowMeasure)]
        # Collect the properties of the columns, and which facts and offsets have to be computed.
        self.is_indicator = [family.is_indicator for family in self.keys]
        self.is_indicator += [family.is_indicator for family in self.pairs]
        self.is_beyond_uniform = [family.beyond_uniform for family in self.pairs]
        # Several measures may read one fact, which is one part of the sums.
        self.facts = list(dict.fromkeys(family.fact for family in self.pairs if not family.offsets))
        self.offsets = sorted(set().union(*(family.offsets for family in self.pairs)))
        self.pair_map = []
        # No measure has the fact "mass", so its row is zeros: the engine needs this part to count active attention.
        for part in ("mass", *self.facts, *self.offsets):
            self.pair_map.append([int(part in (family.fact, *family.offsets)) for family in self.pairs])
        # Find view and column of each value: `measure_names` marks values of active attention by the suffix.
        self.names = measure_names(catalogue)
        self.view_by_value = [int(name.endswith("_active")) for name in self.names]
        self.column_by_value = [names.index(name.removesuffix("_active")) for name in self.names]


@dataclass(frozen=True, eq=False)
class MeasureSums:
    """Hold the measures of one layer on one batch, as sums and counts for each unit.

    A unit is a text, or a block of a text's queries if texts are long (`queries_per_unit`). Each text of a batch has
    the same number of units, and the units of a text are adjacent. The value of a measure is sum / count. To get its
    value over several units, add up sums and counts first.

    Attributes:
        sum: (measure, unit, head): the sum of the measure over the queries that count.
        count: (measure, unit, head): how many queries count. For a measure `…_active` it is their total active
            attention. If it is 0, the value is undefined.
        uniform_sum: (measure, unit, head): the same as `sum`, with attention spread evenly over the keys that the mask
            allows. For a measure `…_active` the active attention of each query keeps its total, and is spread evenly
            over the keys that are no sinks. So it is the baseline for the same `count`.
        names: The names of the measures, (measure,): see `measure_names`.
    """

    sum: Floats
    count: Floats
    uniform_sum: Floats
    names: tuple[str, ...]

    def value(self, name: str) -> Floats:
        """Return a measure's value over the whole batch, sum / count, (head,); NaN where count is 0."""
        index = self.names.index(name)
        total = self.sum[index].sum(0)
        count = self.count[index].sum(0)
        return divide(total, count)
