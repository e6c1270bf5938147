"""A record as HTML, for notebooks: what its command prints."""

from __future__ import annotations

import io

from attnscope.records.record import Record
from attnscope.views.plain_text import open_console

WIDTH = 110
"""Characters in a line; a notebook scrolls what is wider."""

_PAGE = '<pre style="font-family: monospace; line-height: 1.2; overflow-x: auto">{code}</pre>'


def to_html(record: Record) -> str:
    """The tables of a record, with their colours; letters that HTML would obey are escaped."""
    console = open_console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    record.record_kind().view("show")(record, console)
    return console.export_html(inline_styles=True, code_format=_PAGE)
