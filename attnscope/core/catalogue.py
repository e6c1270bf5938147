"""The catalogue of head measures: what each is called and means, and what it adds up. Loads no torch.

A measure reads attention in one of three ways: by what keys are worth, by what pairs of a query and a key are worth, or
as a number of rows of weights. Its entry says which. The engine (`core.measures`) knows these three and no names.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Keys:
    """Sum over keys k of A_qk f(k).

    Attributes:
        fact: What f is: a fact of `facts.key_facts`, or of the layer ("value_norm", "output_norm", "outlying").
        is_set: Whether f is 1 on a set of keys and 0 elsewhere. A query that sees none of the set is then not counted.
    """

    fact: str
    is_set: bool = True


@dataclass(frozen=True)
class Pairs:
    """Sum over keys k of A_qk f(q, k), for queries and keys of one text.

    Attributes:
        fact: What f is: a fact of `facts.pair_facts`, or "offset": 1 at `offsets` and 0 elsewhere.
        is_set: As in Keys.
        offsets: Key minus query in tokens, each within REACH.
        beyond_uniform: Whether the value of uniform attention of the same mass is subtracted.
    """

    fact: str
    is_set: bool = False
    offsets: tuple[int, ...] = ()
    beyond_uniform: bool = False


@dataclass(frozen=True)
class Row:
    """A number of rows of weights.

    Attributes:
        statistic: Which number: "entropy", "relative_entropy", "max_weight", "rarest" or "rms_distance" of one row;
            "received" or "sink" of all rows of a text; "largest_offset" of all rows of a corpus.
        of: Whose number it is.
    """

    statistic: str
    of: Literal["query", "text", "corpus"] = "query"


Family = Keys | Pairs | Row

REACH = 8
"""Offsets up to this many tokens before and after the query are candidates for a positional head."""

OFFSETS = tuple(range(-REACH, REACH + 1))
"""Key minus query, in tokens."""

WINDOW = 3
"""Tokens before and after the query that `window` takes in."""

SINK_THRESHOLD = 0.3
"""Mean attention to the first token above which a head is an attention sink on a text (Gu et al. 2024)."""

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
    units = min(MOST_UNITS, round(n_queries / UNIT_QUERIES))
    return -(-n_queries // units) if units > 1 else max(UNIT_QUERIES, n_queries)


@dataclass(frozen=True)
class Measure:
    """One head measure: of texts, pictures or recordings, of where a head looks or of what it writes.

    Attributes:
        name: Its name in results and records; the unit is part of it where it has one.
        what: The meaning of a large value, in one line.
        formula: What is added up for one query q, in terms of weights A, keys k and tokens x; and what it is divided by
            if that is no count of queries.
        unit: Of the value: "share" of attention or of queries, "nats", "tokens", or that of the model's vectors.
        low: Smallest possible value.
        high: Largest possible value.
        source: The publication that the definition is from, or "ours".
        family: What it reads of the weights, and by what fact; None if a sense reads it in its own way.
        has_active: Whether there is also `<name>_active`.
        counts: Which predictions count, for a measure of predictions.
    """

    name: str
    what: str
    formula: str
    unit: str
    low: float
    high: float
    source: str
    family: Family | None = None
    has_active: bool = False
    counts: str = ""

    def describe(self) -> dict[str, Any]:
        """Return its entry in a record: the meaning of a large value, the unit, and the range, None = no bound."""
        ends = [end if math.isfinite(end) else None for end in (self.low, self.high)]
        return {"what": self.what, "unit": self.unit, "range": ends}

    @property
    def needs_places(self) -> bool:
        """Whether queries and keys must be of one text; it is then undefined in cross attention."""
        if isinstance(self.family, Row):
            return self.family.statistic in ("rms_distance", "largest_offset")
        return isinstance(self.family, Pairs)


_CLARK = "Clark et al. 2019, section 3"
_VOITA = "Voita et al. 2019"
_KOBAYASHI = "Kobayashi et al. 2020, section 2"
_INF = math.inf

MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure(
            "resting",
            "attends to sinks: special tokens or the first one",
            "sum of A_qk over k special or first",
            "share",
            0,
            1,
            "ours; " + _CLARK,
            Keys("resting", is_set=False),
        ),
        Measure(
            "entropy_nats",
            "spreads over many keys",
            "- sum over k of A_qk ln A_qk",
            "nats",
            0,
            _INF,
            _CLARK + ".3",
            Row("entropy"),
        ),
        Measure(
            "relative_entropy",
            "spreads evenly over the keys that the mask allows",
            "entropy_nats_q / ln n_q, n_q >= 2 keys allowed",
            "share",
            0,
            1,
            "ours",
            Row("relative_entropy"),
        ),
        Measure(
            "max_weight",
            "is confident: puts much on a single key",
            "max of A_qk over k but the text's final special token",
            "share",
            0,
            1,
            _VOITA + ", confidence",
            Row("max_weight"),
        ),
        Measure(
            "previous_token",
            "attends to the token before",
            "A[q, q-1]",
            "share",
            0,
            1,
            _CLARK + ".1",
            Pairs("offset", True, (-1,)),
            True,
        ),
        Measure(
            "self_token",
            "attends to the token itself",
            "A[q, q]",
            "share",
            0,
            1,
            _CLARK + ".1",
            Pairs("offset", True, (0,)),
            True,
        ),
        Measure(
            "next_token",
            "attends to the token after",
            "A[q, q+1]",
            "share",
            0,
            1,
            _CLARK + ".1",
            Pairs("offset", True, (1,)),
            True,
        ),
        Measure(
            "window",
            "attends within three tokens",
            "sum of A_qk over |q - k| <= 3",
            "share",
            0,
            1,
            "ours",
            Pairs("offset", True, tuple(range(-WINDOW, WINDOW + 1))),
            True,
        ),
        Measure(
            "positional",
            "has its largest weight at one fixed offset",
            "1 if k = q + o has the largest A_qk (1/t if t share it), o the head's most frequent of -8 to 8",
            "share",
            0,
            1,
            _VOITA + ", positional heads",
            Row("largest_offset", of="corpus"),
        ),
        Measure(
            "distance_tokens",
            "attends far away",
            "sum over k of A_qk |k - q|",
            "tokens",
            0,
            _INF,
            "Vig and Belinkov 2019, section 4.2",
            Pairs("distance"),
            True,
        ),
        Measure(
            "signed_distance_tokens",
            "attends ahead (positive) or back (negative)",
            "sum over k of A_qk (k - q)",
            "tokens",
            -_INF,
            _INF,
            "ours",
            Pairs("signed_distance"),
            True,
        ),
        Measure(
            "rms_distance_tokens",
            "attends far away, the farthest counting most",
            "square root of the sum over k of A_qk (k - q)^2",
            "tokens",
            0,
            _INF,
            "ours",
            Row("rms_distance"),
        ),
        Measure(
            "first_token",
            "attends to the text's first token",
            "A[q, first]",
            "share",
            0,
            1,
            "Xiao et al. 2024, section 3.1",
            Keys("first"),
        ),
        Measure(
            "outlier_token",
            "attends to tokens of outlying norm, special ones and the first apart: second sinks",
            "sum of A_qk over k with |h_k| > 3 medians of the text's, h_k the hidden state that the layer reads",
            "share",
            0,
            1,
            "ours; Sun et al. 2024, section 2",
            Keys("outlying"),
            True,
        ),
        Measure("cls", "attends to [CLS]", "sum of A_qk over k = [CLS]", "share", 0, 1, _CLARK + ".2", Keys("cls")),
        Measure("sep", "attends to [SEP]", "sum of A_qk over k = [SEP]", "share", 0, 1, _CLARK + ".2", Keys("sep")),
        Measure(
            "special",
            "attends to special tokens",
            "sum of A_qk over k special",
            "share",
            0,
            1,
            "Kovaleva et al. 2019, section 4.1",
            Keys("special"),
        ),
        Measure(
            "punctuation",
            "attends to punctuation",
            "sum of A_qk over k punctuation",
            "share",
            0,
            1,
            _CLARK + ".2",
            Keys("punctuation"),
            True,
        ),
        Measure(
            "same_token",
            "attends to the same token elsewhere in the text",
            "sum of A_qk over k != q with x_k = x_q",
            "share",
            0,
            1,
            "ours",
            Pairs("same_token", is_set=True),
            True,
        ),
        Measure(
            "induction",
            "attends to what followed the same token before",
            "sum of A[q, j+1] over j < q with x_j = x_q, j+1 != q",
            "share",
            0,
            1,
            "Olsson et al. 2022, section 2",
            Pairs("induction", is_set=True),
            True,
        ),
        Measure(
            "similar_token",
            "attends to tokens of similar static embedding, more than uniform attention does",
            "sum over k of A_qk (cos(e_q, e_k) - m_q), m_q the mean of cos(e_q, e_j) over the n_q keys j",
            "cosine",
            -2,
            2,
            "ours",
            Pairs("cosine", beyond_uniform=True),
            True,
        ),
        Measure(
            "rarest_token",
            "has its largest weight on the text's rarest token",
            "1/r if one of the r rarest keys (but the first) has the largest A_qk (1/(r t) if t share it)",
            "share",
            0,
            1,
            _VOITA + ", rare words",
            Row("rarest"),
        ),
        Measure(
            "rarity",
            "attends to rare tokens",
            "- sum over k of A_qk ln frequency(x_k)",
            "nats",
            0,
            _INF,
            "ours",
            Keys("rarity", is_set=False),
            True,
        ),
        Measure(
            "sink",
            "makes the first token an attention sink, in a large share of texts",
            "1 if the text's mean of A[q, first] over all its queries > 0.3",
            "share of texts",
            0,
            1,
            "Gu et al. 2024, section 3.1",
            Row("sink", of="text"),
        ),
        Measure(
            "received",
            "gives a large share of all its attention to one key of the text",
            "max over k of the sum over q of A_qk, each text counting its queries",
            "share",
            0,
            1,
            "ours",
            Row("received", of="text"),
        ),
        Measure(
            "value_weighted",
            "reads large value vectors",
            "sum over k of A_qk |v_k|",
            "norm of values",
            0,
            _INF,
            _KOBAYASHI,
            Keys("value_norm", is_set=False),
            True,
        ),
        Measure(
            "norm_weighted",
            "writes large vectors to its output",
            "sum over k of A_qk |W_O v_k|",
            "norm of outputs",
            0,
            _INF,
            _KOBAYASHI,
            Keys("output_norm", is_set=False),
            True,
        ),
    )
}
"""All head measures by name."""

KEY_FAMILIES = {name: measure.family for name, measure in MEASURES.items() if isinstance(measure.family, Keys)}
"""What the measures of keys read, by name."""

PAIR_FAMILIES = {name: measure.family for name, measure in MEASURES.items() if isinstance(measure.family, Pairs)}
"""What the measures of pairs read, by name."""

_ROW_FAMILIES = {name: measure.family for name, measure in MEASURES.items() if isinstance(measure.family, Row)}

ROW_STATISTICS = {name: family.statistic for name, family in _ROW_FAMILIES.items() if family.of == "query"}
"""Which number of one row a measure is, by name."""

FROM_OFFSETS = next(name for name, measure in MEASURES.items() if measure.family == Row("largest_offset", of="corpus"))
"""The measure that has no sum of its own: which offset counts is known once the whole corpus has been seen."""


def measure_names() -> tuple[str, ...]:
    """Return the measures that have sums of their own, `…_active` after each, in the catalogue's order."""
    names: list[str] = []
    for name, measure in MEASURES.items():
        if name == FROM_OFFSETS:
            continue
        names.append(name)
        if measure.has_active:
            names.append(f"{name}_active")
    return tuple(names)
