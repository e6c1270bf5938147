"""Attention of a vision model laid over the picture that it saw.

A weight is a colour of the colormap, the same everywhere on a figure; the photo, in grey, only makes it lighter or
darker, by no more than a part, so that weights can be told on dark photos and on bright ones. Nothing is smoothed:
a patch is a square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, MARK, colormap
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import Scale, Style, meanings
from attnscope.errors import AttnscopeError
from attnscope.records import AttentionMap, Heatmap
from attnscope.records.maps.pictures import MEAN, Picture
from attnscope.report.wording import run_notes
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

Pixels = NDArray[np.uint8]

DARKEST = 0.6
"""How much of a colour is left where the photo is black."""

_HALO = "#ffffff"
_LARGEST_SINGLE_PX, _LARGEST_PANEL_PX, _LARGEST_SMALL_PX, _PHOTO_PX = 760, 420, 300, 224
_TOP_PX, _GAP_PX, _CAPTION_PX = 92, 10, 24
_SMALL_PANEL_PX = 130  # on paper of a given width
_MOST_BESIDE = 3  # overlays that stand in one row with the photo
_MEANING = meanings(
    "attention weight: the share of the query's attention that a patch gets",
    "attention weight ÷ the largest weight of the same head on a patch",
)


def query_of(attention: AttentionMap, query: str | None) -> tuple[int, str]:
    """The token whose attention is drawn, -1 for the mean over all patches; and its name.

    A query is "CLS", "REG0", a patch as "row,column", a place such as `@3`, or "mean"; None = CLS, or where there is
    none, "mean".
    """
    tokens = attention.queries
    if query is None:
        query = "CLS" if "CLS" in tokens.labels else MEAN
    if query.casefold() == MEAN:
        return -1, "mean over patches"
    places = tokens.find_one(query.replace(" ", ""))
    if not places:
        special = "".join(f"{tokens.labels[token]}, " for token in np.flatnonzero(tokens.special))
        raise AttnscopeError(
            f"no patch is {query!r}",
            f"there are {special}mean, and patches from 0,0 to {tokens.labels[-1]} (row,column)",
        )
    return places[0], tokens.labels[places[0]]


def row_of(attention: AttentionMap, pair: tuple[int, int], query: int) -> NDArray[np.float64]:
    """The attention of a query to each token, (key,); for -1 the mean over all patches."""
    weights = attention.of(*pair).astype(np.float64)
    row: NDArray[np.float64] = weights[~attention.queries.special].mean(0) if query < 0 else weights[query]
    return row


def over_patches(record: Heatmap, pair: tuple[int, int], query: int) -> NDArray[np.float64]:
    """The attention of a query to each patch, (row, column)."""
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    return row_of(attention, pair, query)[~attention.keys.special].reshape(picture.grid)


def sheets_of(record: Heatmap, query: str | None = None) -> list[Sheet]:
    """The figures that a record is drawn as: an overview and a figure a layer, or one of the heads that were picked."""
    token, name = query_of(record.maps[0], query)
    mark = MEAN if token < 0 else name.replace(",", "-")
    heads = record.chosen(record.maps[0])
    return sheets_of_heads(heads, picked=record.picked is not None, query=token, after=f"-{mark}")


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending; a query is as of `query_of`."""
    style = style or Style("head")
    return ((sheet.stem, PicturePage(record, sheet, style)) for sheet in sheets_of(record, query))


def overlay(picture: Picture, patches: NDArray[np.float64], cell: int, cmap: Colormap, top: float) -> Pixels:
    """A picture with a number for each patch, (row, column), laid over it: (row * cell, column * cell, 3).

    The colormap is of 0 to `top`; a patch is `cell` pixels wide and high.
    """
    photo = _resize(picture, cell).astype(np.float64) / 255
    grey = np.asarray(photo @ np.array([0.2126, 0.7152, 0.0722]))
    return _tint(cmap(np.clip(patches / top, 0, 1))[:, :, :3].repeat(cell, 0).repeat(cell, 1), grey)


def _tint(colours: NDArray[np.float64], grey: NDArray[np.float64]) -> Pixels:
    """Colours over a photo, which is 0 to 1."""
    return np.rint(255 * colours * (DARKEST + (1 - DARKEST) * grey[:, :, None])).astype(np.uint8)


def _resize(picture: Picture, cell: int) -> Pixels:
    """The picture, a patch being `cell` pixels wide and high."""
    from PIL import Image

    rows, columns = picture.grid
    size = (columns * cell, rows * cell)
    return np.asarray(Image.fromarray(picture.pixels).resize(size, Image.Resampling.LANCZOS))


