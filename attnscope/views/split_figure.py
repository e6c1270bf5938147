"""A split as a figure: a row of heads for each number of heads, on one colour scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.records.split import Seen, Split
from attnscope.views.canvas import FAINT, INK, Canvas, colormap, matplotlib_defaults, write_pages
from attnscope.views.inks import is_dark
from attnscope.views.lettering import Lettering, lettering_for
from attnscope.views.style import DEFAULT_CMAP

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

_MARGIN, _GAP, _ROW_HEAD, _PANEL_HEAD = 32, 26, 46, 24
_TITLE, _ROW_TITLE, _PANEL_TITLE, _LABEL, _NUMBER, _NOTE = 20.0, 16.0, 13.0, 13.0, 11.5, 12.5
_LARGEST_CELL, _LARGEST_MAP, _MOST_PANELS, _WIDEST = 46, 300, 12, 1760
_CELL_WITH_NUMBER, _CELL_WITH_LABEL = 34, 12


@dataclass(frozen=True)
class _Plan:
    """Where things stand, in pixels.

    Attributes:
        cell: Width and height of a weight.
        left: Left edge of the first map of a line.
        below: Room under a map, for the labels of keys.
        map_width: Width of a map.
        map_height: Height of a map.
        per_line: How many maps stand side by side.
        tops: The upper edge of each number of heads, and of the notes.
        width: Of the figure.
    """

    cell: int
    left: int
    below: int
    map_width: int
    map_height: int
    per_line: int
    tops: tuple[int, ...]
    width: int

    def map_at(self, row: int, place: int) -> tuple[int, int]:
        """The upper left corner of a map: which number of heads, which of its panels."""
        line, column = divmod(place, self.per_line)
        x = self.left + column * (self.map_width + _GAP)
        return x, self.tops[row] + _ROW_HEAD + _PANEL_HEAD + line * (_PANEL_HEAD + self.map_height + self.below)


def draw(split: Split, folder: str | Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draws `split.png`, `.svg` or `.pdf` into a folder.

    Raises:
        UsageError: An unknown format.
        AttnscopeError: The folder cannot be written.
    """
    return write_pages([("split", split_page(split))], folder, formats)


