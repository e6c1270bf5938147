"""Records of attention weights as figures, whatever was read: text, a long text pooled, a picture, a recording."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.files import first_png
from attnscope.drawing.style import Style
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.pooled import PooledHeatmap


def pages(
    record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None
) -> Iterator[tuple[str, Drawing]]:
    """The figures of a record one after the other, each with its file name without the ending; overview first.

    Args:
        record: What to draw.
        style: By default on a fixed scale, pictures and recordings each head by its own.
        query: Of text: also draws bars of what this token attends to. Of pictures: whose attention is drawn.
    """
    figures: Iterator[tuple[str, Drawing]] = _module(record).pages(record, style, query)
    return figures


def glance(record: Heatmap | PooledHeatmap) -> bytes:
    """The first figure of a record as a PNG, for notebooks."""
    return first_png(pages(record))


def require_query(record: Heatmap | PooledHeatmap, query: str | None) -> None:
    """Refuses a query that means no token."""
    _module(record).sheets_of(record, query)


def _module(record: Heatmap | PooledHeatmap) -> ModuleType:
    """The module that draws a record: each loads what it needs only when there is something to draw."""
    name = "figures"
    if isinstance(record, PooledHeatmap):
        name = "pooled"
    elif record.picture is not None or record.pictures:
        name = "pictures"
    elif record.sound is not None:
        name = "sounds"
    return import_module(f"attnscope.views.maps.{name}")
