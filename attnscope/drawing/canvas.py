"""Draw series of figures on one matplotlib Axes that counts pixels. What all have in common is drawn once.

Text is what makes attention figures slow: 12 heads of 16 tokens have 384 labels. So a canvas draws its labels once and
keeps the picture (the static part). Each figure of the same text restores it and draws its maps over it (the animated
part). Matplotlib calls this blitting.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.vectors import cells_as_rectangles, embed_fonts, vertices_of
from attnscope.errors import AttnscopeError
from attnscope.version import VERSION

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

Box = tuple[float, float, float, float]
"""x, y, width, height in pixels."""

PixelBox = tuple[int, int, int, int]
"""A box in whole pixels."""

DPI = 100
INK = "#1a1a1a"
"""The colour of text."""

FAINT = "#6f6f6f"
"""The colour of text that matters less."""

LINE = "#b8b8b8"
"""The colour of lines."""

MARK = "#ff5a00"
"""The colour of the frame around the row of the query that a figure is about."""

# The same input gives the same bytes: no dates, and ids in SVG that do not depend on chance.
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": f"attnscope {VERSION}"},
    "pdf": {"CreationDate": None, "Creator": f"attnscope {VERSION}"},
}
_SETTINGS: Any = {"svg.hashsalt": "attnscope", "pdf.fonttype": 42, "svg.fonttype": "none"}
# The prefixes of matplotlib's settings that can change a figure.
_FIGURE_SETTINGS = (
    "agg.",
    "axes.",
    "figure.",
    "font.",
    "image.",
    "lines.",
    "patch.",
    "path.",
    "pdf.",
    "savefig.",
    "svg.",
    "text.",
)
MAX_VECTOR_CELLS = 64
"""In vector files, a map of up to this many rows and columns is made of rectangles; a larger one is an image."""

_MAX_PIXELS = 400_000_000  # a larger PNG takes over a gigabyte to draw
_SIDE_LIMIT = 2**16  # sides must be shorter for Agg, matplotlib's renderer of pixels


@contextmanager
def matplotlib_defaults() -> Iterator[None]:
    """Draw with matplotlib's own defaults in this context: a user's style must not change figures, or ask for LaTeX."""
    import matplotlib as mpl

    defaults: Any = {
        name: value for name, value in mpl.rcParamsDefault.items() if name.startswith(_FIGURE_SETTINGS)
    }
    with mpl.rc_context(defaults | _SETTINGS):
        yield


class FigureRenderer:
    """Render a matplotlib figure as pixels and as vectors."""

    def __init__(self, figure: Figure, families: Sequence[str]) -> None:
        """Take a figure, and the font families of its text, which an SVG carries inside."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self.figure = figure
        self.families = families
        self.agg: Any = FigureCanvasAgg(figure)

    @property
    def dpi(self) -> int:
        """Return the pixels per inch."""
        return round(self.figure.dpi)

    def pixels(self) -> NDArray[np.uint8]:
        """Return the figure as it stands now, (height, width, 3)."""
        self._draw()
        return self._copy_pixels()

    def _copy_pixels(self) -> NDArray[np.uint8]:
        """Return a copy of what was drawn last, (height, width, 3), without the alpha channel."""
        return np.array(np.asarray(self.agg.buffer_rgba())[:, :, :3])

    def vector(self, kind: str) -> bytes:
        """Return the figure as it stands now as "svg" or "pdf", the same bytes every time."""
        content = io.BytesIO()
        self.figure.savefig(content, format=kind, metadata=_METADATA[kind])
        return content.getvalue() if kind != "svg" else embed_fonts(content.getvalue(), self.families)

    def _draw(self) -> None:
        """Draw the figure as pixels; raise an AttnscopeError if there are more than can be drawn."""
        width, height = (round(inches * self.dpi) for inches in self.figure.get_size_inches())
        if max(width, height) >= _SIDE_LIMIT or width * height > _MAX_PIXELS:
            raise AttnscopeError(
                f"a PNG of {width:,} x {height:,} pixels is too large to draw",
                "lower --dpi, or draw svg or pdf",
            )
        self.agg.draw()


