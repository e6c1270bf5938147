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
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import UsageError
from attnscope.records import write_whole
from attnscope.records.kinds import FIGURE_FORMATS
from attnscope.version import VERSION
from attnscope.views import layout
from attnscope.views.lettering import BASE_FAMILY, Lettering

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
_RC: Any = {"svg.hashsalt": "attnscope", "pdf.fonttype": 42, "svg.fonttype": "path"}
# The settings of matplotlib that can change a figure.
_SHIPPED = (
    *("agg.", "axes.", "figure.", "font.", "image.", "lines."),
    *("patch.", "path.", "pdf.", "savefig.", "svg.", "text."),
)
# Viewers of vector files smooth small images; cells that are drawn larger keep sharp edges.
_VECTOR_CELL_PX = 8
_VECTOR_MAP_PX = 1024


@contextmanager
def matplotlib_defaults() -> Iterator[None]:
    """Within it matplotlib has its own defaults: a user's style must not change figures, or ask for LaTeX."""
    import matplotlib as mpl

    wanted: Any = {name: value for name, value in mpl.rcParamsDefault.items() if name.startswith(_SHIPPED)}
    with mpl.rc_context(wanted | _RC):
        yield


class Drawing:
    """A figure of matplotlib, as pixels and as vectors."""

    def __init__(self, figure: Figure) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self.figure = figure
        self.agg: Any = FigureCanvasAgg(figure)

    def pixels(self) -> NDArray[np.uint8]:
        """The figure as it stands now, (height, width, 3)."""
        self.agg.draw()
        return np.array(np.asarray(self.agg.buffer_rgba())[:, :, :3])

    def vector(self, kind: str) -> bytes:
        """The figure as it stands now as SVG or PDF, the same bytes every time."""
        held = io.BytesIO()
        self.figure.savefig(held, format=kind, metadata=_METADATA[kind])
        return held.getvalue()


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
                content = partial(png, page.pixels()) if wanted == "png" else partial(bytes, page.vector(wanted))
                yield Path(folder) / f"{stem}.{wanted}", content

    with matplotlib_defaults():
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
        return png(next(iter(pages))[1].pixels())


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

        super().__init__(Figure(figsize=(width_px / DPI, height_px / DPI), dpi=DPI, facecolor="white"))
        self.lettering = lettering
        self.width_px, self.height_px = width_px, height_px
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, width_px)
        self.axes.set_ylim(height_px, 0)
        self.axes.set_autoscale_on(False)
        self.temporary = False
        self._animated: list[Artist] = []
        self._boxes: dict[Artist, Box] = {}
        self._copies: list[tuple[tuple[int, int, int, int], list[tuple[int, int]]]] = []
        self._temporary: list[Artist] = []
        self._cells: dict[AxesImage, NDArray[np.float32]] = {}
        self._background: Any = None

    def write(
        self, x: float, y: float, text: str, size_px: float, *, animated: bool = False, color: str = INK, **how: Any
    ) -> Text:
        """Puts a text at a place; `how` is what matplotlib's Text takes (ha, va, rotation, weight ...)."""
        how.setdefault("va", "center")
        if len(self.lettering.families) > 1:
            how.pop("weight", None)  # fonts for other scripts seldom have a bold, and matplotlib complains
        placed = self.axes.text(
            x,
            y,
            text,
            fontsize=size_px * 72 / DPI,
            family=list(self.lettering.families),
            color=color,
            parse_math=False,  # a token may be `$`
            clip_on=False,
            **how,
        )
        self.keep(placed, animated)
        return placed

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
        self._temporary = []

    def image(self, box: Box, cmap: Colormap | None = None, *, animated: bool = True) -> AxesImage:
        """An image in a box (x, y, width, height); what it shows is set later by `set_data`."""
        from matplotlib.image import AxesImage

        x, y, width, height = box
        placed = AxesImage(
            self.axes,
            cmap=cmap,
            interpolation="none",
            origin="upper",
            extent=(x, x + width, y + height, y),
        )
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
        image.set_data(values)
        image.set_clim(*limits)
        self._cells[image] = values

    def copy(self, box: tuple[int, int, int, int], to: Sequence[tuple[int, int]]) -> None:
        """Repeats the static part of a box in the pixels at other places, given by their upper left corners.

        Nothing else may be in those places. Vector files have no such copies: there everything must be written.
        """
        self._copies.append((box, list(to)))

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

        placed = LineCollection(segments, colors=color, linewidths=width_px * 72 / DPI, **how)
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
        boxes.set_verts(_vertices(places))

    def prepare(self) -> None:
        """Draws the static part, unless that is done."""
        if self._background is None:
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
        colours = image.to_rgba(image.get_array(), bytes=True)
        (x, y, width, height), (rows, columns) = map(int, box), colours.shape[:2]
        if box != (x, y, width, height) or height % rows or width % columns or (colours[:, :, 3] != 255).any():
            return False
        cells = colours.repeat(height // rows, 0).repeat(width // columns, 1)
        np.asarray(self.agg.buffer_rgba())[y : y + height, x : x + width] = cells
        return True

    def vector(self, kind: str) -> bytes:
        """The figure as it stands now as SVG or PDF."""
        for image, values in self._cells.items():
            image.set_data(enlarge_cells(values))
        drawn = super().vector(kind)
        for image, values in self._cells.items():
            image.set_data(values)
        return drawn


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
        title = self.lettering.fit(title, size * bold, room)
        placed = self.write(left, left + 4 * zoom, title, size, ha="left", weight="bold", animated=animated)
        subtitle = self.lettering.fit(subtitle, below, room)
        self.write(left, left + 34 * zoom, subtitle, below, ha="left", color=FAINT)
        return placed

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
        vertices = _vertices(np.array(boxes, np.float64))
        placed = PolyCollection(vertices, facecolors=colors, edgecolors=edge, linewidths=0.7)
        self.axes.add_collection(placed, autolim=False)
        self.keep(placed)

    def numbers(self, numbers: Sequence[Number]) -> None:
        """Numbers as outlines, all of a colour at once: a text for each of thousands would take seconds."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        for color in sorted({one.color for one in numbers}):
            vertices, codes = [], []
            for one in numbers:
                if one.color == color:
                    points, kinds = outline_of(one.text, one.font)
                    vertices.append(points * (one.size_px / 100) + (one.x, one.y))
                    codes.append(kinds)
            path = Outline(np.concatenate(vertices), np.concatenate(codes))
            placed = PathPatch(path, facecolor=color, edgecolor="none", zorder=3)
            self.axes.add_artist(placed)
            self.keep(placed)
        self.drawn = (*self.drawn, *numbers)

    def sides(
        self,
        corner: tuple[float, float],
        shape: tuple[int, int],
        cell: tuple[int, int],
        size_px: float = layout.PANEL_TITLE_PX,
    ) -> None:
        """Names of layers at the left and of heads above; where there is no room for all, of every second and so on."""
        size = min(size_px, cell[0] / 1.6 if size_px > 12 else size_px)
        step = -(-math.ceil(self.lettering.width_px(f"H{shape[1] - 1}", size) * 1.25) // cell[0])
        for head in range(0, shape[1], step):
            x = corner[0] + (head + 0.5) * cell[0] - (1.5 if cell[0] > 39 else 0)
            self.write(x, corner[1] - size * 0.9, f"H{head}", size, ha="center", color=FAINT)
        step = -(-math.ceil(size_px * 1.25) // cell[1])
        for layer in range(0, shape[0], step):
            y = corner[1] + (layer + 0.5) * cell[1]
            self.write(corner[0] - 8, y, f"L{layer}", size_px, ha="right", va="center_baseline", color=FAINT)


def _vertices(boxes: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """The corners of boxes, (box, 4): x, y, width, height."""
    x, y, width, height = boxes.T
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
    return list(np.stack([np.stack(corner, 1) for corner in corners], 1))


def enlarge_cells(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """An array with every cell repeated, for vector files."""
    times = max(1, min(_VECTOR_CELL_PX, _VECTOR_MAP_PX // max(values.shape)))
    return values.repeat(times, 0).repeat(times, 1)


def png(pixels: NDArray[np.uint8]) -> bytes:
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
    dots_per_metre = round(DPI / 0.0254)
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


def hex_of(cmap: Colormap, share: float) -> str:
    """The colour "#rrggbb" at a share of a colormap, 0 to 1."""
    return "#" + "".join(f"{round(part * 255):02x}" for part in cmap(share)[:3])


@lru_cache(maxsize=4096)
def outline_of(text: str, font: FontStyle) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """The outline of a number at 100 pixels, y downwards, its middle at (0, 0)."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    made = FontProperties(
        family=BASE_FAMILY,
        weight="bold" if font == "bold" else "normal",
        style="italic" if font == "italic" else "normal",
    )
    drawn = TextPath((0, 0), text, size=100, prop=made, usetex=False)
    points = np.array(drawn.vertices, np.float64)
    codes = np.array(drawn.codes, np.uint8)
    across = points[codes != drawn.CLOSEPOLY, 0]  # closing points stand at 0, wherever the letter is
    middle = (across.min() + across.max()) / 2
    # Digits are 73 of 100 pixels tall; the middle must not depend on which characters there are.
    return (points - (middle, 36.5)) * (1, -1), codes