@matplotlib_defaults()
def split_page(split: Split) -> Canvas:
    """The figure."""
    labels = {*split.queries, *split.keys}
    lettering = lettering_for([str(split.run["model"]), split.text, *labels])
    plan = _plan_layout(split, lettering)
    notes = _notes(split)
    canvas = Canvas(plan.width, plan.tops[-1] + 19 * len(notes) + _MARGIN // 2, lettering)
    cmap = colormap(DEFAULT_CMAP)
    room = plan.width - 2 * _MARGIN
    title = f"{split.run['model']}: the same queries, keys and values with more and fewer heads"
    canvas.write(_MARGIN, _MARGIN, lettering.fit(title, _TITLE * 1.1, room), _TITLE, ha="left", weight="bold")
    text = lettering.fit(f"“{' '.join(split.text.split())}”", 15, room - 260)
    canvas.write(_MARGIN, _MARGIN + 28, text, 15, ha="left", color=FAINT)
    for number, seen in enumerate(split.seen):
        _row(canvas, plan, split, seen, number, cmap)
    _colour_bar(canvas, plan, cmap)
    for number, line in enumerate(notes):
        y = plan.tops[-1] + 4 + 19 * number
        canvas.write(_MARGIN, y, lettering.fit(line, _NOTE, room), _NOTE, ha="left", color=FAINT)
    return canvas


def _plan_layout(split: Split, lettering: Lettering) -> _Plan:
    n_queries, n_keys = len(split.queries), len(split.keys)
    cell = max(1, min(_LARGEST_CELL, _LARGEST_MAP // max(n_queries, n_keys)))
    labelled = cell >= _CELL_WITH_LABEL
    size = min(_LABEL, cell * 0.8)
    widest = [max((lettering.width_px(x, size) for x in names), default=0.0) for names in (split.queries, split.keys)]
    left = _MARGIN + (min(int(widest[0]), 150) + 12 if labelled else 0)
    below = min(int(widest[1]), 150) + 14 if labelled else 8
    map_width, map_height = cell * n_keys, cell * n_queries
    room = _WIDEST - left - _MARGIN
    per_line = max(1, min(max(len(_panels(seen)) for seen in split.seen), (room + _GAP) // (map_width + _GAP)))
    tops = [_MARGIN + 52]
    for seen in split.seen:
        n_lines = -(-len(_panels(seen)) // per_line)
        tops.append(tops[-1] + _ROW_HEAD + n_lines * (_PANEL_HEAD + map_height + below) + _GAP)
    width = max(left + per_line * (map_width + _GAP) - _GAP + _MARGIN, 900)
    return _Plan(cell, left, below, map_width, map_height, per_line, tuple(tops), width)


def _panels(seen: Seen) -> list[tuple[str, NDArray[np.float64]]]:
    """The titles and weights of a row: its heads, then their mean."""
    panels = []
    for head in range(min(seen.n_heads, _MOST_PANELS)):
        first, last = int(seen.columns[head, 0]), int(seen.columns[head, 1]) - 1
        span = f"column {first}" if first == last else f"columns {first}–{last}"
        panels.append((f"H{head} · {span}", seen.weights[head]))
    if seen.n_heads > 1:
        panels.append(("mean (no head's own)", seen.mean_weights))
    return panels


def _row(
    canvas: Canvas, plan: _Plan, split: Split, seen: Seen, number: int, cmap: Colormap
) -> None:  # fmt: skip
    y = plan.tops[number] + _ROW_HEAD
    heads = "1 head" if seen.n_heads == 1 else f"{seen.n_heads} heads"
    canvas.write(_MARGIN, y - 26, f"{heads}, d_head {seen.d_head}", _ROW_TITLE, ha="left", weight="bold")
    n_rows = seen.n_heads * len(split.queries)
    facts = (
        f"rank {_range(seen.rank.tolist())} · entropy {seen.entropy_nats.mean():.2f} nats · "
        f"{int(seen.uniform.sum())} of {n_rows} rows uniform · disagreement {seen.disagreement_nats.mean():.2f} nats"
    )
    x = _MARGIN + canvas.lettering.width_px(f"{heads}, d_head {seen.d_head}", _ROW_TITLE) * 1.12 + 20
    facts = canvas.lettering.fit(facts, _NOTE, plan.width - _MARGIN - x)
    canvas.write(x, y - 25, facts, _NOTE, ha="left", color=FAINT)
    boxes = []
    for place, (title, weights) in enumerate(_panels(seen)):
        x, y = plan.map_at(number, place)
        box = (x, y, plan.map_width, plan.map_height)
        canvas.set_cells(canvas.image(box, cmap), weights.astype(np.float32))
        boxes.append(box)
        fitted = canvas.lettering.fit(title, _PANEL_TITLE, plan.map_width + _GAP - 4)
        canvas.write(x, y - 12, fitted, _PANEL_TITLE, ha="left", color=FAINT if title.startswith("mean") else INK)
        _labels(canvas, plan, split, x, y, first=place % plan.per_line == 0)
        if plan.cell >= _CELL_WITH_NUMBER:
            _cells(canvas, plan, weights, x, y, cmap)
    canvas.frames(boxes)


def _colour_bar(canvas: Canvas, plan: _Plan, cmap: Colormap) -> None:
    x, y, width = plan.width - _MARGIN - 160, _MARGIN + 22, 140
    canvas.colour_bar((x, y, width, 12), cmap, animated=True)
    canvas.write(x - 8, y + 6, "weight 0", _NOTE, ha="right", color=FAINT)
    canvas.write(x + width + 8, y + 6, "1", _NOTE, ha="left", color=FAINT)


def _labels(canvas: Canvas, plan: _Plan, split: Split, x: int, y: int, *, first: bool) -> None:
    if plan.cell < _CELL_WITH_LABEL:
        return
    size = min(_LABEL, plan.cell * 0.8)
    fit: Callable[[str], str] = lambda label: canvas.lettering.fit(label, size, 150)  # noqa: E731
    for place, label in enumerate(split.queries if first else ()):
        canvas.write(x - 8, y + (place + 0.5) * plan.cell, fit(label), size, ha="right")
    for place, label in enumerate(split.keys):
        middle = x + (place + 0.5) * plan.cell
        canvas.write(middle, y + plan.map_height + 7, fit(label), size, ha="center", va="top", rotation=90)


def _cells(canvas: Canvas, plan: _Plan, weights: NDArray[np.float64], x: int, y: int, cmap: Colormap) -> None:
    for (row, column), weight in np.ndenumerate(weights):
        color = "white" if is_dark(*cmap(float(weight))[:3]) else INK
        middle = (x + (column + 0.5) * plan.cell, y + (row + 0.5) * plan.cell)
        canvas.write(*middle, f"{weight:.2f}", _NUMBER, ha="center", color=color, animated=True)


def _range(ranks: Sequence[int]) -> str:
    return str(min(ranks)) if min(ranks) == max(ranks) else f"{min(ranks)}–{max(ranks)}"


def _notes(split: Split) -> list[str]:
    notes = ["rows: queries (attend) · columns: keys (are attended to)"]
    notes.append("uniform rows choose nothing · disagreement: Jensen–Shannon divergence of the heads, 0 = alike")
    if split.same_columns:
        notes.append("head 1 has the columns of head 0, so that the two are the same")
    if any(seen.n_heads > _MOST_PANELS for seen in split.seen):
        notes.append(f"of more than {_MOST_PANELS} heads the first {_MOST_PANELS} are drawn")
    return notes
