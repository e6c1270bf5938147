"""Make vector files: cells become rectangles instead of pixels, and an SVG carries its letters."""

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

from attnscope.drawing.lettering import charmap

if TYPE_CHECKING:
    from matplotlib.patches import PathPatch

_TEXT = re.compile(r'<text style="([^"]*)"[^>]*>([^<]*)</text>')
_OVERLAP_PT = 0.1
"""The width of the outlines of rectangles. Without them, viewers show the background between two that touch."""


def cells_as_rectangles(
    maps: Sequence[tuple[tuple[float, float, float, float], NDArray[np.uint8]]],
) -> Iterator[PathPatch]:
    """Yield the cells of maps as rectangles, one patch per colour. Adjacent cells of a row with equal colours are one.

    Args:
        maps: The box of each map (x, y, width, height), and the colours of its cells, (row, column, 4), RGBA.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    # The boxes of all rectangles, and their colours: arrays to concatenate, of which the first, for no maps, is empty.
    boxes = [np.empty((0, 4))]
    colours = [np.empty(0, np.uint32)]
    for (x, y, width, height), pixels in maps:
        # Four bytes of colour as one number: (row, column).
        codes = np.ascontiguousarray(pixels).view(np.uint32)[:, :, 0]
        rows, columns = codes.shape
        # Runs of one colour in a row begin where it changes.
        begins = np.ones(codes.shape, bool)
        begins[:, 1:] = codes[:, 1:] != codes[:, :-1]
        starts = np.flatnonzero(begins)
        row, column = np.divmod(starts, columns)
        lengths = np.diff(starts, append=codes.size)
        # A box per run, (run, 4), from columns, rows and lengths in cells to pixels of the page.
        run_boxes = np.stack([column, row, lengths, np.ones_like(row)], 1)
        cell = np.array([width / columns, height / rows] * 2)
        boxes.append(run_boxes * cell + np.array([x, y, 0, 0]))
        colours.append(codes.ravel()[starts])
    # A patch per colour that is not transparent.
    all_boxes = np.concatenate(boxes)
    all_colours = np.concatenate(colours)
    outline = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    for code in np.unique(all_colours):
        red, green, blue, alpha = (code.reshape(1).view(np.uint8) / 255).tolist()
        if alpha:
            corners = vertices_of(all_boxes[all_colours == code])
            path = Path(corners.reshape(-1, 2), np.tile(outline, len(corners)))
            yield PathPatch(
                path,
                facecolor=(red, green, blue, alpha),
                edgecolor=(red, green, blue),
                linewidth=_OVERLAP_PT,
            )


def vertices_of(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the corners of boxes (x, y, width, height), (box, 4), as closed lines, (box, 5, 2)."""
    x, y, width, height = boxes.T
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y))
    return np.stack([np.stack(corner, 1) for corner in corners], 1)


def embed_fonts(svg: bytes, families: Sequence[str]) -> bytes:
    """Return an SVG with the letters that its text needs: it looks the same everywhere, and can be searched and edited.

    Args:
        svg: A file that matplotlib wrote with `svg.fonttype` "none".
        families: The fonts, in the order in which a character is looked for.
    """
    from matplotlib.font_manager import FontProperties, findfont

    # The characters that are written in each weight: regular, 400, or bold, 700. None are italic.
    used: dict[int, set[str]] = {}
    for css, text in _TEXT.findall(svg.decode()):
        used.setdefault(700 if "font-weight: 700" in css else 400, set()).update(unescape(text))
    # The first family that has a character provides it.
    faces = []
    for weight, missing in sorted(used.items()):
        for family in families:
            path = str(findfont(FontProperties(family=family, weight=weight)))
            present = frozenset(char for char in missing if ord(char) in charmap(path))
            missing -= present
            if present:
                data = _subset(path, present)
                faces.append(
                    f"\n@font-face {{ font-family: '{family}'; font-weight: {weight}; font-style: normal; "
                    f"src: url(data:font/woff;base64,{data}) }}"
                )
    return svg.replace(b"</style>", "".join(faces).encode() + b"</style>", 1)


@lru_cache(maxsize=64)
def _subset(path: str, characters: frozenset[str]) -> str:
    """Return the part of a font that holds some characters, as WOFF in base64; the same bytes every time."""
    from fontTools import subset

    # Kerning and marks stay. Without times, the bytes are the same every time.
    options: Any = subset.Options(
        flavor="woff", layout_features=["kern", "mark", "mkmk", "ccmp"], notdef_outline=True
    )
    options.recalc_timestamp = False
    options.drop_tables.append("FFTM")  # FontForge's times
    options.font_number = 0  # the first font of a collection
    content = io.BytesIO()
    with subset.load_font(path, options) as font:
        subsetter = subset.Subsetter(options)
        subsetter.populate(unicodes=sorted(map(ord, characters)))
        subsetter.subset(font)
        subset.save_font(font, content, options)
    return base64.b64encode(content.getvalue()).decode()
