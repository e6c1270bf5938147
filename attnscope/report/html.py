"""A result in a notebook: what its command prints, as HTML."""

from __future__ import annotations

import io

from attnscope.report.plain_text import open_console, print_record
from attnscope.results.record import Record

WIDTH = 110
"""Characters in a line; a notebook scrolls what is wider."""

_PAGE = '<pre style="font-family: monospace; line-height: 1.2; overflow-x: auto">{code}</pre>'


def to_html(record: Record) -> str:
    """Return what the terminal prints of a result, with its colours; letters that HTML would obey are escaped."""
    console = open_console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    print_record(record, console)
    return console.export_html(inline_styles=True, code_format=_PAGE)
