"""One Axes in pixels: the static part is drawn once, and what changes from figure to figure is drawn over it.

Text is what makes attention figures slow: 12 heads of 16 tokens have 384 labels. So a canvas draws its labels once and
keeps the picture; each further figure of the same text restores it and adds its maps (what matplotlib calls blitting).
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, UsageError
from attnscope.records import write_whole
from attnscope.records.frame.kinds import FIGURE_FORMATS
from attnscope.version import VERSION
from attnscope.views.drawing import layout
from attnscope.views.drawing.lettering import BASE_FAMILY, Lettering
from attnscope.views.drawing.vectors import cells_as_rectangles, embed_fonts, vertices_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

Box = tuple[float, float, float, float]
"""x, y, width, height in pixels."""

FontStyle = Literal["plain", "bold", "italic"]

DPI = 100
INK, FAINT, LINE = "#1a1a1a", "#6f6f6f", "#b8b8b8"

# The same input gives the same bytes: no dates, and ids in SVG that do not depend on chance.
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": f"attnscope {VERSION}"},
    "pdf": {"CreationDate": None, "Creator": f"attnscope {VERSION}"},
}
_RC: Any = {"svg.hashsalt": "attnscope", "pdf.fonttype": 42, "svg.fonttype": "none"}
# The settings of matplotlib that can change a figure.
_SHIPPED = (
    *("agg.", "axes.", "figure.", "font.", "image.", "lines."),
    *("patch.", "path.", "pdf.", "savefig.", "svg.", "text."),
)
MOST_VECTOR_CELLS = 64
"""Rows and columns of a map up to which its cells are rectangles in vector files; larger ones are images there."""

_HALF_DIGIT = 0.365  # of the font size: the middle of digits over the line that they stand on
_MOST_PIXELS = 400_000_000  # a PNG of more takes over a gigabyte to draw


@contextmanager
def matplotlib_defaults() -> Iterator[None]:
    """Within it matplotlib has its own defaults: a user's style must not change figures, or ask for LaTeX."""
    import matplotlib as mpl

    wanted: Any = {name: value for name, value in mpl.rcParamsDefault.items() if name.startswith(_SHIPPED)}
    with mpl.rc_context(wanted | _RC):
        yield


class Drawing:
    """A figure of matplotlib, as pixels and as vectors; `families` are the fonts that its letters are from."""

    def __init__(self, figure: Figure, families: Sequence[str]) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self.figure, self.families = figure, families
        self.agg: Any = FigureCanvasAgg(figure)

    @property
    def dpi(self) -> int:
        """Pixels an inch."""
        return round(self.figure.dpi)

    def pixels(self) -> NDArray[np.uint8]:
        """The figure as it stands now, (height, width, 3)."""
        self.require_drawable()
        self.agg.draw()
        return np.array(np.asarray(self.agg.buffer_rgba())[:, :, :3])

    def vector(self, kind: str) -> bytes:
        """The figure as it stands now as SVG or PDF, the same bytes every time."""
        held = io.BytesIO()
        self.figure.savefig(held, format=kind, metadata=_METADATA[kind])
        return held.getvalue() if kind != "svg" else embed_fonts(held.getvalue(), self.families)

    def require_drawable(self) -> None:
        """Refuses more pixels than can be drawn.

        Raises:
            AttnscopeError: There are.
        """
        width, height = (round(inches * self.dpi) for inches in self.figure.get_size_inches())
        if max(width, height) >= 2**16 or width * height > _MOST_PIXELS:
            raise AttnscopeError(
                f"a PNG of {width:,} x {height:,} pixels is too large to draw", "lower --dpi, or draw svg or pdf"
            )


