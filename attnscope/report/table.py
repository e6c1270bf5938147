"""Print tables in a terminal. In a narrow terminal columns wrap or are dropped; a line below names the dropped ones.

Widths are in character cells of the terminal. A `Grid` here is a table of the library rich.
"""

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
        name: The header, which also names the column in the line about dropped columns.
        make_cell: Returns the text of the cell of a row.
        is_right_aligned: Whether the cells are aligned right, as numbers are.
        wraps: Whether the column may be narrower than its widest cell, which then takes several lines.
        min_width: The least width of the column.
        drop_priority: Columns with the highest priority are dropped first, all at once. A column with 0 is never
            dropped.
        style: The style of the cells.
    """

    name: str
    make_cell: Callable[[Any], str | Text]
    is_right_aligned: bool = False
    wraps: bool = False
    min_width: int = 1
    drop_priority: int = 0
    style: StyleType = ""


class TextTable:
    """A table that adapts to the width of the terminal. No letter of a shown cell is lost.

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
        self._has_header = header
        # By column: the cells, the least width, and the width without wrapping.
        self._cells: list[list[Text]] = []
        self._min_widths: list[int] = []
        self._unwrapped_widths: list[int] = []
        for column in columns:
            cells = [_make_text(column.make_cell(row)) for row in rows]
            min_width, unwrapped_width = self._measure_column(column, cells)
            self._cells.append(cells)
            self._min_widths.append(min_width)
            self._unwrapped_widths.append(unwrapped_width)

    def fit(self, width: int) -> tuple[list[str], list[str]]:
        """Return the names of the columns that fit a terminal of this width, and of those that are dropped."""
        shown_indices, dropped_indices = self._choose_columns(width)
        return self._list_names(shown_indices), self._list_names(dropped_indices)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown_indices, dropped_indices = self._choose_columns(width)
        yield self._build_grid(shown_indices, width)
        if dropped_indices:
            dropped_names = ", ".join(dict.fromkeys(self._list_names(dropped_indices)))
            yield Text(
                f"not shown in {width} columns: {dropped_names}; a wider terminal or --json shows all",
                style="dim",
            )

    def _list_names(self, indices: Sequence[int]) -> list[str]:
        return [self._columns[index].name for index in indices]

    def _measure_column(self, column: TextColumn, cells: Sequence[Text]) -> tuple[int, int]:
        """Return the least width of a column, and its width without wrapping."""
        header = column.name.split("\n") if self._has_header else []
        lines = chain(header, *(cell.plain.split("\n") for cell in cells))
        unwrapped_width = max(map(cell_len, lines), default=1)
        if not column.wraps:
            width = max(unwrapped_width, column.min_width)
            return width, width
        # Words of the header and numbers (cells that are aligned right) never break; long words of other cells may.
        unbreakable_texts = [*header]
        if column.is_right_aligned:
            unbreakable_texts += [cell.plain for cell in cells]
        unbreakable_words = " ".join(unbreakable_texts).split()
        longest_word_width = max(map(cell_len, unbreakable_words), default=1)
        return min(unwrapped_width, max(column.min_width, longest_word_width)), unwrapped_width

    def _choose_columns(self, width: int) -> tuple[list[int], list[int]]:
        """Return the indices of the columns that are shown, and of those that are dropped."""
        shown_indices = list(range(len(self._columns)))
        # The sum counts a gap after each column; the gap after the last one needs no room.
        while sum(self._min_widths[index] + self._gap for index in shown_indices) > width + self._gap:
            max_priority = max(self._columns[index].drop_priority for index in shown_indices)
            if not max_priority:
                break
            shown_indices = [
                index for index in shown_indices if self._columns[index].drop_priority < max_priority
            ]
        return shown_indices, [
            index for index in range(len(self._columns)) if index not in shown_indices
        ]

    def _fit_widths(self, shown_indices: Sequence[int], width: int) -> list[int]:
        """Return the width of each column that is shown.

        The widest column that wraps shrinks first; if that is not enough, the cells of all columns break.
        """
        available_width = max(len(shown_indices), width - self._gap * (len(shown_indices) - 1))
        widths = [self._unwrapped_widths[index] for index in shown_indices]
        min_widths = [self._min_widths[index] for index in shown_indices]
        if sum(min_widths) > available_width:
            widths = min_widths
            min_widths = [1] * len(shown_indices)
        while sum(widths) > available_width:
            # The widest column that is above its least width shrinks by 1; of equally wide columns, the first.
            shrinkable = [
                position
                for position in range(len(shown_indices))
                if widths[position] > min_widths[position]
            ]
            widths[max(shrinkable, key=widths.__getitem__)] -= 1
        return widths

    def _build_grid(self, shown_indices: Sequence[int], width: int) -> Grid:
        """Return a table of rich with the columns that are shown."""
        padding = (0, self._gap, 0, 0)
        grid = Grid(
            box=None, pad_edge=False, header_style="dim", show_header=self._has_header, padding=padding
        )
        for index, column_width in zip(
            shown_indices, self._fit_widths(shown_indices, width), strict=True
        ):
            column = self._columns[index]
            justify: Literal["left", "right"] = "right" if column.is_right_aligned else "left"
            grid.add_column(
                Text(column.name),
                justify=justify,
                style=column.style,
                width=column_width,
                overflow="fold",
            )
        for row in zip(*(self._cells[index] for index in shown_indices), strict=True):
            grid.add_row(*row)
        return grid


def _make_text(cell: str | Text) -> Text:
    """Return a cell as a text of rich; control characters of a string are replaced."""
    return Text(safe(cell)) if isinstance(cell, str) else cell
