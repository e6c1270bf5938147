"""What a measure reads of attention, by family: all that the engine has to know of one. Knows no torch."""

from dataclasses import dataclass
from typing import Literal

PairFact = Literal["distance", "signed_distance", "cosine", "same_token", "induction"]
"""Facts of a query and a key."""

PAIR_FACTS: tuple[PairFact, ...] = ("distance", "signed_distance", "cosine", "same_token", "induction")

Statistic = Literal["entropy", "relative_entropy", "entropy_off_rest", "max_weight", "rarest", "rms_distance"]
"""What is read off a row of weights: its entropy; that by the logarithm of the number of keys; that of the row without
the keys on which heads rest, scaled to a sum of 1; the largest weight but on the text's final special token; whether
the largest is on the rarest token; the root of the mean square of the distance."""

STATISTICS: tuple[Statistic, ...] = (
    "entropy", "relative_entropy", "entropy_off_rest", "max_weight", "rarest", "rms_distance",
)  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """The sum of weights times what each key is worth; of a set of keys, the mass on it.

    Attributes:
        fact: What says so (`facts.key_facts`; of a layer: "value_norm", "output_norm", "outlying").
        is_set: Whether it is a set: undefined for a query that may attend to none of it.
        of_layer: Whether the layer says so, not the text.
    """

    fact: str
    is_set: bool = True
    of_layer: bool = False


@dataclass(frozen=True)
class Pairs:
    """The sum of weights times a function of query and key.

    Attributes:
        fact: Which one (`facts.pair_facts`).
        is_set: As of Keys.
        beyond_uniform: Whether what uniform attention of the same mass has is taken off.
    """

    fact: PairFact
    is_set: bool = False
    beyond_uniform: bool = False


@dataclass(frozen=True)
class Places:
    """The sum of the weights at offsets, key minus query; undefined for a query that may attend to none of them."""

    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A statistic of a query's weights."""

    statistic: Statistic


@dataclass(frozen=True)
class LargestAt:
    """Whether the largest weight is at the offset that is the head's most frequent: known after the whole corpus."""


@dataclass(frozen=True)
class Text:
    """What is known of a whole text alone: how much its most attended key receives, or whether the first is a sink."""

    statistic: Literal["received", "sink"]


Family = Keys | Pairs | Places | Row | LargestAt | Text
