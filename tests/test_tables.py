"""Tables in the terminal: no cell loses a letter without a sign, no line is too long, what is dropped is named."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from attnscope.report.plain_text import open_console
from attnscope.report.table import TextColumn, TextTable
from attnscope.results.result import load_record as load

RECORDS = sorted((Path(__file__).parent / "records").iterdir())
WIDTHS = (0, 20, 40, 60, 79, 80, 99, 100, 120, 200)


def printed(shown, width):
    console = open_console(file=io.StringIO(), width=width)
    console.print(shown)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def letters(text):
    return re.sub(r"\s", "", text)


def column_of(lines, start, width):
    """What stands in a column of the terminal, in cells."""
    found = ""
    for line in lines:
        at = 0
        for letter in line:
            if start <= at < start + width:
                found += letter
            at += cell_len(letter)
    return letters(found)


def require_whole(table, width):
    """Every cell of every column that is shown can be read, and every other column is named."""
    shown, dropped = table.fit(width)
    lines = printed(table, width)
    assert all(cell_len(line) <= width for line in lines)
    if dropped:
        named = ", ".join(dict.fromkeys(dropped))
        below = letters(f"not shown in {width} columns: {named}; a wider terminal or --json shows all")
        assert letters("".join(lines)).endswith(below)
    start = 0
    block = table._choose_columns(width)[0]
    for at, cells in zip(block, table._fit_widths(block, width), strict=True):
        seen = column_of(lines, start, cells)
        for text in table._cells[at]:
            assert letters(text.plain) in seen, (table._columns[at].name, text.plain, seen[:200])
        start += cells + table._gap
    assert len(shown) + len(dropped) == len(table._columns)


@pytest.mark.parametrize("path", RECORDS, ids=[path.name for path in RECORDS])
def test_no_record_loses_data_at_any_width(path, monkeypatch):
    tables = []
    init = TextTable.__init__

    def keep(self, *given, **more):
        init(self, *given, **more)
        tables.append(self)

    monkeypatch.setattr(TextTable, "__init__", keep)
    record = load(path)
    kind = record.record_kind()
    options = {"drawn": True, "has_page": False}
    if "measures" in kind.shown_with:
        options["measures"] = "all"
    for width in WIDTHS:
        tables.clear()
        console = open_console(file=io.StringIO(), width=width)
        console.print(
            kind.resolve("show")(
                record, console, **{name: options.get(name) for name in kind.shown_with}
            )
        )
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert lines, width
        assert all(cell_len(line) <= (width or 80) for line in lines)
        for table in tables:
            require_whole(table, width or 80)


WORDS = st.text("ab字 cd", max_size=30).map(str.strip)


@given(
    st.lists(
        st.tuples(WORDS, st.booleans(), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6
    ),
    st.lists(st.lists(WORDS, min_size=6, max_size=6), max_size=4),
    st.integers(20, 200),
)
def test_no_table_loses_data(columns, rows, width):
    def of(at):
        return lambda row: row[at]

    named = [
        TextColumn(f"{name}#{at}", of(at), wraps=wraps, min_width=least, drop_priority=drop * (at > 0))
        for at, (name, wraps, least, drop) in enumerate(columns)
    ]
    table = TextTable(named, rows)
    lines = printed(table, width)
    assert all(cell_len(line) <= width for line in lines)
    shown, dropped = table.fit(width)
    for at, column in enumerate(named):
        if column.name in shown:
            assert all(set(letters(row[at])) <= set(letters("".join(lines))) for row in rows)
    # What is dropped first has the largest number.
    least_dropped = min((column.drop_priority for column in named if column.name in dropped), default=99)
    assert all(column.drop_priority < least_dropped for column in named if column.name in shown)
