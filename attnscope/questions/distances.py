"""Name the distances between heads, and explain them in the reports of comparisons. `core.distance` computes them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnscope.report.numbers import fixed
from attnscope.report.wording import corpus_line, hidden_tokens, printable

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison


class Distance(NamedTuple):
    """Hold how a report explains a distance.

    Attributes:
        label: What people call it.
        meaning: How it is computed, and its range.
        largest: Its largest value as it is printed: that of two rows without a common key.
    """

    label: str
    meaning: str
    largest: str


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
MEASURES = tuple(DISTANCES)
"""The distances that an option may name."""

WITHOUT_SPECIAL = "_without_special"
"""The ending of a distance that leaves out special tokens, such as "hellinger_without_special"."""

three_decimals = partial(fixed, decimals=3)
"""Write a distance with three decimals."""


def distance_of(name: str) -> Distance:
    """Return a distance by its name, with or without special tokens."""
    return DISTANCES[name.removesuffix(WITHOUT_SPECIAL)]


def distance_line(name: str) -> str:
    """Return a distance as reports name it, such as "Hellinger distance, without special tokens"."""
    label = distance_of(name).label
    return f"{label}, without special tokens" if name.endswith(WITHOUT_SPECIAL) else label


def guide(comparison: Comparison) -> list[str]:
    """Return the lines that explain a comparison's distance: its meaning, its intervals, and the tokens left out."""
    name = comparison.distance_name
    lines = [distance_of(name).meaning]
    if np.isfinite(comparison.grids.get(f"distance_low:{name}", np.nan)).any():
        lines.append("in brackets: 95% interval over texts")
    if name.endswith(WITHOUT_SPECIAL):
        kind = comparison.table("heads")["kind"].tolist()[0]
        lines.append(
            f"without {hidden_tokens(kind)}: rows are divided by what is left of them (one with less than 1% left is "
            "left out)"
        )
    return lines


def texts_line(comparison: Comparison) -> str:
    """Return the text on which heads were compared, or the number of texts and their sources."""
    text = comparison.corpus.get("text")
    if isinstance(text, str):
        return f"“{printable(text, 160)}”"
    return corpus_line(comparison)