def write_pages(
    pages: Iterable[tuple[str, Drawing]], folder: str | Path, formats: Sequence[str], threads: int = 2
) -> list[Path]:
    """Writes figures into a folder, each file whole or not at all; the same figures give the same bytes.

    Args:
        pages: The file name of each without its ending, and the figure; it may change once the next one is asked for.
        folder: Where to; made if it is not there.
        formats: Some of "png", "svg", "pdf".
        threads: How many threads compress and write beside drawing (zlib lets others run meanwhile); 0 = none.

    Returns:
        The files, in the order of the figures and of the formats.

    Raises:
        UsageError: An unknown format.
        AttnscopeError: The folder cannot be written.
    """
    for wanted in formats:
        if wanted not in FIGURE_FORMATS:
            raise UsageError(f"figures are not drawn as {wanted!r}", f"choose from {', '.join(FIGURE_FORMATS)}")
    if not formats:
        return []

    def contents() -> Iterator[tuple[Path, Callable[[], bytes]]]:
        for stem, page in pages:
            for wanted in formats:
                content = (
                    partial(png, page.pixels(), page.dpi) if wanted == "png" else partial(bytes, page.vector(wanted))
                )
                yield Path(folder) / f"{stem}.{wanted}", content

    # Values that no model computed may be negative or infinite: NumPy's warnings tell a user nothing.
    with matplotlib_defaults(), np.errstate(all="ignore"):
        if not threads:
            return [_write(*one) for one in contents()]
        with ThreadPoolExecutor(threads) as pool:
            written = [pool.submit(_write, *one) for one in contents()]
            return [one.result() for one in written]


def _write(path: Path, content: Callable[[], bytes]) -> Path:
    return write_whole(path, content())


def distinct(stems: Iterable[str]) -> list[str]:
    """Names of files; a number tells those apart that would be the same file where case does not count."""
    made: dict[str, str] = {}
    for stem in stems:
        name, again = stem, 2
        while name.lower() in made:
            name, again = f"{stem}-{again}", again + 1
        made[name.lower()] = name
    return list(made.values())


def first_png(pages: Iterable[tuple[str, Drawing]]) -> bytes:
    """The first of some figures as a PNG, for notebooks."""
    with matplotlib_defaults():
        page = next(iter(pages))[1]
        return png(page.pixels(), page.dpi)


