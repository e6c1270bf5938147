"""Name the distances between heads, and explain them to readers. The distances are computed in `core`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnscope.report.numbers import fixed
from attnscope.report.wording import corpus_line, hidden_tokens, printable

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison

MEASURES = ("hellinger", "jensen_shannon")
DISTANCES = {"hellinger": "Hellinger distance", "jensen_shannon": "Jensen-Shannon distance"}
MEANINGS = {
    "hellinger": "distance: root of the mean squared Hellinger distance between two rows, 0 to 1",
    "jensen_shannon": "distance: root of the mean Jensen-Shannon divergence between two rows, 0 to 0.83 (√ln 2)",
}
LARGEST = {"hellinger": "1", "jensen_shannon": "0.83"}
"""The distance of rows without a common key."""

WITHOUT_SPECIAL = "_without_special"
"""How the name of a distance ends that leaves special tokens out."""


three_decimals = partial(fixed, decimals=3)


def distance_line(name: str) -> str:
    """Return what a distance is called, such as "Hellinger distance, without special tokens"."""
    measure = name.removesuffix(WITHOUT_SPECIAL)
    return DISTANCES[measure] + (", without special tokens" if measure != name else "")


def guide(comparison: Comparison) -> list[str]:
    """Return the meaning of the first distance, and the rows that it leaves out."""
    # The meaning, then the interval, then the tokens that are left out.
    name = comparison.distance_name
    lines = [MEANINGS[name.removesuffix(WITHOUT_SPECIAL)]]
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
    """Return the text that heads were compared on, or how many and their sources."""
    text = comparison.corpus.get("text")
    if isinstance(text, str):
        return f"“{printable(text, 160)}”"
    return corpus_line(comparison)
