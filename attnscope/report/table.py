"""Print tables in a terminal: choose which columns fit, wrap or are dropped, and name the dropped ones below."""

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
    """A column of a table: its cells, its width, and how soon a narrow terminal drops it.

    Attributes:
        name: Its header, and its name in the line about dropped columns.
        cell: Returns the cell of a row.
        right: Whether it is flush right, as numbers are.
        wraps: Whether it may be narrower than its widest cell, which then takes several lines.
        least: Its least width in cells of the terminal.
        drop: Its priority to be dropped: columns of the largest number go first, and together. 0 = never.
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
        # By column: its cells, its least width, and its width where nothing wraps.
        self._cells: list[list[Text]] = []
        self._least_widths: list[int] = []
        self._whole_widths: list[int] = []
        for column in columns:
            cells = [_make_text(column.cell(row)) for row in rows]
            least, whole = self._measure(column, cells)
            self._cells.append(cells)
            self._least_widths.append(least)
            self._whole_widths.append(whole)

    def fit(self, width: int) -> tuple[list[str], list[str]]:
        """Return the names of the columns that fit a terminal of this width, and of those that are dropped."""
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

    def _names(self, indices: Sequence[int]) -> list[str]:
        return [self._columns[index].name for index in indices]

    def _measure(self, column: TextColumn, cells: Sequence[Text]) -> tuple[int, int]:
        """Return the least width of a column, and its width if nothing wraps."""
        header = column.name.split("\n") if self._header else []
        lines = chain(header, *(cell.plain.split("\n") for cell in cells))
        whole = max(map(cell_len, lines), default=1)
        if not column.wraps:
            width = max(whole, column.least)
            return width, width
        # Words of the header and numbers never break; long words of other cells may.
        unbroken = [*header]
        if column.right:
            unbroken += [cell.plain for cell in cells]
        words = " ".join(unbroken).split()
        longest_word = max(map(cell_len, words), default=1)
        return min(whole, max(column.least, longest_word)), whole

    def _choose(self, width: int) -> tuple[list[int], list[int]]:
        """Return the indices of the columns that are shown, and of those that are dropped."""
        shown = list(range(len(self._columns)))
        # Each width here has a gap behind it, the last one too: so there is room for one gap more.
        while sum(self._least_widths[index] + self._gap for index in shown) > width + self._gap:
            soonest = max(self._columns[index].drop for index in shown)
            if not soonest:
                break
            shown = [index for index in shown if self._columns[index].drop < soonest]
        return shown, [index for index in range(len(self._columns)) if index not in shown]

    def _fit_widths(self, shown: Sequence[int], width: int) -> list[int]:
        """Return the width of each column that is shown.

        The widest column that wraps shrinks first; if that is not enough, the cells of all columns break.
        """
        room = max(len(shown), width - self._gap * (len(shown) - 1))
        widths = [self._whole_widths[index] for index in shown]
        least = [self._least_widths[index] for index in shown]
        if sum(least) > room:
            widths = least
            least = [1] * len(shown)
        while sum(widths) > room:
            # The widest column that may still shrink; of equal ones, the first.
            shrinkable = [place for place in range(len(shown)) if widths[place] > least[place]]
            widths[max(shrinkable, key=widths.__getitem__)] -= 1
        return widths

    def _grid(self, shown: Sequence[int], width: int) -> Grid:
        """Return the columns that are shown as a table of rich."""
        padding = (0, self._gap, 0, 0)
        grid = Grid(
            box=None, pad_edge=False, header_style="dim", show_header=self._header, padding=padding
        )
        for index, column_width in zip(shown, self._fit_widths(shown, width), strict=True):
            column = self._columns[index]
            justify: Literal["left", "right"] = "right" if column.right else "left"
            grid.add_column(
                Text(column.name),
                justify=justify,
                style=column.style,
                width=column_width,
                overflow="fold",
            )
        for row in zip(*(self._cells[index] for index in shown), strict=True):
            grid.add_row(*row)
        return grid


def _make_text(cell: str | Text) -> Text:
    """Return a cell as a text of rich, without control characters."""
    return Text(safe(cell)) if isinstance(cell, str) else cell