class PicturePage(Page):
    """A figure: the photo, the colour bar, and overlays of heads; everything on one Axes."""

    names_px = 52
    meaning: Mapping[Scale, str] = _MEANING

    def names(self) -> list[tuple[str, str]]:
        """The names of each head's row and column in the overview."""
        return self.sheet.names

    def name_panel(self, pair: tuple[int, int]) -> str:
        """The title of a panel."""
        return f"L{pair[0]}H{pair[1]}"

    def title(self) -> str:
        """The title of the figure."""
        return f"{self.sheet.subject}: what {self._name_query()} attends to"

    def about(self) -> str:
        """The line above the colours."""
        return f"query: {self._name_query()}"

    def __init__(self, record: Heatmap, sheet: Sheet, style: Style) -> None:
        assert record.picture is not None
        self.record, self.sheet, self.style, self.picture = record, sheet, style, record.picture
        self.cmap = colormap(style.cmap)
        self.attention = record.maps[0]
        title = f"{record.run.get('model', 'model')} · {self.title()}"
        paper, n = style.paper, len(sheet.heads)
        lettering = lettering_for([title, self.picture.facts], paper)
        room = paper.room_px / (n + 1) if paper.fixed else math.inf
        # The photo stands beside a few overlays, as large as these.
        few = sheet.form == "grid" and n <= _MOST_BESIDE and room >= _SMALL_PANEL_PX
        self.beside = sheet.form == "single" or few
        self.cell, self.columns = self._sizes(paper)
        rows, columns = self.picture.grid
        self.panel = (columns * self.cell, rows * self.cell)
        left, top, self.pitch = self._pitch()
        content = left + self.columns * self.pitch[0] - _GAP_PX
        super().__init__(paper.width_for(layout.MIN_WIDTH_PX, content + layout.MARGIN_PX), lettering)
        self.head(title, self.picture.facts)
        maps = [over_patches(record, pair, sheet.query) for pair in sheet.heads]
        tops = [float(patches.max()) for patches in maps]
        limits = style.limits(tops)
        # In the middle of what is wider than the page asks for nothing; else spare room goes to both sides.
        shift = (self.width_px - layout.MARGIN_PX - content) // 2 if sheet.form != "overview" else 0
        if sheet.form == "overview":
            self.corners = [(left + column * self.pitch[0], top + row * self.pitch[1]) for row, column in sheet.places]
        else:
            self.corners = layout.tile(n, self.columns, (left + shift, top), self.pitch)
        for corner, patches, limit in zip(self.corners, maps, limits, strict=True):
            self._put(corner, overlay(self.picture, patches, paper.image_px(self.cell), self.cmap, limit), self.cell)
        self._draw_photo(left + shift, top)
        self._draw_bar(limits[0] if style.scale == "figure" else 1.0)
        if sheet.form == "overview":
            self.name_panels(self.names(), self.corners, self.panel, self.pitch[0])
        else:
            self._write_captions(tops)
        below = math.ceil(top + math.ceil(n / self.columns) * self.pitch[1]) + (50 if self.beside else 0)
        self.finish(below + 14, [*([self.meaning[style.scale]] if paper.is_narrow else []), *self._notes()])

    def _sizes(self, paper: Paper) -> tuple[float, int]:
        """Pixels of a patch, and how many overlays stand side by side; on paper they fill its width."""
        (rows, columns), n, room, most = self.picture.grid, len(self.sheet.heads), paper.room_px, _LARGEST_PANEL_PX
        if self.beside:
            side, wide = n, room / (n + 1) - _GAP_PX
            most = _LARGEST_SINGLE_PX if n == 1 else _LARGEST_PANEL_PX
        elif self.sheet.form == "overview":
            side, most = len(self.sheet.columns), _LARGEST_SMALL_PX
            wide = (room - self.names_px + _GAP_PX) / side - _GAP_PX
        else:
            side = min(layout.columns_for(n), 6)
            while paper.fixed and side > 1 and room / side < _SMALL_PANEL_PX:
                side -= 1
            wide = min(room / side - _GAP_PX, _LARGEST_PANEL_PX)
        cell = wide / columns
        return (cell if paper.fixed else paper.whole(min(cell, most / max(rows, columns)))), side

    def _pitch(self) -> tuple[float, float, tuple[float, float]]:
        """Left and upper edge of the overlays, and the distances between them."""
        width, height = self.panel
        if self.beside:
            left = layout.MARGIN_PX + width + _GAP_PX * 2
            return left, _TOP_PX + _CAPTION_PX, (width + _GAP_PX, height + _CAPTION_PX)
        top = _TOP_PX + self._photo_px()[1] + 44
        if self.sheet.form == "overview":
            return layout.MARGIN_PX + self.names_px, top + 6, (width + _GAP_PX, height + _GAP_PX)
        return layout.MARGIN_PX, top + _CAPTION_PX, (width + _GAP_PX, height + 2 * _CAPTION_PX)

    def _photo_px(self) -> tuple[int, int]:
        """Width and height of the photo where it is small."""
        rows, columns = self.picture.grid
        most = _PHOTO_PX if not self.style.paper.fixed else _SMALL_PANEL_PX
        cell = max(1, most // max(rows, columns))
        return columns * cell, rows * cell

    def _put(self, corner: tuple[float, float], pixels: Pixels, cell: float) -> None:
        rows, columns = self.picture.grid
        self.image((*corner, columns * cell, rows * cell)).set_data(pixels)
        self._mark(corner, cell)

    def _mark(self, corner: tuple[float, float], cell: float) -> None:
        """Frames the query, where it is a patch."""
        query, special = self.sheet.query, self.attention.queries.special
        if query < 0 or special[query]:
            return
        row, column = divmod(int((~special[:query]).sum()), self.picture.grid[1])
        x, y = corner[0] + column * cell, corner[1] + row * cell
        for color, gap, thick in ((_HALO, 2.0, 3.0), (MARK, 1.0, 2.0)):
            self.outline([(x - gap, y - gap, cell + 2 * gap, cell + 2 * gap)], color, thick, animated=True)

    def _draw_photo(self, left: float, top: float) -> None:
        if self.beside:
            corner, cell = (left - self.panel[0] - 2 * _GAP_PX, top), self.cell
        else:
            corner, cell = (layout.MARGIN_PX, _TOP_PX), self._photo_px()[0] / self.picture.grid[1]
        self._put(corner, _resize(self.picture, self.paper.image_px(cell)), cell)
        if self.beside:
            self.entitle(corner[0], corner[1] - 12, "the picture")

    def _draw_bar(self, top: float) -> None:
        """The colours, as they are over bright and over dark parts of the photo."""
        narrow = self.paper.is_narrow
        if self.beside:
            x, y = self.corners[0][0] - self.panel[0] - 2 * _GAP_PX, self.corners[0][1] + self.panel[1] + 16
            x += 8 if self.paper.fixed else 0
        else:
            x, y = layout.MARGIN_PX + self._photo_px()[0] + 28, _TOP_PX + self._photo_px()[1] // 2
            room = self.width_px - layout.MARGIN_PX - x
            self.entitle(x, y - 34, self.lettering.fit(self.about(), layout.PANEL_TITLE_PX * 1.12, room))
        width = 420 if not self.paper.fixed else math.floor(min(420, self.width_px - layout.MARGIN_PX - x - 90))
        if self.beside and not narrow:  # as wide as the photo, so that there is room for what colours mean
            width = min(width, math.floor(self.panel[0]))
        height = 18 if not self.paper.fixed else 26
        ramp = self.cmap(np.linspace(0, 1, width))[None, :, :3].repeat(height, 0)
        grey = np.ones((height, width))
        grey[height // 2 :] = 0
        self.image((x, y, width, height)).set_data(_tint(ramp, grey))
        self.frames([(x, y, width, height)])
        size = layout.CAPTION_PX
        self.write(x + width + 16, y + height / 4, "over white", size * 0.85, ha="left", color=FAINT)
        self.write(x + width + 16, y + height * 3 / 4 + 2, "over black", size * 0.85, ha="left", color=FAINT)
        if not narrow:
            meaning = self.lettering.fit(
                self.meaning[self.style.scale], size, self.width_px - layout.MARGIN_PX - (x + width + 100)
            )
            self.write(x + width + 100, y + height / 2, meaning, size, ha="left")
        self.draw_scale((x, y, width, height), None, (0.0, top))

    def _write_captions(self, tops: Sequence[float]) -> None:
        """Writes above each overlay which head it is, its largest weight, and what went to tokens without a place."""
        width_of, size = self.lettering.width_px, layout.CAPTION_PX
        for pair, (x, y), top in zip(self.sheet.heads, self.corners, tops, strict=True):
            name, parts = self.name_panel(pair), self._caption(pair, top)
            self.entitle(x, y - 12, name)
            room = self.panel[0] - width_of(name, layout.PANEL_TITLE_PX) * 1.2 - 10
            while self.paper.fixed and len(parts) > 1 and width_of(" · ".join(parts), size) > room:
                parts.pop()
            text = self.lettering.fit(" · ".join(parts), size, room)
            self.write(x + self.panel[0], y - 12, text, size, ha="right", color=FAINT)

    def _caption(self, pair: tuple[int, int], top: float) -> list[str]:
        """The facts above a panel beside its title, the most important first."""
        row, keys = row_of(self.attention, pair, self.sheet.query), self.attention.keys
        shares: dict[str, float] = {}
        for key in np.flatnonzero(keys.special):
            name = keys.labels[key].rstrip("0123456789")
            shares[name] = shares.get(name, 0.0) + float(row[key])
        return [f"max {top:.3g}", *(f"{name} {share:.2f}" for name, share in shares.items())]

    def _name_query(self) -> str:
        query, tokens = self.sheet.query, self.attention.queries
        if query < 0:
            return "the mean over all patches"
        return tokens.labels[query] if tokens.special[query] else f"patch {tokens.labels[query]}"

    def _notes(self) -> list[str]:
        notes = ["a square is a patch, nothing is smoothed"]
        if self.sheet.query < 0:
            notes.append("the mean over all patches as queries")
        elif not self.attention.queries.special[self.sheet.query]:
            notes.append("framed: the query")
        keys = self.attention.keys
        special = [keys.labels[key] for key in np.flatnonzero(keys.special)]
        if special:
            notes.append(f"what goes to {', '.join(special)} has no place in the picture")
        if "hide_special" in self.record.changes:
            notes.append("tokens that are no patches are hidden; each row is divided by what is left of it")
        return notes + run_notes(self.record.run)
