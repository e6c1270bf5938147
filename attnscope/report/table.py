"""The table of the terminal: decides which columns fit, wrap or are dropped, and says so in a line below."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import StyleType
from rich.table import Table as Grid
from rich.text import Text

from attnscope.errors import safe


@dataclass(frozen=True)
class TextColumn:
    """A column: what its cells say, how wide it is, and how soon a narrow terminal drops it.

    Attributes:
        name: Its header, and what the line below the table calls it if it was dropped.
        cell: Makes the cell of a row.
        right: Whether it is flush right, as numbers are.
        wraps: Whether it may be narrower than its widest cell, which then takes several lines.
        least: Its least width in cells of the terminal.
        drop: How soon it is dropped: the largest number first, columns of the same number together. 0 = never.
        style: The style of its cells.
    """

    name: str
    cell: Callable[[Any], str | Text]
    right: bool = False
    wraps: bool = False
    least: int = 1
    drop: int = 0
    style: StyleType = ""


class TextTable:
    """Rows under named columns. No letter of a cell is lost.

    If the terminal is narrow, columns wrap first. Then columns are dropped by their priority, and a line below the
    table says which, and how to see them. If even the columns that are never dropped do not fit, their cells break.
    `gap` is the number of blanks between two columns.
    """

    def __init__(
        self, columns: Sequence[TextColumn], rows: Iterable[Any], *, gap: int = 2, header: bool = True
    ) -> None:
        rows = list(rows)
        self._columns = columns
        self._gap = gap
        self._header = header
        self._cells = [[_make_text(column.cell(row)) for row in rows] for column in columns]
        widths = [
            self._measure(column, cells) for column, cells in zip(columns, self._cells, strict=True)
        ]
        self._least_widths = [least for least, _ in widths]
        self._whole_widths = [whole for _, whole in widths]

    def fit(self, width: int) -> tuple[list[str], list[str]]:
        """Return the names of the columns that fit a terminal of this width, and of those that do not."""
        shown, dropped = self._choose(width)
        return self._names(shown), self._names(dropped)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown, dropped = self._choose(width)
        yield self._grid(shown, width)
        if dropped:
            names = ", ".join(dict.fromkeys(self._names(dropped)))
            yield Text(
                f"not shown in {width} columns: {names}; a wider terminal or --json shows all",
                style="dim",
            )

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [self._columns[number].name for number in numbers]

    def _measure(self, column: TextColumn, cells: Sequence[Text]) -> tuple[int, int]:
        """Return how wide a column is at least, and where nothing has to wrap."""
        header = column.name.split("\n") if self._header else []
        lines = chain(header, *(cell.plain.split("\n") for cell in cells))
        whole = max(map(cell_len, lines), default=1)
        if not column.wraps:
            width = max(whole, column.least)
            return width, width
        # What wraps breaks between words, and no word of the header breaks. Nor does a number; long words of texts do.
        numbers = [cell.plain for cell in cells] if column.right else []
        words = " ".join([*header, *numbers]).split()
        return min(whole, max(column.least, *map(cell_len, words), 1)), whole

    def _choose(self, width: int) -> tuple[list[int], list[int]]:
        """Return the columns that are shown, and those that are dropped, in their order."""
        shown = list(range(len(self._columns)))
        # No gap follows the last column, so the terminal has room for one gap more.
        while sum(self._least_widths[number] + self._gap for number in shown) > width + self._gap:
            soonest = max(self._columns[number].drop for number in shown)
            if not soonest:
                break
            shown = [number for number in shown if self._columns[number].drop < soonest]
        return shown, [number for number in range(len(self._columns)) if number not in shown]

    def _fit_widths(self, shown: Sequence[int], width: int) -> list[int]:
        """Return the width of each column: the widest that wraps shrinks first; if need be, all columns break."""
        room = max(len(shown), width - self._gap * (len(shown) - 1))
        widths = [self._whole_widths[number] for number in shown]
        least = [self._least_widths[number] for number in shown]
        if sum(least) > room:
            widths = least
            least = [1] * len(shown)
        while sum(widths) > room:
            # Of columns that may still shrink the widest, the first of equals.
            widest = max(
                range(len(shown)),
                key=lambda index: (widths[index] > least[index], widths[index], -index),
            )
            widths[widest] -= 1
        return widths

    def _grid(self, shown: Sequence[int], width: int) -> Grid:
        """Return the columns that are shown as rich draws them."""
        padding = (0, self._gap, 0, 0)
        grid = Grid(
            box=None, pad_edge=False, header_style="dim", show_header=self._header, padding=padding
        )
        for number, column_width in zip(shown, self._fit_widths(shown, width), strict=True):
            column = self._columns[number]
            justify: Literal["left", "right"] = "right" if column.right else "left"
            header = Text(column.name)
            grid.add_column(
                header, justify=justify, style=column.style, width=column_width, overflow="fold"
            )
        for row in zip(*(self._cells[number] for number in shown), strict=True):
            grid.add_row(*row)
        return grid


def _make_text(cell: str | Text) -> Text:
    return Text(safe(cell)) if isinstance(cell, str) else cell
