"""The first role of every head as a coloured letter, layers down and heads across: in the terminal and as a figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT
from attnscope.drawing.inks import blend, ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import FontStyle, Number, Page
from attnscope.errors import amount
from attnscope.questions.head_roles import first_role, marks_of, role_notes, threshold_text
from attnscope.report.blocks import Report
from attnscope.report.head_maps import LEFT_PX, HeadCells, grids_of, name_kinds, place_kinds
from attnscope.report.matrix import head_grid, room_for
from attnscope.report.numbers import number
from attnscope.report.plain_text import heading
from attnscope.report.role_marks import UNCLASSIFIED, Mark
from attnscope.report.wording import label, printable
from attnscope.results.result import Result

_EMPTY, _RESTING = "#f3f3f3", "#7d7d7d"
_LEGEND_PX = 380
"""Width of an entry of the legend."""

_LEAST_CELL_PX, _AROUND_PX = 12, 620
"""On paper, the least height of a cell, and room for title, legend and notes."""

_VALUE_CELL_PX = 32
"""Height of a cell that has room for a number below its letter."""


@dataclass(frozen=True, eq=False)
class RoleGrid:
    """The view of the first role of every head, in the terminal and as a figure.

    Letters alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, cells narrow first, then
    its heads go on below. The kinds of attention of an encoder-decoder stand one under the other.
    """

    result: Result

    def show(self, console: Console, *, every: bool) -> Sequence[RenderableType]:
        """Return the grids, one per kind of attention, and the legend."""
        heads = self.result.table("heads")
        letters = self._letters()
        kinds = dict.fromkeys(heads["kind"].tolist())
        parts: list[RenderableType] = []
        # A grid per kind of attention.
        for kind in kinds:
            if len(kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            rows = np.flatnonzero(heads["kind"] == kind).tolist()
            places = zip(heads["layer"][rows].tolist(), heads["head"][rows].tolist(), strict=True)
            parts.append(_draw_letters({place: letters[row] for place, row in zip(places, rows, strict=True)}, console))
        # The legend, with the count of each role.
        entries = [Text(f" {mark.glyph} ", style=_style(mark)).append(f" {words}") for mark, words in self._legend()]
        hints = []
        if any("+" in role for role in heads["role"].tolist()):
            hints.append(
                "the letter is the head's strongest role, or a sink's if it has no other; +: it has more roles"
            )
        if self.result.table("roles")["tentative"].any():
            hints.append("a small letter = tentative")
        return [*parts, Text(), Columns(entries, padding=(0, 2)), Text("; ".join(hints), style="dim")]

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the figure: letters with the values that roles rest on, and a bar of what goes to sinks."""
        heads = self.result.table("heads")
        paper = lettering.paper
        grids = grids_of(heads)
        n_across = max(len(grid.heads) for grid in grids.values())
        n_down = sum(len(grid.layers) for grid in grids.values())

        # The cells: as low as a page of paper wants.
        width = min(110.0, (paper.room_px - LEFT_PX) / n_across)
        height = max(20, min(round(0.7 * width), 1500 // n_down))
        if paper.fixed:
            height = max(_LEAST_CELL_PX, min(height, int(paper.most_px - _AROUND_PX) // n_down))
        needed = 2 * layout.MARGIN_PX + LEFT_PX + n_across * width
        page = Page(paper.width_for(layout.MIN_WIDTH_PX, needed), lettering)
        page.head(f"{report.model} · what its {amount(len(heads), 'head does', 'heads do')}", report.source)
        cells, bottom = place_kinds(grids, (width, height))
        name_kinds(page, cells)
        has_values = self._draw_cells(page, cells)

        # The legend and the notes.
        entries = [(words, mark.color, mark.glyph) for mark, words in self._legend(with_thresholds=not paper.fixed)]
        columns = max(1, int((page.width_px - 2 * layout.MARGIN_PX) // _LEGEND_PX))
        bottom = page.legend(layout.MARGIN_PX, bottom + 34, entries, columns)
        page.finish(bottom + 20, [*self._notes(has_values=has_values), *role_notes(self.result), *report.problems])
        return page

    def _letters(self) -> list[tuple[str, Mark | None, bool]]:
        """Return the letter of each head, its mark, and whether it has more roles."""
        heads, roles = self.result.table("heads"), self.result.table("roles")
        marks = marks_of(self.result)
        letters: list[tuple[str, Mark | None, bool]] = []
        # The first role gives the letter; a small one is tentative.
        for row, first in enumerate(first_role(self.result).tolist()):
            if first < 0:
                letters.append((UNCLASSIFIED, None, False))
                continue
            mark = marks[str(roles["role"][first])]
            letter = mark.letter(tentative=bool(roles["tentative"][first]))
            letters.append((letter, mark, "+" in str(heads["role"][row])))
        return letters

    def _legend(self, *, with_thresholds: bool = False) -> list[tuple[Mark, str]]:
        """Return what each letter means and how many heads have it."""
        roles = self.result.table("roles")
        counts = Counter(roles["role"].tolist())
        firsts = first_role(self.result)
        first_counts = Counter(roles["role"][firsts[firsts >= 0]].tolist())
        entries = []
        # Only roles that some head has; a role may be second in all of its heads.
        for name, mark in marks_of(self.result).items():
            if not counts[name]:
                continue
            words = f"{label(name)} {counts[name]}"
            if first_counts[name] < counts[name]:
                words += f", first in {first_counts[name]}" if first_counts[name] else ", never first"
            if with_thresholds:
                measure = self.result.options.get("roles", {}).get(name, {}).get("measure", name)
                words += f" ({printable(measure)} ≥ {threshold_text(self.result, name)})"
            entries.append((mark, words))
        # Heads without a role close the legend.
        n_none = int((firsts < 0).sum())
        return [*entries, *([(Mark(UNCLASSIFIED, _EMPTY), f"unclassified {n_none}")] if n_none else [])]

    def _draw_cells(self, page: Page, cells: HeadCells) -> bool:
        """Draw all heads; return whether cells have room for values."""
        heads, roles = self.result.table("heads"), self.result.table("roles")
        # Values stand below letters where cells are large enough.
        width, height = (size - 3 for size in cells.size)
        size = page.paper.letters(min(height * 0.32, 26.0))
        value_size = page.paper.letters(min(height * 0.27, width * 0.27, 19.0))
        has_values = height >= _VALUE_CELL_PX and page.lettering.width_px("0.00", value_size) <= width
        places = zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True)
        boxes, colors, bars = [], [], []
        numbers = []
        firsts = first_role(self.result).tolist()
        for place, first, (letter, mark, has_more), resting in zip(
            places, firsts, self._letters(), heads["resting_share"].tolist(), strict=True
        ):
            x, y = cells.corner(*place)
            color = _EMPTY if mark is None else mark.color
            if mark is not None and letter != mark.glyph:
                color = blend(0.35, "#ffffff", color)  # tentative
            boxes.append((x, y, width, height))
            colors.append(color)
            ink = FAINT if mark is None else ink_on(color)
            middle = y + height * (0.28 if has_values and mark is not None else 0.45)
            written = f"{letter}+" if has_more else letter
            numbers.append(Number(x + width / 2, middle, written, size, ink, "plain" if mark is None else "bold"))
            if has_values and mark is not None:
                font: FontStyle = "italic" if math.isfinite(roles["active_share"][first]) else "plain"
                value = number(roles["value"][first])
                numbers.append(Number(x + width / 2, y + height * 0.62, value, value_size, ink, font))
            if math.isfinite(resting):
                bars.append((x, y + height * 0.9, width * min(1.0, max(0.0, resting)), height * 0.1))
        page.fill(boxes, colors)
        page.fill(bars, [_RESTING] * len(bars))
        page.numbers(numbers)
        return has_values

    def _notes(self, *, has_values: bool) -> list[str]:
        """Return what the figure shows."""
        roles = self.result.table("roles")
        notes = ["letter and colour: a head's strongest role, or a sink's if it has no other; +: it has more roles"]
        if len(roles) and has_values:
            notes.append("number: the value of the measure that the role rests on; in italics: excluding sinks")
        if np.isfinite(self.result.table("heads")["resting_share"]).any():
            notes.append("bar: the sink share, attention on special tokens and the first token")
        level = self.result.options.get("level")
        if isinstance(level, float) and not roles["tentative"].all():
            notes.append(
                f"a role is given where its value is above threshold and baseline at a false discovery rate of "
                f"{level:g}"
            )
        return notes


def _draw_letters(letters: dict[tuple[int, int], tuple[str, Mark | None, bool]], console: Console) -> Text:
    """Return a grid of letters by layer and head."""
    # Cells are as wide as the terminal allows, two to four letters.
    layers = range(max(layer for layer, _ in letters) + 1)
    n_heads = max(head for _, head in letters) + 1
    cell = max(2, min(4, room_for(layers, console.width) // n_heads))
    before = " " if cell == 4 else ""
    after = "" if cell == 2 else " "

    def draw(text: Text, layer: int, head: int) -> None:
        # A head that was not measured leaves a gap.
        if (layer, head) not in letters:
            text.append(" " * cell)
            return
        letter, mark, has_more = letters[layer, head]
        style = "dim" if mark is None else _style(mark)
        text.append(f"{before}{letter}{'+' if has_more else ' '}", style=style).append(after)

    return head_grid(layers, range(n_heads), cell, console.width, draw)


def _style(mark: Mark) -> Style:
    return Style(color=ink_on(mark.color), bgcolor=mark.color, bold=True)
