"""What several heads reach together on a relation: rows, how to read them, and their figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnscope.records.relations.combined import NAMES, Combined, Precision, Score
from attnscope.records.relations.record import Relations
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK, LINE
from attnscope.views.drawing.lettering import Lettering
from attnscope.views.drawing.page import Page
from attnscope.views.tables.wording import corpus_line, model_of, printable


@dataclass(frozen=True)
class TogetherRow:
    """A row of a table or figure.

    Attributes:
        name: The relation's, or the range and cut of one that is undirected.
        relation: The relation.
        at: What its heads say there.
    """

    name: str
    relation: Combined
    at: Combined | Precision

    @property
    def scores(self) -> dict[str, Score | None]:
        """The scores of the best head, the mean and the regression, by their names."""
        return dict(zip(NAMES, (self.at.best_head, self.at.mean, self.at.regression), strict=True))


def together_rows(relations: Relations) -> Iterator[TogetherRow]:
    """A row per relation, or per cut of an undirected one.

    They are ranked by how far the lower end of the better combination's interval is above the best head.
    """

    def gain(combined: Combined) -> float:
        return max(score.gain_low for score in (combined.mean, combined.regression) if score is not None)

    for combined in sorted(relations.combined, key=lambda combined: -gain(combined)):
        if not combined.precisions:
            yield TogetherRow(printable(combined.relation, 60), combined, combined)
        for at in combined.precisions:
            name = f"≥{at.separation}" if at.range == "all" else printable(at.range, 12)
            cut = "L" if at.cut == 1 else f"L/{at.cut}"
            yield TogetherRow(f"{printable(combined.relation, 48)} {name}, {cut}", combined, at)


def together_explanation(relations: Relations) -> str:
    """How to read the rows."""
    text = (
        "combined heads, on the half of the texts on which nothing was chosen; alone: the head chosen on the other "
        "half; k: how many heads, the best there; mean: their mean; regression: logistic, over all heads, fitted "
        "there; gains: 95% interval of what each has over the head alone; chance: any word at random"
    )
    if any(combined.precisions for combined in relations.combined):
        text += (
            "; of undirected links the precision of as many pairs as a text has words (L), or a part of that, at least "
            "so many tokens apart, or short: 6 to 11, medium: 12 to 23, long: 24 or more; chance: any such pair"
        )
    return text


MOST_ROWS = 36
"""Relations, or ranges and cuts of one, that the figure has; those with the largest gain come first."""

_COLORS = dict(zip(NAMES, ("#8a8a8a", "#0072b2", "#d55e00"), strict=True))
_ROW_PX, _LANE_PX, _TEXT_PX = 34, 8.0, 13.0
_TOP_PX = layout.MARGIN_PX + 112


def together_page(relations: Relations, lettering: Lettering) -> Page:
    """A row a relation: a dot and its 95% interval for the head alone, the mean, the regression; a tick for chance."""
    paper = lettering.paper
    rows = list(together_rows(relations))[:MOST_ROWS]
    widest = max(lettering.width_px(row.name, _TEXT_PX) for row in rows)
    width = paper.width_for(layout.MIN_WIDTH_PX)
    most = (width - 2 * layout.MARGIN_PX) // (2 if paper.is_narrow else 3)
    left = layout.MARGIN_PX + min(math.ceil(widest) + 12, most)
    room = width - layout.MARGIN_PX - left - 16
    bottom = _TOP_PX + len(rows) * _ROW_PX
    page = Page(width, lettering)
    notes = [
        "dots: shares of links that are right, with 95% intervals; black tick: chance",
        *([f"the {MOST_ROWS} with the largest gains are shown"] if len(rows) == MOST_ROWS else []),
        together_explanation(relations),
    ]
    page.head(f"{model_of(relations.run)} · what heads together say of relations", corpus_line(relations))
    _name_colors(page, left, [name for name in NAMES if any(row.scores[name] for row in rows)])
    ends = (_TOP_PX - 6, bottom)
    page.lines([[(left + room * tick, y) for y in ends] for tick in (0, 0.25, 0.5, 0.75, 1)], color=LINE)
    for tick in (0.0, 0.5, 1.0):
        page.write(left + room * tick, bottom + 16, f"{tick:g}", layout.CAPTION_PX, ha="center", color=FAINT)
    for number, row in enumerate(rows):
        y = _TOP_PX + (number + 0.5) * _ROW_PX
        name = lettering.fit(row.name, _TEXT_PX, left - layout.MARGIN_PX - 8)
        page.write(left - 8, y, name, _TEXT_PX, ha="right", color=INK)

        def across(share: float) -> float:
            return left + room * min(1.0, max(0.0, share))

        at = across(row.at.chance)
        page.lines([[(at, y - 11), (at, y + 11)]], color=INK, width_px=1.4)
        for lane, (which, score) in enumerate(row.scores.items()):
            if score is None:
                continue
            down = y + (lane - 1) * _LANE_PX
            if math.isfinite(score.low) and math.isfinite(score.high):
                page.lines(
                    [[(across(score.low), down), (across(score.high), down)]], color=_COLORS[which], width_px=1.6
                )
            if math.isfinite(score.value):
                page.dot((across(score.value), down), 3.6, _COLORS[which])
    page.finish(bottom + 62, notes)
    return page


def _name_colors(page: Page, left: float, names: Sequence[str]) -> None:
    """What each colour is, above the rows."""
    x = layout.MARGIN_PX if page.lettering.paper.is_narrow else left
    for name in names:
        page.dot((x + 4, _TOP_PX - 24), 4.0, _COLORS[name])
        page.write(x + 14, _TOP_PX - 24, name, layout.CAPTION_PX, ha="left")
        x += 34 + page.lettering.width_px(name, layout.CAPTION_PX)