class Canvas(Drawing):
    """A figure of a fixed size whose one Axes counts pixels from the upper left corner.

    Args:
        width_px: Width.
        height_px: Height.
        lettering: The fonts.

    Attributes:
        temporary: Whether what is placed from now on is for this figure alone; `wipe` removes it.
    """

    def __init__(self, width_px: int, height_px: int, lettering: Lettering) -> None:
        from matplotlib.figure import Figure

        self.lettering, self.paper = lettering, (paper := lettering.paper)
        room = width_px - 2 * layout.MARGIN_PX
        failed = wrap_lines(" · ".join(paper.failed), room, lettering) if paper.failed else ()
        last_px, height_px = height_px - layout.MARGIN_PX, height_px + len(failed) * layout.LINE_PX
        self.width_px, self.height_px = width_px, height_px
        edge, top = paper.crop_px, paper.crop_ends_px
        size = (width_px - 2 * edge) / paper.inch_px, (height_px - 2 * top) / paper.inch_px
        super().__init__(Figure(figsize=size, dpi=paper.dpi, facecolor="white"), lettering.families)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(edge, width_px - edge)
        self.axes.set_ylim(height_px - top, top)
        self.axes.set_autoscale_on(False)
        self.temporary = False
        self._animated: list[Artist] = []
        self._boxes: dict[Artist, Box] = {}
        self._copies: list[tuple[tuple[int, int, int, int], list[tuple[int, int]]]] = []
        self._temporary: list[Artist] = []
        self._cells: dict[Any, Box] = {}
        self._outlined: list[tuple[Artist, Sequence[Number]]] = []
        self._background: Any = None
        self._trimmed = False
        for place, line in enumerate(failed, 1):
            self.write(layout.MARGIN_PX, last_px + place * layout.LINE_PX, line, layout.CAPTION_PX, ha="left")

    def write(
        self, x: float, y: float, text: str, size_px: float, *, animated: bool = False, color: str = INK, **how: Any
    ) -> Text:
        """Puts a text at a place; `how` is what matplotlib's Text takes (ha, va, rotation, weight ...)."""
        how.setdefault("va", "center")
        if not self.lettering.has_bold:
            how.pop("weight", None)  # matplotlib complains
        placed = self.axes.text(
            x,
            y,
            self.lettering.spell(text),
            fontsize=self.points(self.paper.letters(size_px)),
            family=list(self.lettering.families),
            color=color,
            parse_math=False,  # a token may be `$`
            clip_on=False,
            **how,
        )
        self.keep(placed, animated)
        return placed

    def points(self, size_px: float) -> float:
        """A length of the layout in points, as matplotlib takes sizes of letters and widths of lines."""
        return size_px * 72 / self.paper.inch_px

    def label_step(self, longest: str, size_px: float, pitch_px: float) -> int:
        """Every how many-th of some labels side by side has room for it where they are so far apart; 1 on a screen."""
        if not self.paper.least_px:
            return 1
        return max(1, math.ceil((self.lettering.width_px(longest, size_px) * 1.15 + 4) / pitch_px))

    def keep(self, placed: Artist, animated: bool = False) -> None:
        """Remembers whether an artist, which is on the axes, is drawn anew in each figure."""
        placed.set_animated(animated or self.temporary)
        if animated or self.temporary:
            self._animated.append(placed)
        if self.temporary:
            self._temporary.append(placed)

    def wipe(self) -> None:
        """Removes what was for one figure alone; the static part need not be drawn again for the next."""
        self.prepare()
        for artist in self._temporary:
            artist.remove()
        self._animated = [artist for artist in self._animated if artist not in self._temporary]
        self._outlined = [one for one in self._outlined if one[0] not in self._temporary]
        self._temporary = []

    def image(self, box: Box, cmap: Colormap | None = None, *, animated: bool = True) -> AxesImage:
        """An image in a box (x, y, width, height); what it shows is set later by `set_data`."""
        from matplotlib.image import AxesImage

        x, y, width, height = box
        extent = (x, x + width, y + height, y)
        placed = AxesImage(self.axes, cmap=cmap, interpolation="none", origin="upper", extent=extent)
        placed.set_data(np.zeros((1, 1)))
        placed.set_clim(0, 1)
        self.axes.add_artist(placed)
        self.keep(placed, animated)
        if animated:
            self._boxes[placed] = box
        return placed

    def set_cells(self, image: AxesImage, values: NDArray[np.float32], limits: tuple[float, float] = (0, 1)) -> None:
        """Lets an image show values, (row, column), with sharp edges between them in every format.

        Args:
            image: The image.
            values: What it shows.
            limits: Which values have the first and the last colour.
        """
        image.set_data(np.ma.masked_invalid(values))
        image.set_clim(*limits)
        left, right, below, above = image.get_extent()
        self._cells[image] = left, above, right - left, below - above

    def copy(self, box: Box, to: Sequence[tuple[float, float]]) -> None:
        """Repeats the static part of a box in the pixels at other places, given by their upper left corners.

        Nothing else may be in those places. Vector files have no such copies: there everything must be written.
        """
        left, top, width, height = map(int, box)
        self._copies.append(((left, top, width, height), [(int(x), int(y)) for x, y in to]))

    def lines(
        self,
        segments: Sequence[Sequence[tuple[float, float]]],
        *,
        color: str = LINE,
        width_px: float = 1.0,
        animated: bool = False,
        **how: Any,
    ) -> None:
        """Straight or broken lines, each a sequence of points."""
        from matplotlib.collections import LineCollection

        placed = LineCollection(segments, colors=color, linewidths=self.points(width_px), **how)
        self.axes.add_collection(placed, autolim=False)
        self.keep(placed, animated)

    def outline(self, boxes: Sequence[Box], color: str, width_px: float, *, animated: bool = False) -> None:
        """Frames on the edges of boxes."""
        frames = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in boxes]
        self.lines(frames, color=color, width_px=width_px, animated=animated)

    def frames(self, boxes: Sequence[Box]) -> None:
        """Thin frames just outside of boxes."""
        self.outline([(x - 1, y - 1, w + 1, h + 1) for x, y, w, h in boxes], LINE, 1.0)

    def colour_bar(self, box: Box, cmap: Colormap, steps: int = 256, *, animated: bool = False) -> None:
        """All colours of a colormap from left to right, framed."""
        self.image(box, cmap, animated=animated).set_data(np.linspace(0, 1, steps)[None])
        self.frames([box])

    def boxes(self, *, color: str) -> PolyCollection:
        """Filled rectangles that change from figure to figure; `place_boxes` says where they are."""
        from matplotlib.collections import PolyCollection

        placed = PolyCollection([], facecolors=color, edgecolors="none")
        self.axes.add_collection(placed, autolim=False)
        self.keep(placed, animated=True)
        return placed

    @staticmethod
    def place_boxes(boxes: PolyCollection, places: NDArray[np.float64]) -> None:
        """Moves rectangles to places, (box, 4): x, y, width, height."""
        boxes.set_verts(list(vertices_of(places)))

    def prepare(self) -> None:
        """Draws the static part, unless that is done."""
        if self._background is None:
            self.trim()
            self.require_drawable()
            self.agg.draw()
            drawn = np.asarray(self.agg.buffer_rgba())
            for (x, y, width, height), places in self._copies:
                for to_x, to_y in places:
                    there = drawn[to_y : to_y + height, to_x : to_x + width]
                    there[:] = drawn[y : y + there.shape[0], x : x + there.shape[1]]  # a page may end before
            self._background = self.agg.copy_from_bbox(self.figure.bbox)

    def pixels(self) -> NDArray[np.uint8]:
        """The figure as it stands now, (height, width, 3)."""
        self.prepare()
        self.agg.restore_region(self._background)
        for artist in self._animated:
            if artist not in self._boxes or not self._paste(artist, self._boxes[artist]):
                self.axes.draw_artist(artist)
        return np.array(np.asarray(self.agg.buffer_rgba())[:, :, :3])

    def _paste(self, image: Any, box: Box) -> bool:
        """Puts an image whose cells are whole pixels straight onto the picture; False if it must be drawn."""
        if not self.paper.is_screen:
            return False
        colours = image.to_rgba(image.get_array(), bytes=True)
        (x, y, width, height), (rows, columns) = map(int, box), colours.shape[:2]
        if box != (x, y, width, height) or height % rows or width % columns or (colours[:, :, 3] != 255).any():
            return False
        cells = colours.repeat(height // rows, 0).repeat(width // columns, 1)
        np.asarray(self.agg.buffer_rgba())[y : y + height, x : x + width] = cells
        return True

    def vector(self, kind: str) -> bytes:
        """The figure as it stands now as SVG or PDF: cells as rectangles where they are few, numbers as text."""
        self.trim()
        shown: dict[Any, NDArray[np.uint8]] = {
            image: image.to_rgba(image.get_array(), bytes=True) for image in self._cells
        }
        few = [image for image, colours in shown.items() if max(colours.shape[:2]) <= MOST_VECTOR_CELLS]
        hidden: list[Artist] = [image for image in few if image.get_visible()]
        added: list[Artist] = []
        for order in sorted({image.get_zorder() for image in few}):
            mine = [image for image in few if image.get_zorder() == order]
            maps = [(self._cells[image], shown[image]) for image in mine]
            for patch in cells_as_rectangles(maps):
                patch.set_zorder(order)
                added.append(self.axes.add_artist(patch))
        for outlines, numbers in self._outlined:
            hidden.append(outlines)
            added += [self._write_number(one, outlines.get_zorder()) for one in numbers]
        try:
            for artist in hidden:
                artist.set_visible(False)
            return super().vector(kind)
        finally:
            for artist in hidden:
                artist.set_visible(True)
            for artist in added:
                artist.remove()

    def _write_number(self, one: Number, order: float) -> Text:
        """A number as text, where its outlines are."""
        return self.axes.text(
            one.x, one.y + one.size_px * _HALF_DIGIT, self.lettering.spell(one.text), zorder=order, color=one.color,
            fontsize=self.points(one.size_px), family=list(self.lettering.families), ha="center", va="baseline",
            weight="bold" if one.font == "bold" else "normal", style="italic" if one.font == "italic" else "normal",
            parse_math=False, clip_on=False,
        )  # fmt: skip

    def trim(self) -> None:
        """Lets a figure without a title begin where what it shows begins."""
        if self.paper.title or self._trimmed:
            return
        self._trimmed = True
        data, below = self.axes.transData, self.axes.get_ylim()[0]
        drawn = [one for one in (*self.axes.texts, *self.axes.images, *self.axes.patches) if one.get_visible()]
        extents = [one.get_window_extent(self.agg.get_renderer()) for one in drawn]
        highest = max((extent.y1 for extent in extents if extent.width and extent.height), default=0.0)
        tops = [float(data.inverted().transform((0, highest))[1])]
        tops += [limits.y0 for one in self.axes.collections if math.isfinite((limits := one.get_datalim(data)).y0)]
        top = min(tops) - (layout.MARGIN_PX - 10 - self.paper.crop_ends_px)
        top = min(max(top, self.axes.get_ylim()[1]), below - 1)
        self.axes.set_ylim(below, top)
        self.figure.set_size_inches(self.figure.get_size_inches()[0], (below - top) / self.paper.inch_px)


@dataclass(frozen=True)
class Number:
    """A number or letter in a cell: its middle, what it says, how large, in which colour and font."""

    x: float
    y: float
    text: str
    size_px: float
    color: str
    font: FontStyle = "plain"


class Page(Canvas):
    """A canvas with what pages of tables and maps have in common; `drawn` are its numbers."""

    drawn: tuple[Number, ...] = ()

    def head(self, title: str, subtitle: str, *, zoom: float = 1.0, animated: bool = False, bold: float = 1.12) -> Text:
        """Title and subtitle.

        Args:
            title: The title.
            subtitle: What stands below it.
            zoom: How much larger they are than on a page of the least width.
            animated: Whether the title changes from figure to figure.
            bold: How much wider than plain letters bold ones are taken to be.
        """
        left, room = layout.MARGIN_PX, self.width_px - 2 * layout.MARGIN_PX
        size, below = layout.TITLE_PX * zoom, layout.SUBTITLE_PX * zoom
        if self.paper.fixed:  # where letters are to be small
            size, below = layout.PANEL_TITLE_PX, layout.CAPTION_PX
        title = self.lettering.fit(title, size * bold, room)
        placed = self.write(left, left + 4 * zoom, title, size, ha="left", weight="bold", animated=animated)
        subtitle = self.lettering.fit(subtitle, below, room)
        written = self.write(left, left + 34 * zoom, subtitle, below, ha="left", color=FAINT)
        for text in (placed, written):
            text.set_visible(self.paper.title)
        return placed

    @classmethod
    def above(cls, notes: Sequence[str], width: int, y: float, lettering: Lettering) -> Self:
        """A page of a width that ends with notes; the middle of their first line is at y."""
        lines = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
        page = cls(width, math.ceil(y) + (len(lines) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
        page.foot(y, lines)
        return page

    def foot(self, y: float, lines: Sequence[str], zoom: float = 1.0) -> None:
        """Notes at the foot."""
        for place, line in enumerate(lines):
            down = y + place * layout.LINE_PX * zoom
            self.write(layout.MARGIN_PX, down, line, layout.CAPTION_PX * zoom, ha="left", color=FAINT)

    def fill(self, boxes: Sequence[Box], colors: Sequence[Any], edge: str = "none") -> None:
        """Filled rectangles."""
        from matplotlib.collections import PolyCollection

        if not boxes:
            return
        vertices = list(vertices_of(np.array(boxes, np.float64)))
        placed = PolyCollection(vertices, facecolors=colors, edgecolors=edge, linewidths=self.points(1))
        self.axes.add_collection(placed, autolim=False)
        self.keep(placed)

    def numbers(self, numbers: Sequence[Number]) -> None:
        """Numbers as outlines, all of a colour at once: a text for each of thousands would take seconds."""
        for color in sorted({one.color for one in numbers}):
            self.outline_numbers([one for one in numbers if one.color == color], 3)
        self.drawn = (*self.drawn, *numbers)

    def dot(self, at: tuple[float, float], radius: float, color: str) -> None:
        """A disc over what is there."""
        from matplotlib.patches import Circle

        self.keep(self.axes.add_artist(Circle(at, radius, facecolor=color, edgecolor="none", zorder=4)))

    def outline_numbers(self, numbers: Sequence[Number], order: float) -> None:
        """Numbers of one colour as outlines; text in vector files."""
        if not self.lettering.has_bold:
            numbers = [replace(one, font="plain") for one in numbers]
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        vertices, codes = [], []
        for one in numbers:
            points, kinds = outline_of(one.text, one.font, self.lettering.families[0])
            vertices.append(points * (one.size_px / 100) + (one.x, one.y))
            codes.append(kinds)
        path = Outline(np.concatenate(vertices), np.concatenate(codes))
        placed = PathPatch(path, facecolor=numbers[0].color, edgecolor="none", zorder=order)
        self.axes.add_artist(placed)
        self.keep(placed)
        self._outlined.append((placed, numbers))

    def name_axes(
        self,
        corner: tuple[float, float],
        shape: tuple[int, int],
        cell: tuple[float, float],
        size_px: float = layout.PANEL_TITLE_PX,
    ) -> None:
        """Names of layers at the left and of heads above; where there is no room for all, of every second and so on."""
        size = self.paper.letters(min(size_px, cell[0] / 1.6 if size_px > 12 else size_px))
        step = math.ceil(math.ceil(self.lettering.width_px(f"H{shape[1] - 1}", size) * 1.25) / cell[0])
        for head in range(0, shape[1], step):
            x = corner[0] + (head + 0.5) * cell[0] - (1.5 if cell[0] > 39 else 0)
            self.write(x, corner[1] - size * 0.9, f"H{head}", size, ha="center", color=FAINT)
        size_px = self.paper.letters(size_px)
        step = math.ceil(math.ceil(size_px * 1.25) / cell[1])
        for layer in range(0, shape[0], step):
            y = corner[1] + (layer + 0.5) * cell[1]
            self.write(corner[0] - 8, y, f"L{layer}", size_px, ha="right", va="center_baseline", color=FAINT)


def png(pixels: NDArray[np.uint8], dpi: int = DPI) -> bytes:
    """Pixels, (height, width, 3), as a PNG file.

    Every row is filtered as its difference to the one above (PNG specification, third edition, 9.2): figures are made
    of rectangles. Libraries try all filters on every row, which takes twice as long and makes larger files of them.
    """
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels).reshape(height, 3 * width)
    filtered = np.empty((height, 1 + 3 * width), np.uint8)
    filtered[:, 0] = 2  # "Up"
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    dots_per_metre = round(dpi / 0.0254)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),  # 8 bits each of red, green and blue
        (b"tEXt", f"Software\0attnscope {VERSION}".encode("latin-1")),
        (b"pHYs", struct.pack(">IIB", dots_per_metre, dots_per_metre, 1)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 6)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
        for kind, data in chunks
    )


