"""Name the distances between heads, and explain them in the reports of comparisons.

A distance between two heads compares their attention rows, query by query. `core.distance` computes the distances.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnscope.report.numbers import format_fixed
from attnscope.report.wording import corpus_line, hidden_tokens, printable

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison


class Distance(NamedTuple):
    """Hold the words with which a report explains a distance.

    Attributes:
        label: Its name in sentences.
        meaning: How it is computed, and its range.
        max_text: Its upper limit as printed, reached by two rows that share no key.
    """

    label: str
    meaning: str
    max_text: str


DISTANCES = {
    "hellinger": Distance(
        "Hellinger distance",
        "distance: root of the mean squared Hellinger distance between two rows, 0 to 1",
        "1",
    ),
    "jensen_shannon": Distance(
        "Jensen-Shannon distance",
        "distance: root of the mean Jensen-Shannon divergence between two rows, 0 to 0.83 (√ln 2)",
        "0.83",
    ),
}
DISTANCE_NAMES = tuple(DISTANCES)
"""The names of distances that the option --measure accepts."""

WITHOUT_SPECIAL_SUFFIX = "_without_special"
"""The suffix of a distance that leaves out special tokens, as in "hellinger_without_special"."""

format_distance = partial(format_fixed, decimals=3)
"""Write a distance with three decimals."""


def find_distance(name: str) -> Distance:
    """Return the distance of a name, with or without the suffix."""
    return DISTANCES[name.removesuffix(WITHOUT_SPECIAL_SUFFIX)]


def name_distance(name: str) -> str:
    """Return the name of a distance for reports, such as "Hellinger distance, without special tokens"."""
    label = find_distance(name).label
    return f"{label}, without special tokens" if name.endswith(WITHOUT_SPECIAL_SUFFIX) else label


def explain_distance(comparison: Comparison) -> list[str]:
    """Return lines that explain the distance of a comparison: its meaning, its intervals, and the tokens left out."""
    name = comparison.distance_name
    lines = [find_distance(name).meaning]
    # The array of lower ends is missing, or NaN, if the distance has no intervals.
    if np.isfinite(comparison.grids.get(f"distance_low:{name}", np.nan)).any():
        lines.append("in brackets: 95% interval over texts")
    if name.endswith(WITHOUT_SPECIAL_SUFFIX):
        attention_kind = comparison.table("heads")["kind"].tolist()[0]
        lines.append(
            f"without {hidden_tokens(attention_kind)}: rows are divided by what is left of them (one with less than 1% "
            "left is left out)"
        )
    return lines


def describe_texts(comparison: Comparison) -> str:
    """Return the text on which heads were compared, in quotes; of several texts, their number and their sources."""
    text = comparison.corpus.get("text")
    if isinstance(text, str):
        return f"“{printable(text, 160)}”"
    return corpus_line(comparison)