class Canvas(FigureRenderer):
    """Draw on a figure whose one Axes counts pixels from the upper left corner."""

    def __init__(self, width_px: int, lettering: Lettering) -> None:
        """Open a figure; `end_at` sets its height."""
        from matplotlib.figure import Figure

        paper = lettering.paper
        self.lettering = lettering
        self.paper = paper
        self.width_px = width_px
        # One unit of the axes is one pixel of the layout, which is not one of the file if the paper says so. The axes
        # leave out crop_px at the left and at the right.
        visible_px = width_px - 2 * paper.crop_px
        size = (visible_px / paper.inch_px, 1)
        super().__init__(Figure(figsize=size, dpi=paper.dpi, facecolor="white"), lettering.families)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(paper.crop_px, width_px - paper.crop_px)
        self.axes.set_autoscale_on(False)
        # The artists that are drawn anew in each figure, in their order, and the boxes of the images among them.
        self._animated: list[Artist] = []
        self._image_boxes: dict[Artist, Box] = {}
        # Boxes of the static part whose pixels are copied, and the upper left corners of the copies.
        self._copies: list[tuple[PixelBox, list[tuple[int, int]]]] = []
        # The images that show cells, and their boxes: vector files may draw these as rectangles.
        self._cell_boxes: dict[Any, Box] = {}
        # The picture of the static part, once it is drawn.
        self._background: Any = None
        self._is_trimmed = False

    def end_at(self, height_px: int) -> None:
        """End the figure at a height. If parts of the study failed, say so below it, and end the figure there."""
        paper = self.paper
        room = self.width_px - 2 * layout.MARGIN_PX
        lines = wrap_lines(" · ".join(paper.failed), room, self.lettering) if paper.failed else ()
        for number, line in enumerate(lines, 1):
            y = height_px - layout.MARGIN_PX + number * layout.LINE_PX
            self.write(layout.MARGIN_PX, y, line, layout.CAPTION_PX, ha="left")
        self.height_px = height_px + len(lines) * layout.LINE_PX
        # Paper of an exact width also cuts off a strip at the top and at the bottom.
        self._set_ends(paper.crop_ends_px, self.height_px - paper.crop_ends_px)

    def _set_ends(self, top: float, bottom: float) -> None:
        """Let the figure reach from one y to a larger one, in pixels from above."""
        self.axes.set_ylim(bottom, top)
        width, _ = self.figure.get_size_inches()
        self.figure.set_size_inches(width, (bottom - top) / self.paper.inch_px)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        size_px: float,
        *,
        animated: bool = False,
        color: str = INK,
        keeps_size: bool = False,
        **options: Any,
    ) -> Text:
        """Write a text at a point, and return its artist.

        Args:
            x: The point, in pixels from the left.
            y: The point, in pixels from above.
            text: The text.
            size_px: The font size.
            animated: Whether it is drawn anew in each figure.
            color: Its colour.
            keeps_size: Whether the font size may be below the smallest of the paper; else it is raised to that.
            options: Further arguments of matplotlib's Text, such as ha, va, rotation and weight.
        """
        options.setdefault("va", "center")
        # matplotlib warns of a weight that the font does not have.
        if not self.lettering.has_bold:
            options.pop("weight", None)
        artist = self.axes.text(
            x,
            y,
            self.lettering.spell(text),
            fontsize=self.points(size_px if keeps_size else self.paper.letters(size_px)),
            family=list(self.lettering.families),
            color=color,
            parse_math=False,  # a token may be `$`
            clip_on=False,
            **options,
        )
        self.register(artist, animated)
        return artist

    def points(self, size_px: float) -> float:
        """Return a length of the layout in points (1/72 inch), in which matplotlib takes font sizes and line widths."""
        return size_px * 72 / self.paper.inch_px

    def label_step(self, longest: str, size_px: float, pitch_px: float) -> int:
        """Return k such that every k-th of labels `pitch_px` apart has room; 1 if letters may have any size."""
        if not self.paper.min_px:
            return 1
        # A label takes its width and a gap, which grows with the width.
        needed_px = self.lettering.width_px(longest, size_px) * 1.15 + 4
        return max(1, math.ceil(needed_px / pitch_px))

    def register(self, artist: Artist, animated: bool = False) -> None:
        """Make an artist of the axes animated (drawn anew in each figure), or leave it in the static part."""
        artist.set_animated(animated)
        if animated:
            self._animated.append(artist)

    def image(self, box: Box, cmap: Colormap | None = None, *, animated: bool = True) -> AxesImage:
        """Put an empty image into a box, and return it: its `set_data`, or `set_cells`, say later what it shows."""
        from matplotlib.image import AxesImage

        # The first row of pixels is the upper one; y grows downwards.
        x, y, width, height = box
        extent = (x, x + width, y + height, y)
        image = AxesImage(self.axes, cmap=cmap, interpolation="none", origin="upper", extent=extent)
        image.set_data(np.zeros((1, 1)))
        image.set_clim(0, 1)
        self.axes.add_artist(image)
        self.register(image, animated)
        # An animated image may be copied into its box, which is faster than drawing it: see `_paste`.
        if animated:
            self._image_boxes[image] = box
        return image

    def set_cells(
        self, image: AxesImage, values: NDArray[np.float32], limits: tuple[float, float] = (0, 1)
    ) -> None:
        """Let an image show values, (row, column), as cells with sharp edges.

        `limits` are the values of the first and of the last colour. NaN has no colour.
        """
        image.set_data(np.ma.masked_invalid(values))
        image.set_clim(*limits)
        left, right, bottom, top = image.get_extent()
        self._cell_boxes[image] = left, top, right - left, bottom - top

    def repeat_box(self, box: Box, corners: Sequence[tuple[float, float]]) -> None:
        """Copy the static pixels of a box to boxes with other upper left corners, which must be empty.

        Vector files have no pixels to copy: there, everything must be drawn at each corner.
        """
        left, top, width, height = map(int, box)
        self._copies.append(((left, top, width, height), [(int(x), int(y)) for x, y in corners]))

    def lines(
        self,
        segments: Sequence[Any],
        *,
        color: str = LINE,
        width_px: float = 1.0,
        animated: bool = False,
        **options: Any,
    ) -> None:
        """Draw lines, each through a sequence of points, (x, y)."""
        from matplotlib.collections import LineCollection

        artist = LineCollection(segments, colors=color, linewidths=self.points(width_px), **options)
        self.axes.add_collection(artist, autolim=False)
        self.register(artist, animated)

    def outline(
        self, boxes: Sequence[Box], color: str, width_px: float, *, animated: bool = False
    ) -> None:
        """Draw frames on the edges of boxes."""
        edges = vertices_of(np.array(boxes, np.float64).reshape(-1, 4))
        self.lines(list(edges), color=color, width_px=width_px, animated=animated)

    def frames(self, boxes: Sequence[Box]) -> None:
        """Draw frames of one pixel just outside of boxes."""
        self.outline([(x - 1, y - 1, w + 1, h + 1) for x, y, w, h in boxes], LINE, 1.0)

    def _draw_static(self) -> None:
        """Draw the static part and keep its picture."""
        self._trim_top()
        # Matplotlib leaves out animated artists.
        self._draw()
        # Copy boxes within the picture, and no more of them than the page has room for.
        pixels = np.asarray(self.agg.buffer_rgba())
        for (x, y, width, height), corners in self._copies:
            for corner_x, corner_y in corners:
                target = pixels[corner_y : corner_y + height, corner_x : corner_x + width]
                target[:] = pixels[y : y + target.shape[0], x : x + target.shape[1]]
        self._background = self.agg.copy_from_bbox(self.figure.bbox)

    def pixels(self) -> NDArray[np.uint8]:
        """Return the figure as it stands now, (height, width, 3)."""
        if self._background is None:
            self._draw_static()
        self.agg.restore_region(self._background)
        for artist in self._animated:
            box = self._image_boxes.get(artist)
            is_pasted = box is not None and self._paste(artist, box)
            if not is_pasted:
                self.axes.draw_artist(artist)
        return self._copy_pixels()

    def _paste(self, image: Any, box: Box) -> bool:
        """Copy an image into the picture and return True, if its cells have whole pixels and opaque colours."""
        if not self.paper.is_pixel_exact:
            return False
        # The colours of cells, (row, column, 4).
        colours = image.to_rgba(image.get_array(), bytes=True)
        rows, columns = colours.shape[:2]
        x, y, width, height = map(int, box)
        is_whole = box == (x, y, width, height) and height % rows == 0 and width % columns == 0
        is_opaque = (colours[:, :, 3] == 255).all()
        if not (is_whole and is_opaque):
            return False
        # The colours of pixels, (height, width, 4).
        pixels = colours.repeat(height // rows, 0).repeat(width // columns, 1)
        np.asarray(self.agg.buffer_rgba())[y : y + height, x : x + width] = pixels
        return True

    def vector(self, kind: str) -> bytes:
        """Return the figure as it stands now as "svg" or "pdf", with cells as rectangles where they are few."""
        self._trim_top()
        # Find the images with few cells, by their drawing order (zorder).
        hidden: list[Artist] = []
        maps: dict[float, list[tuple[Box, NDArray[np.uint8]]]] = {}
        for image, box in self._cell_boxes.items():
            colours = image.to_rgba(image.get_array(), bytes=True)
            if max(colours.shape[:2]) <= MAX_VECTOR_CELLS:
                maps.setdefault(image.get_zorder(), []).append((box, colours))
                if image.get_visible():
                    hidden.append(image)
        # Add rectangles in their place.
        added: list[Artist] = []
        for zorder in sorted(maps):
            for patch in cells_as_rectangles(maps[zorder]):
                patch.set_zorder(zorder)
                added.append(self.axes.add_artist(patch))
        # Show the rectangles, hide the images; then undo both, also if writing fails.
        try:
            for artist in hidden:
                artist.set_visible(False)
            return super().vector(kind)
        finally:
            for artist in hidden:
                artist.set_visible(True)
            for artist in added:
                artist.remove()

    def _trim_top(self) -> None:
        """Cut off the empty top of a figure without a caption, but for a margin. Everything must be on the figure."""
        if self.paper.caption or self._is_trimmed:
            return
        self._is_trimmed = True
        # Find the upper end of letters, images and shapes. Renderers measure pixels from below, these axes from above.
        renderer = self.agg.get_renderer()
        artists = (*self.axes.texts, *self.axes.images, *self.axes.patches)
        extents = [artist.get_window_extent(renderer) for artist in artists if artist.get_visible()]
        highest = max((extent.y1 for extent in extents if extent.width and extent.height), default=0.0)
        to_pixels = self.axes.transData
        tops = [float(to_pixels.inverted().transform((0, highest))[1])]
        # Collections, such as filled cells, give their upper end (y0) in units of the axes: infinite if they are empty.
        collection_tops = [artist.get_datalim(to_pixels).y0 for artist in self.axes.collections]
        tops += [y for y in collection_tops if math.isfinite(y)]
        # Begin the figure a margin above that, but not above its former top. Keep at least one pixel of it.
        bottom, former_top = self.axes.get_ylim()
        top = min(tops) - (layout.MARGIN_PX - 10 - self.paper.crop_ends_px)
        self._set_ends(min(max(top, former_top), bottom - 1), bottom)


def wrap_lines(text: str, room: float, lettering: Lettering) -> tuple[str, ...]:
    """Return a text broken into lines of captions that are at most `room` pixels wide."""
    return layout.wrap(lettering.spell(text), room, lettering.width_px)


def colormap(cmap: Colormap | str) -> Colormap:
    """Return the matplotlib colormap of a name; a colormap stays."""
    import matplotlib as mpl

    return mpl.colormaps.get_cmap(cmap)
