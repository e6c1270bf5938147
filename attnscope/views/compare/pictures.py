"""Two photos, or two questions: what words give to the picture in both, and the difference, laid over it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnscope.records.comparison import PicturePair
from attnscope.records.frame.pair_tables import head_name
from attnscope.views.compare.summary import PICTURE_NOTES, both_texts, distance, distance_name, key_name, title_of
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, colormap
from attnscope.views.drawing.lettering import lettering_for
from attnscope.views.drawing.page import Page
from attnscope.views.drawing.style import Style
from attnscope.views.maps.picture_figures import overlay
from attnscope.views.tables.wording import printable

HEADS = 4
"""How many heads the page shows."""
_DIFFERENCE = "RdBu_r"
_TOP_PX, _GAP_PX, _NAME_PX = 96, 14, 84
_MOST_PANEL_PX, _MOST_HIGH_PX = 470, 320


def maps_page(pair: PicturePair, style: Style) -> Page:
    """The heads that change most, a row each: in the first, in the second, the second minus the first.

    All maps of a row have one scale, the differences another one, both up to the largest of the row.
    """
    ranked = pair.ranked()[:HEADS]
    rows, columns = pair.pictures[0].grid
    words = ", ".join(dict.fromkeys(key_name(*pair.words[word]) for word in pair.asked))
    is_of_photos = pair.texts[0] == pair.texts[1]
    names = [printable(picture.source, 60) for picture in pair.pictures] if is_of_photos else [
        f"“{printable(text, 60)}”" for text in pair.texts
    ]  # fmt: skip
    lettering = lettering_for([title_of(pair), both_texts(pair), words, *names], style.paper)
    paper = style.paper
    room = (paper.room_px - _NAME_PX - 2 * _GAP_PX) / 3
    cell = min(room / columns, _MOST_PANEL_PX / columns, _MOST_HIGH_PX / rows)
    cell = cell if paper.fixed else max(1, int(cell))
    wide, high = columns * cell, rows * cell
    content = layout.MARGIN_PX + _NAME_PX + 3 * wide + 2 * _GAP_PX
    width = paper.width_for(layout.MIN_WIDTH_PX, int(content) + layout.MARGIN_PX)
    notes = [
        f"words: {words}, their mean",
        f"heads: those that change most, by {distance_name(pair.measure)}",
        "percentages: how much of the words' attention goes to the picture; points: the second minus the first",
        "darkest: the row's largest weight on a cell, its “max”; red: more in the second, blue: less",
        *PICTURE_NOTES,
    ]
    pitch = high + 40
    page = Page(width, lettering)
    page.head(title_of(pair), both_texts(pair))
    change = pair.at_query() if pair.queries else pair.overall()
    blank = [replace(picture, pixels=np.full_like(picture.pixels, 255)) for picture in pair.pictures]
    sharp = max(1, int(np.ceil(cell * paper.dpi / paper.inch_px)))
    left = layout.MARGIN_PX + _NAME_PX
    for number, name in enumerate([*names, "difference"]):
        name = lettering.fit(name, layout.PANEL_TITLE_PX, wide)
        page.entitle(left + number * (wide + _GAP_PX), _TOP_PX - 8, name)
    for line, head in enumerate(ranked):
        top = _TOP_PX + 24 + line * pitch
        before, after = pair.maps(head)
        moved = after - before
        most, far = (float(np.abs(values).max()) or 1.0 for values in (np.stack([before, after]), moved))
        page.entitle(layout.MARGIN_PX, top + 10, head_name(pair.heads[head]))
        page.write(layout.MARGIN_PX, top + 32, distance(change[head]), layout.CAPTION_PX, ha="left", color=FAINT)
        ground = pair.pictures[1] if not is_of_photos else blank[1]
        panels = (
            (pair.pictures[0], before, most, style.cmap, f"{before.sum():.0%} · max {before.max():.2g}"),
            (pair.pictures[1], after, most, style.cmap, f"{after.sum():.0%} · max {after.max():.2g}"),
            (ground, (moved / far + 1) / 2, 1.0, _DIFFERENCE, f"{round(100 * moved.sum()):+d} points · ±{far:.2g}"),
        )
        for number, (picture, values, limit, cmap, caption) in enumerate(panels):
            x = left + number * (wide + _GAP_PX)
            said = caption.replace("-", "−")
            if lettering.width_px(said, layout.CAPTION_PX) > wide:
                said = lettering.fit(said.partition(" · ")[0], layout.CAPTION_PX, wide)
            page.write(x, top - 10, said, layout.CAPTION_PX, ha="left", color=FAINT)
            page.image((x, top, wide, high)).set_data(overlay(picture, values, sharp, colormap(cmap), limit))
            page.frames([(x, top, wide, high)])
    page.finish(int(_TOP_PX + 24 + max(1, len(ranked)) * pitch), notes)
    return page
