"""What every view says of heads together: rows and how to read them. Plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnscope.records.relations.combined import Combined, Precision
from attnscope.records.relations.record import Relations
from attnscope.views.tables.wording import printable

CUTS = {1: "L", 2: "L/2", 5: "L/5"}


@dataclass(frozen=True)
class TogetherRow:
    """A row of a table or figure.

    Attributes:
        name: What it is of: a relation, or the range and cut of one that is undirected.
        relation: The relation.
        at: What its heads say there.
    """

    name: str
    relation: Combined
    at: Combined | Precision


def together_rows(found: Relations) -> Iterator[TogetherRow]:
    """A row a relation, those first that heads together tell best above chance; of undirected links a row a cut."""
    for one in ranked_together(found):
        if not one.precisions:
            yield TogetherRow(printable(one.relation, 60), one, one)
        for at in one.precisions:
            name = f"≥{at.separation}" if at.range == "all" else printable(at.range, 12)
            cut = CUTS.get(at.cut, f"L/{at.cut}")
            yield TogetherRow(f"{printable(one.relation, 48)} {name}, {cut}", one, at)


def ranked_together(found: Relations) -> list[Combined]:
    """Relations by how far the lower end of the better combination's interval is above the best head."""

    def gain(one: Combined) -> float:
        return max(score.gain_low for score in (one.mean, one.regression) if score is not None)

    return sorted(found.combined, key=lambda one: -gain(one))


def together_explanation(found: Relations) -> str:
    """How to read the rows."""
    said = (
        "combined heads, on the half of the texts on which nothing was chosen; alone: the head chosen on the other "
        "half; k: how many heads, the best there; mean: their mean; regression: logistic, over all heads, fitted "
        "there; gains: 95% interval of what each has over the head alone; chance: any word at random"
    )
    if any(one.precisions for one in found.combined):
        said += (
            "; of undirected links the precision of as many pairs as a text has words (L), or a part of that, at least "
            "so many tokens apart, or short: 6 to 11, medium: 12 to 23, long: 24 or more; chance: any such pair"
        )
    return said
