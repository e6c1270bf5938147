"""A record in a notebook: what its command prints as HTML, and its page, live."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError
from attnscope.records.frame.record import Record
from attnscope.records.maps.heatmap import Heatmap
from attnscope.views.page.document import Page
from attnscope.views.tables.plain_text import open_console, print_record

if TYPE_CHECKING:
    from attnscope.views.pages.widget import Widget

WIDTH = 110
"""Characters in a line; a notebook scrolls what is wider."""

MOST_LIVE = 1 << 24
"""A record of more numbers shows itself still; `widget` shows it live all the same."""

STILL = "ATTNSCOPE_STILL"
"""The environment variable with which records never show themselves live."""

_PAGE = '<pre style="font-family: monospace; line-height: 1.2; overflow-x: auto">{code}</pre>'


def to_html(record: Record) -> str:
    """The tables of a record, with their colours; letters that HTML would obey are escaped."""
    console = open_console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    print_record(record, console)
    return console.export_html(inline_styles=True, code_format=_PAGE)


def to_live(record: Record) -> dict[str, Any]:
    """What makes a notebook show the page of a record, by its media type; empty where it cannot or should not.

    It can where a kernel runs and anywidget is installed, and should where the record is not too large.
    """
    if not (record.record_kind().page and _has_kernel() and importlib.util.find_spec("anywidget")):
        return {}
    if os.environ.get(STILL) or sum(array.size for array in record.arrays().values()) > MOST_LIVE:
        return {}
    # One per record, however often it is shown: a widget and its page live as long as the kernel.
    live: Any = record.__dict__.get("_widget")
    if live is None:
        try:
            live = widget(record)
        except AttnscopeError:  # of a record with nothing to show the table says so
            return {}
        object.__setattr__(record, "_widget", live)
    bundle, _ = live._repr_mimebundle_()
    return {name: value for name, value in bundle.items() if name != "text/plain"}


def widget(shown: Record | Page, *, height: int = 640) -> Widget:
    """Shows a record or a page live in a notebook: what is chosen there is known in Python, and the other way round.

        shown = attnscope.widget(record)
        shown                # in a cell of its own: the page
        shown.head           # "L3H1", after it was clicked
        shown.query = "it"   # the page follows

    Args:
        shown: A record of attention (also pooled), heads, relations, an ablation, a comparison or an atlas; or a page,
            as `attnscope.page` makes it of several texts.
        height: Of the frame, in pixels.

    Raises:
        AttnscopeError: anywidget is not installed, records of this kind have no page, or this one has nothing to show.
    """
    try:
        from attnscope.views.pages.widget import Widget
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("attnscope"):
            raise
        raise AttnscopeError("showing a record live needs anywidget", "pip install 'attnscope[notebook]'") from None
    if isinstance(shown, Page):
        return Widget(shown.html, height=height)
    page: Page = shown.page()
    if isinstance(shown, Heatmap):
        shown = (shown.with_pictures_as_one() if shown.pictures else shown).make_square()  # as its page has it
    return Widget(page.html, shown, height=height)


def _has_kernel() -> bool:
    """Whether this runs in a notebook's kernel, not in a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
