"""Draw records of attention weights as figures: of a text, a pooled long text, a picture or a recording."""

from __future__ import annotations

from collections.abc import Iterator

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.files import first_png
from attnscope.drawing.style import Style
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.heatmap_sheets import Plate, draw_plates
from attnscope.questions.pooled import PooledHeatmap


def plates_of(record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None) -> Iterator[Plate]:
    """Yield what is in each figure of a record, the overview first.

    Args:
        record: What to draw.
        style: By default on a fixed scale, pictures and recordings each head by its own.
        query: Of text: also draws what this token attends to in all heads. Of pictures: whose attention is drawn.

    Raises:
        AttnscopeError: The query names nothing.
    """
    from attnscope.questions import heatmap_senses, heatmap_texts

    style = style or Style(record.usual_scale)  # type: ignore[arg-type]  # one of the scales
    if isinstance(record, PooledHeatmap):
        return heatmap_texts.pooled_plates(record, style, query)
    if record.picture is not None:
        return heatmap_senses.picture_plates(record, style, query)
    if record.pictures:
        return heatmap_senses.word_plates(record, style, query)
    if record.sound is not None:
        return heatmap_senses.sound_plates(record, style, query)
    return heatmap_texts.text_plates(record, style, query)


def pages(
    record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None
) -> Iterator[tuple[str, Drawing]]:
    """Yield the figures of a record one after the other, each with its file name without the ending."""
    style = style or Style(record.usual_scale)  # type: ignore[arg-type]  # one of the scales
    return draw_plates(plates_of(record, style, query), style)


def glance(record: Heatmap | PooledHeatmap) -> bytes:
    """Return the first figure of a record as a PNG, for notebooks."""
    return first_png(pages(record))


def require_query(record: Heatmap | PooledHeatmap, query: str | None) -> None:
    """Refuse a query that names nothing."""
    if query is not None:
        next(plates_of(record, query=query), None)
