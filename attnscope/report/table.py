"""The table of the terminal: decides which columns fit, wrap or are dropped, and says so in a line below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Table as Grid
from rich.text import Text

from attnscope.errors import safe
from attnscope.report.plain_text import cut


@dataclass(frozen=True)
class TextColumn:
    """A column: what its cells say, how wide it is, and how soon a narrow terminal drops it.

    Attributes:
        name: Its header, and what the line below the table calls it if it was dropped.
        cell: Makes the cell of a row.
        right: Whether it is flush right, as numbers are.
        wraps: Whether it may be narrower than its widest cell, which then takes several lines.
        part: Its part of the room that the other columns leave. Its cells are then one line long, and `…` stands where
            a cell is cut. 0 = its width is that of its cells.
        least: Its least width in cells of the terminal.
        drop: How soon it is dropped: the largest number first, columns of the same number together. 0 = never.
        style: The style of its cells.
    """

    name: str
    cell: Callable[[Any], str | Text]
    right: bool = False
    wraps: bool = False
    part: int = 0
    least: int = 1
    drop: int = 0
    style: StyleType = ""


class TextTable:
    """Rows under named columns. No letter of a cell is lost, except in columns with a `part`.

    If the terminal is narrow, columns wrap first. Then columns are dropped by their priority, and a line below the
    table says which, and how to see them. With `goes_on` they stand in another block below instead, which begins with
    the first column. If even the columns that are never dropped do not fit, their cells break. `gap` is the number of
    blanks between two columns.
    """

    def __init__(
        self,
        columns: Sequence[TextColumn],
        rows: Iterable[Any],
        *,
        gap: int = 2,
        goes_on: bool = False,
        header: bool = True,
        style: Callable[[Any], str] = lambda row: "",
    ) -> None:
        rows = list(rows)
        self._columns, self._gap, self._goes_on, self._header = columns, gap, goes_on, header
        self._styles = [style(row) for row in rows]
        self._cells = [[_make_text(column.cell(row)) for row in rows] for column in columns]
        widths = [self._measure(column, cells) for column, cells in zip(columns, self._cells, strict=True)]
        self._least, self._whole = [least for least, _ in widths], [whole for _, whole in widths]

    def fit(self, width: int) -> tuple[list[str], list[str]]:
        """Return the names of the columns that fit a terminal of this width, and of those that do not."""
        shown, dropped = self._choose(width)
        return [self._columns[at].name for at in shown], [self._columns[at].name for at in dropped]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown, dropped = self._choose(width)
        for number, block in enumerate(self._blocks(width) if self._goes_on else [shown]):
            if number and len(self._styles) > 1:
                yield Text()
            yield self._grid(block, width)
        if dropped:
            names = ", ".join(dict.fromkeys(self._columns[at].name for at in dropped))
            yield Text(f"not shown in {width} columns: {names}; a wider terminal or --json shows all", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the width of the widest block, so that an indented table has no blanks behind its rows."""
        width = options.max_width
        shown, dropped = self._choose(width)
        if dropped:
            return Measurement(width, width)
        blocks = self._blocks(width) if self._goes_on else [shown]
        widest = max(sum(self._fit_widths(block, width)) + self._gap * (len(block) - 1) for block in blocks)
        return Measurement(min(widest, width), min(widest, width))

    def _measure(self, column: TextColumn, cells: Sequence[Text]) -> tuple[int, int]:
        """Return how wide a column is at least, and where nothing has to wrap."""
        names = column.name.split("\n") if self._header else []
        lines = chain(names, *(cell.plain.split("\n") for cell in cells))
        whole = max(map(cell_len, lines), default=1)
        if column.part:
            return min(whole, column.least), whole
        if not column.wraps:
            return (max(whole, column.least),) * 2
        words = " ".join([*names, *(cell.plain for cell in cells if column.right)]).split()
        return min(whole, max(column.least, *map(cell_len, words), 1)), whole

    def _choose(self, width: int) -> tuple[list[int], list[int]]:
        """Return the columns that are shown, and those that are dropped, in their order."""
        shown, dropped = [*range(len(self._columns))], list[int]()
        while not self._goes_on and not self._has_room(shown, width):
            soonest = max(self._columns[at].drop for at in shown)
            if not soonest:
                break
            dropped += [at for at in shown if self._columns[at].drop == soonest]
            shown = [at for at in shown if self._columns[at].drop < soonest]
        return shown, sorted(dropped)

    def _blocks(self, width: int) -> list[list[int]]:
        """Return the columns that stand side by side, block by block."""
        blocks = [[0]]
        for at in range(1, len(self._columns)):
            if len(blocks[-1]) > 1 and not self._has_room([*blocks[-1], at], width):
                blocks.append([0])
            blocks[-1].append(at)
        return blocks

    def _has_room(self, shown: Sequence[int], width: int) -> bool:
        return sum(self._least[at] + self._gap for at in shown) <= width + self._gap

    def _fit_widths(self, shown: Sequence[int], width: int) -> list[int]:
        """Return the width of each column: the widest that wraps shrinks first; if need be, all columns break."""
        room = max(len(shown), width - self._gap * (len(shown) - 1))
        widths, least = [self._whole[at] for at in shown], [self._least[at] for at in shown]
        if sum(least) > room:
            widths, least = least, [1] * len(shown)
        else:
            self._share_room(shown, widths, room)
        while sum(widths) > room:
            widths[max(range(len(shown)), key=lambda at: (widths[at] > least[at], widths[at], -at))] -= 1
        return widths

    def _share_room(self, shown: Sequence[int], widths: list[int], room: int) -> None:
        """Divide the room that other columns leave among those with a share; none gets more than it fills."""
        parts = {place: part for place, at in enumerate(shown) if (part := self._columns[at].part)}
        room -= sum(width for place, width in enumerate(widths) if place not in parts)
        n_parts = sum(parts.values())
        for place in sorted(parts, key=lambda place: widths[place] / parts[place]):
            widths[place] = min(widths[place], max(1, room * parts[place] // n_parts))
            room, n_parts = room - widths[place], n_parts - parts[place]

    def _grid(self, shown: Sequence[int], width: int) -> Grid:
        grid = Grid(
            box=None, pad_edge=False, header_style="dim", show_header=self._header, padding=(0, self._gap, 0, 0)
        )
        widths = self._fit_widths(shown, width)
        for at, cells in zip(shown, widths, strict=True):
            column = self._columns[at]
            justify: Literal["left", "right"] = "right" if column.right else "left"
            grid.add_column(Text(column.name), justify=justify, style=column.style, width=cells, overflow="fold")
        for number, style in enumerate(self._styles):
            grid.add_row(*(self._cell(at, number, cells) for at, cells in zip(shown, widths, strict=True)), style=style)
        return grid

    def _cell(self, at: int, number: int, cells: int) -> Text:
        text = self._cells[at][number]
        return Text(cut(text.plain, cells)) if self._columns[at].part else text


def _make_text(cell: str | Text) -> Text:
    return Text(safe(cell)) if isinstance(cell, str) else cell