def wrap_lines(text: str, room: float, lettering: Lettering) -> tuple[str, ...]:
    """A text broken into lines. At this size hinting makes lines up to 4% wider than their outlines say."""
    return layout.wrap(lettering.spell(text), room * 0.95, lettering.width_px)


def colormap(name: str) -> Colormap:
    """A colormap of matplotlib."""
    import matplotlib as mpl

    return mpl.colormaps[name]


@lru_cache(maxsize=4096)
def outline_of(text: str, font: FontStyle, family: str = BASE_FAMILY) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """The outline of a number at 100 pixels, y downwards, its middle at (0, 0)."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    slant: Literal["normal", "italic"] = "italic" if font == "italic" else "normal"
    made = FontProperties(family=family, weight="bold" if font == "bold" else "normal", style=slant)
    drawn = TextPath((0, 0), text, size=100, prop=made, usetex=False)
    points = np.array(drawn.vertices, np.float64)
    codes = np.array(drawn.codes, np.uint8)
    across = points[codes != drawn.CLOSEPOLY, 0]  # closing points stand at 0, wherever the letter is
    middle = (across.min() + across.max()) / 2
    # Digits are 73 of 100 pixels tall; the middle must not depend on which characters there are.
    return (points - (middle, 100 * _HALF_DIGIT)) * (1, -1), codes
