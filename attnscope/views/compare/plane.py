"""All heads as discs in the plane that keeps their distances best, by layer and by role."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, Number, colormap
from attnscope.drawing.inks import hex_of, ink_on
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import Page
from attnscope.drawing.plots import spread
from attnscope.records.compare.record import HeadComparison
from attnscope.records.frame.pair_tables import HeadPlace
from attnscope.report.wording import label
from attnscope.views.compare.summary import table_line, table_notes, texts_line, title_of
from attnscope.views.heads.summary import UNCLASSIFIED, Mark, marks_for

NO_ROLE = "#e9e9e9"
"""The colour of heads without a role."""

_LAYERS = "viridis"
_TOP_PX = layout.MARGIN_PX + 62
_NAMES_PX = 110  # of layers and roles beside a map on paper
_PLANE_PX = 720
_MOST_NUMBERED = 300  # heads on a map; of more the numbers would hide the map


def map_page(comparison: HeadComparison, lettering: Lettering) -> Page:
    """Heads in the plane that keeps their distances best, coloured by layer, and beside that by role."""
    table, arrangement, heads = comparison.tables[0], comparison.arrangements[0], comparison.heads
    paper, colors, numbered = lettering.paper, layer_colors(heads), len(heads) <= _MOST_NUMBERED
    discs = [(colors[layer], str(head) if numbered else "") for layer, head in heads]
    panels = [("colour: layer · number: head", discs, [(f"L{layer}", color, "") for layer, color in colors.items()])]
    if comparison.roles is not None:
        marks = marks_for(set(comparison.roles) - {""})
        none = Mark("", NO_ROLE)
        discs = [(mark.color, mark.glyph * numbered) for mark in (marks.get(role, none) for role in comparison.roles)]
        panels.append(("colour and letter: strongest role", discs, role_entries(comparison.roles, marks)))
    beside, plane = not paper.is_narrow, _PLANE_PX
    if paper.fixed:
        plane = paper.room_px if not beside else (paper.room_px - 30 * (len(panels) - 1)) // len(panels) - _NAMES_PX
    pitch = plane + 30 + (180 if not paper.fixed else _NAMES_PX)
    low, high = arrangement.places.min(0, initial=0.0), arrangement.places.max(0, initial=0.0)
    extent = float((high - low).max()) * 1.1 or 1.0
    tall = max(min(320, plane), math.ceil(plane * min(1.0, (float(high[1] - low[1]) / extent) + 0.1)))
    radius, lettered = _disc_px(len(heads), plane, paper)
    page = Page(paper.width_for(2 * layout.MARGIN_PX + len(panels) * pitch - 30), lettering)
    page.head(f"{title_of(comparison)}: a map", f"{table_line(table)} · {texts_line(comparison.corpus)}")
    left, top, bottom, scale = layout.MARGIN_PX, _TOP_PX + 26, 0.0, plane / extent
    for number, (heading, discs, entries) in enumerate(panels):
        box = (left, top, plane, tall)
        page.entitle(left, top - 12, heading if lettered else heading.partition(" · ")[0].partition(" and ")[0])
        page.frames([box])
        true = (arrangement.places - (low + high) / 2) * (scale, -scale) + (left + plane / 2, top + tall / 2)
        apart = spread(true, radius * 1.05, box) if lettered else true
        _draw_discs(page, true, apart, radius, [(color, text * lettered) for color, text in discs])
        _write_distance(page, box, scale, extent, apart)
        if beside:
            bottom = max(bottom, top + tall, page.legend(left + plane + 20, top + 10, "", entries) - 10)
            left += pitch
        else:
            bottom = page.legend(left, top + tall + 18, "", entries, max(1, paper.room_px // (220 if number else 66)))
            top = math.ceil(bottom) + 42
    shares = [f"{share:.0%}" for share in arrangement.explained]
    notes = [
        f"classical multidimensional scaling; the axes hold {shares[0]} and {shares[1]} of the variance: heads "
        "that are close here may still be far apart along others",
        *(["heads that would cover each other stand side by side: a line leads to the true place"] * lettered),
        *table_notes(table, comparison.kind),
        *([f"roles: {comparison.roles_source}"] if comparison.roles is not None else []),
    ]
    page.finish(bottom + (34 if beside else 46), notes)
    return page


def _disc_px(n: int, plane: float, paper: Paper) -> tuple[float, bool]:
    """The radius of discs on a plane of a width, and whether they have letters in them."""
    radius = 11.0 if n <= 100 else 8.5 if n <= _MOST_NUMBERED else 5.0
    if paper.fixed:  # discs of which none hides too many others; letters where they have room
        wanted = paper.least_px / 1.1
        radius = wanted if radius < wanted < plane / 60 else min(radius, max(3.0, plane / 45))
    if n <= _MOST_NUMBERED and radius * 1.1 >= paper.least_px:
        return radius, True
    return min(radius, max(3.0, plane / 80)), False


def _draw_discs(
    page: Page, true: NDArray[np.float64], apart: NDArray[np.float64], radius: float, discs: Sequence[tuple[str, str]]
) -> None:
    """Draws discs, each of a colour and with a text; from those that were moved a line leads to their true places.

    Where they overlap all the same, later ones lie over earlier ones and their texts.
    """
    page.lines(
        [pair for pair in np.stack([true, apart], 1).tolist() if math.dist(*pair) > 1], color=FAINT, width_px=0.9
    )
    for number, ((x, y), (color, text)) in enumerate(zip(apart.tolist(), discs, strict=True)):
        order = 3 + number * 1e-3
        page.dot((x, y), radius, color, order, 1.25)
        if text:
            page.outline_numbers([Number(x, y, text, radius * 1.1, ink_on(color), "bold")], order + 5e-4)


def _write_distance(page: Page, box: Box, scale: float, extent: float, discs: NDArray[np.float64]) -> None:
    """Draws how long a distance is on the map, in the corner with the fewest discs, the lower left one first."""
    length = layout.nice_ticks(extent / 4)[-1] or extent / 4
    room = np.array([length * scale, 16])
    near, far = np.array(box[:2]) + (18, 34), np.array(box[:2]) + box[2:] - (18 + room[0], 18)
    corners = [np.array([x, y]) for x in (near[0], far[0]) for y in (far[1], near[1])]

    def count_discs(corner: NDArray[np.float64]) -> int:
        return int((np.abs(discs - corner - room * (0.5, -0.5)) < room / 2 + 12).all(-1).sum())

    x, y = min(corners, key=count_discs).tolist()
    page.lines([[(x, y - 4), (x, y), (x + length * scale, y), (x + length * scale, y - 4)]], color=INK, width_px=1.4)
    page.write(x + length * scale / 2, y - 12, f"{length:g}", layout.CAPTION_PX, ha="center")


def role_entries(roles: Sequence[str], marks: dict[str, Mark]) -> list[tuple[str, str, str]]:
    """A legend's entries for roles: the name with how many heads have it, the colour and the letter."""
    entries = [(f"{label(name)} ({roles.count(name)})", mark.color, mark.glyph) for name, mark in marks.items()]
    n_none = roles.count("")
    return [*entries, (f"unclassified ({n_none})", NO_ROLE, UNCLASSIFIED)] if n_none else entries


def layer_colors(heads: Sequence[HeadPlace]) -> dict[int, str]:
    """A colour for each layer, from dark to light."""
    layers, cmap = sorted({layer for layer, _ in heads}), colormap(_LAYERS)
    return {layer: hex_of(cmap, 0.95 * number / max(1, len(layers) - 1)) for number, layer in enumerate(layers)}
