"""Prepare vector files (SVG and PDF): turn the cells of maps into rectangles, and embed fonts in an SVG."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import unescape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.lettering import font_code_points

if TYPE_CHECKING:
    from matplotlib.patches import PathPatch

# A text element of an SVG by matplotlib. Group 1 is its CSS style, group 2 its characters.
_SVG_TEXT = re.compile(r'<text style="([^"]*)"[^>]*>([^<]*)</text>')
_OVERLAP_PT = 0.1
"""The width of rectangles' outlines. Without outlines, viewers show thin gaps between adjacent rectangles."""


def cells_as_rectangles(
    maps: Sequence[tuple[tuple[float, float, float, float], NDArray[np.uint8]]],
) -> Iterator[PathPatch]:
    """Yield the cells of maps as matplotlib patches, one per colour. A patch has all rectangles of its colour.

    Adjacent cells of a row with equal colours become one rectangle.

    Args:
        maps: For each map, its box (x, y, width, height), and the RGBA colours of its cells, (row, column, 4).
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    # The boxes and the colours of all rectangles, one array per map. Each list starts with an empty array, as
    # np.concatenate needs at least one.
    boxes = [np.empty((0, 4))]
    colours = [np.empty(0, np.uint32)]
    for (x, y, width, height), pixels in maps:
        # View the four bytes of each colour as one integer, (row, column).
        codes = np.ascontiguousarray(pixels).view(np.uint32)[:, :, 0]
        rows, columns = codes.shape
        # Find the runs of equal colours in each row. A run starts in the first column, or where the colour changes.
        is_run_start = np.ones(codes.shape, bool)
        is_run_start[:, 1:] = codes[:, 1:] != codes[:, :-1]
        starts = np.flatnonzero(is_run_start)
        row, column = np.divmod(starts, columns)
        lengths = np.diff(starts, append=codes.size)
        # Make one box per run, (run, 4): first in cells, then converted to pixels of the page.
        run_boxes = np.stack([column, row, lengths, np.ones_like(row)], 1)
        cell = np.array([width / columns, height / rows] * 2)
        boxes.append(run_boxes * cell + np.array([x, y, 0, 0]))
        colours.append(codes.ravel()[starts])
    # Yield one patch per colour that is not transparent.
    all_boxes = np.concatenate(boxes)
    all_colours = np.concatenate(colours)
    outline = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    for code in np.unique(all_colours):
        red, green, blue, alpha = (code.reshape(1).view(np.uint8) / 255).tolist()
        if alpha:
            corners = box_outlines(all_boxes[all_colours == code])
            path = Path(corners.reshape(-1, 2), np.tile(outline, len(corners)))
            # The outline needs no alpha: matplotlib's colormaps are opaque, and only cells of NaN are transparent.
            yield PathPatch(
                path,
                facecolor=(red, green, blue, alpha),
                edgecolor=(red, green, blue),
                linewidth=_OVERLAP_PT,
            )


def box_outlines(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the outlines of boxes. The boxes (x, y, width, height) are (box, 4), the closed outlines (box, 5, 2)."""
    x, y, width, height = boxes.T
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y))
    return np.stack([np.stack(corner, 1) for corner in corners], 1)


def embed_fonts(svg: bytes, families: Sequence[str]) -> bytes:
    """Embed into an SVG the parts of the fonts that its text needs.

    The file then looks the same on every machine, and its text can still be searched and edited.

    Args:
        svg: A file that matplotlib wrote with `svg.fonttype` "none", which keeps text as text.
        families: The font families. A character is drawn with the first family that has it.
    """
    from matplotlib.font_manager import FontProperties, findfont

    # The characters used in each weight, 400 (regular) or 700 (bold). Our figures use no other weights and no italics.
    characters_by_weight: dict[int, set[str]] = {}
    for css, text in _SVG_TEXT.findall(svg.decode()):
        characters_by_weight.setdefault(700 if "font-weight: 700" in css else 400, set()).update(
            unescape(text)
        )
    # Take each character from the first family that has it.
    font_faces = []
    for weight, missing in sorted(characters_by_weight.items()):
        for family in families:
            path = str(findfont(FontProperties(family=family, weight=weight)))
            present = frozenset(char for char in missing if ord(char) in font_code_points(path))
            missing -= present
            if present:
                data = _subset_font(path, present)
                font_faces.append(
                    f"\n@font-face {{ font-family: '{family}'; font-weight: {weight}; font-style: normal; "
                    f"src: url(data:font/woff;base64,{data}) }}"
                )
    return svg.replace(b"</style>", "".join(font_faces).encode() + b"</style>", 1)


@lru_cache(maxsize=64)
def _subset_font(path: str, characters: frozenset[str]) -> str:
    """Return a font with only some characters, as WOFF in base64. Equal arguments give equal bytes."""
    from fontTools import subset

    # Keep kerning and the positions of marks. Drop all time stamps, so that the bytes are reproducible.
    options: Any = subset.Options(
        flavor="woff", layout_features=["kern", "mark", "mkmk", "ccmp"], notdef_outline=True
    )
    options.recalc_timestamp = False
    options.drop_tables.append("FFTM")  # FontForge's time stamps
    options.font_number = 0  # in a collection (.ttc), take the first font
    content = io.BytesIO()
    with subset.load_font(path, options) as font:
        subsetter = subset.Subsetter(options)
        subsetter.populate(unicodes=sorted(map(ord, characters)))
        subsetter.subset(font)
        subset.save_font(font, content, options)
    return base64.b64encode(content.getvalue()).decode()
