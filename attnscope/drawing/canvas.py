"""Draw a series of figures on one matplotlib Axes whose units are pixels. What the figures share is drawn once.

Text is the slow part of an attention figure: 12 heads of 16 tokens have 384 labels. A canvas therefore draws its
labels once and keeps the pixels. They are the static part, or background. Each further figure of the same text restores
the background and draws only its maps over it, the animated part. Matplotlib calls this blitting.

Lengths are in two units. The layout counts its own pixels, from the upper left corner. A PNG file may have more or
fewer pixels: `layout.Paper` says how many of each are an inch.
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
from attnscope.drawing.vectors import box_outlines, cells_as_rectangles, embed_fonts
from attnscope.errors import AttnscopeError
from attnscope.version import VERSION

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

Box = tuple[float, float, float, float]
"""x and y of the upper left corner, width and height, in pixels of the layout."""

PixelBox = tuple[int, int, int, int]
"""A box in whole pixels."""

DEFAULT_DPI = 100
INK = "#1a1a1a"
"""The colour of text."""

FAINT = "#6f6f6f"
"""The colour of secondary text, such as subtitles and notes."""

LINE_COLOR = "#b8b8b8"
"""The colour of lines."""

MARK_COLOR = "#ff5a00"
"""The colour of the frame around the row of the query that a figure is about."""

# Make the bytes of files reproducible: write no dates, and derive the ids in an SVG from a fixed salt.
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": f"attnscope {VERSION}"},
    "pdf": {"CreationDate": None, "Creator": f"attnscope {VERSION}"},
}
_VECTOR_SETTINGS: Any = {"svg.hashsalt": "attnscope", "pdf.fonttype": 42, "svg.fonttype": "none"}
# The prefixes of the matplotlib settings (rcParams) that can change a figure.
_FIGURE_SETTING_PREFIXES = (
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
"""Vector files draw a map of up to this many rows and columns as rectangles. They hold a larger map as an image."""

_MAX_PIXELS = 400_000_000  # a larger PNG takes over a gigabyte to draw
_MAX_SIDE_PX = 2**16  # Agg, matplotlib's pixel renderer, needs sides shorter than this


@contextmanager
def matplotlib_defaults() -> Iterator[None]:
    """Use matplotlib's own defaults in this context, so that a user's matplotlibrc cannot change figures."""
    import matplotlib as mpl

    defaults: Any = {
        name: value
        for name, value in mpl.rcParamsDefault.items()
        if name.startswith(_FIGURE_SETTING_PREFIXES)
    }
    with mpl.rc_context(defaults | _VECTOR_SETTINGS):
        yield


class FigureRenderer:
    """Render a matplotlib figure as pixels and as vectors."""

    def __init__(self, figure: Figure, families: Sequence[str]) -> None:
        """Take a figure and the font families of its text. An SVG file embeds these fonts."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self.figure = figure
        self.families = families
        self.agg: Any = FigureCanvasAgg(figure)

    @property
    def dpi(self) -> int:
        """Return the pixels per inch."""
        return round(self.figure.dpi)

    def render_pixels(self) -> NDArray[np.uint8]:
        """Return the pixels of the figure in its present state, (height, width, 3)."""
        self._draw()
        return self._copy_pixels()

    def _copy_pixels(self) -> NDArray[np.uint8]:
        """Return a copy of the pixels drawn last, (height, width, 3), without the alpha channel."""
        return np.array(np.asarray(self.agg.buffer_rgba())[:, :, :3])

    def render_vector(self, kind: str) -> bytes:
        """Return the figure in its present state as a file, "svg" or "pdf"; equal figures give equal bytes."""
        content = io.BytesIO()
        self.figure.savefig(content, format=kind, metadata=_METADATA[kind])
        return content.getvalue() if kind != "svg" else embed_fonts(content.getvalue(), self.families)

    def _draw(self) -> None:
        """Draw the figure as pixels; raise an AttnscopeError if it has more pixels than can be drawn."""
        width, height = (round(inches * self.dpi) for inches in self.figure.get_size_inches())
        if max(width, height) >= _MAX_SIDE_PX or width * height > _MAX_PIXELS:
            raise AttnscopeError(
                f"a PNG of {width:,} x {height:,} pixels is too large to draw",
                "lower --dpi, or draw svg or pdf",
            )
        self.agg.draw()


class Canvas(FigureRenderer):
    """Draw on a figure whose only Axes counts pixels of the layout from the upper left corner."""

    def __init__(self, width_px: int, lettering: Lettering) -> None:
        """Start a figure of this width. Its height is not known yet: `set_height` sets it after everything is drawn."""
        from matplotlib.figure import Figure

        paper = lettering.paper
        self.lettering = lettering
        self.paper = paper
        self.width_px = width_px
        # One unit of the axes is one pixel of the layout. The axes leave out crop_px at the left and at the right, so
        # that the figure has exactly the width of the paper. The height of 1 inch is a placeholder.
        visible_px = width_px - 2 * paper.crop_px
        size = (visible_px / paper.inch_px, 1)
        super().__init__(Figure(figsize=size, dpi=paper.dpi, facecolor="white"), lettering.families)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(paper.crop_px, width_px - paper.crop_px)
        self.axes.set_autoscale_on(False)
        # The artists to redraw in each figure, in drawing order, and the boxes of those that are images.
        self._animated: list[Artist] = []
        self._image_boxes: dict[Artist, Box] = {}
        # Boxes of the static part whose pixels are copied, each with the upper left corners of its copies.
        self._copies: list[tuple[PixelBox, list[tuple[int, int]]]] = []
        # The box of each image that shows cells. Vector files may draw such an image as rectangles.
        self._cell_boxes: dict[Any, Box] = {}
        # The pixels of the static part, as Agg stores them; None until it is drawn.
        self._background: Any = None
        self._is_trimmed = False

    def set_height(self, height_px: int) -> None:
        """Set the height of the figure. If parts of the study failed, first add lines of text that say so."""
        paper = self.paper
        room = self.width_px - 2 * layout.MARGIN_PX
        lines = wrap_lines(" · ".join(paper.failures), room, self.lettering) if paper.failures else ()
        for number, line in enumerate(lines, 1):
            y = height_px - layout.MARGIN_PX + number * layout.LINE_PX
            self.write(layout.MARGIN_PX, y, line, layout.CAPTION_PX, ha="left")
        self.height_px = height_px + len(lines) * layout.LINE_PX
        # Paper of an exact width also crops a strip at the top and at the bottom.
        self._set_ends(paper.crop_vertical_px, self.height_px - paper.crop_vertical_px)

    def _set_ends(self, top: float, bottom: float) -> None:
        """Show the part of the page from y = `top` to y = `bottom`, in pixels from above."""
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
        """Write a text at a point, and return its matplotlib artist.

        Args:
            x: The point, in pixels from the left.
            y: The point, in pixels from above. It is the text's middle, unless `va` says otherwise.
            text: The text.
            size_px: The font size.
            animated: Whether the text is redrawn in each figure.
            color: The colour of the text.
            keeps_size: Whether the font size may be smaller than the paper's smallest; else it is raised to that.
            options: Further arguments of matplotlib's Text, such as ha, va, rotation and weight.
        """
        options.setdefault("va", "center")
        # matplotlib warns about a weight that the font does not have.
        if not self.lettering.has_bold:
            options.pop("weight", None)
        artist = self.axes.text(
            x,
            y,
            self.lettering.replace_undrawable(text),
            fontsize=self.to_points(size_px if keeps_size else self.paper.legible_px(size_px)),
            family=list(self.lettering.families),
            color=color,
            parse_math=False,  # a token may be `$`, which would start a formula
            clip_on=False,
            **options,
        )
        self.register_artist(artist, animated)
        return artist

    def to_points(self, size_px: float) -> float:
        """Convert a length from pixels of the layout to points (1/72 inch), matplotlib's unit for fonts and lines."""
        return size_px * 72 / self.paper.inch_px

    def label_step(self, longest: str, size_px: float, pitch_px: float) -> int:
        """Return the smallest k such that every k-th label fits, for labels at a distance of `pitch_px`.

        Return 1 if the paper sets no smallest font size, as labels then shrink until they fit.
        """
        if not self.paper.min_px:
            return 1
        # A label takes its width and a gap. The gap grows with the width.
        needed_px = self.lettering.width_px(longest, size_px) * 1.15 + 4
        return max(1, math.ceil(needed_px / pitch_px))

    def register_artist(self, artist: Artist, animated: bool = False) -> None:
        """Make an artist of the axes animated (redrawn in each figure), or leave it in the static part."""
        artist.set_animated(animated)
        if animated:
            self._animated.append(artist)

    def add_image(self, box: Box, cmap: Colormap | None = None, *, animated: bool = True) -> AxesImage:
        """Add an empty image in a box, and return it. Later, its `set_data` or our `set_cells` gives it values."""
        from matplotlib.image import AxesImage

        # The extent is (left, right, bottom, top). y grows downwards, so the bottom is the larger y.
        x, y, width, height = box
        extent = (x, x + width, y + height, y)
        image = AxesImage(self.axes, cmap=cmap, interpolation="none", origin="upper", extent=extent)
        image.set_data(np.zeros((1, 1)))
        image.set_clim(0, 1)
        self.axes.add_artist(image)
        self.register_artist(image, animated)
        # Keep the box: `_paste` copies pixels into it, which is faster than drawing the image.
        if animated:
            self._image_boxes[image] = box
        return image

    def set_cells(
        self, image: AxesImage, values: NDArray[np.float32], limits: tuple[float, float] = (0, 1)
    ) -> None:
        """Show values, (row, column), in an image, as cells with sharp edges.

        `limits` are the values of the colormap's first and last colour. NaN is transparent.
        """
        image.set_data(np.ma.masked_invalid(values))
        image.set_clim(*limits)
        left, right, bottom, top = image.get_extent()
        self._cell_boxes[image] = left, top, right - left, bottom - top

    def copy_box(self, box: Box, corners: Sequence[tuple[float, float]]) -> None:
        """Copy the static pixels of a box to boxes of the same size at other upper left corners.

        The target boxes must be empty. Vector files have no pixels to copy: for them, draw the content at each corner.
        """
        left, top, width, height = map(int, box)
        self._copies.append(((left, top, width, height), [(int(x), int(y)) for x, y in corners]))

    def draw_lines(
        self,
        segments: Sequence[Any],
        *,
        color: str = LINE_COLOR,
        width_px: float = 1.0,
        animated: bool = False,
        **options: Any,
    ) -> None:
        """Draw lines, each through a sequence of points, (x, y)."""
        from matplotlib.collections import LineCollection

        artist = LineCollection(segments, colors=color, linewidths=self.to_points(width_px), **options)
        self.axes.add_collection(artist, autolim=False)
        self.register_artist(artist, animated)

    def draw_outlines(
        self, boxes: Sequence[Box], color: str, width_px: float, *, animated: bool = False
    ) -> None:
        """Draw lines along the edges of boxes."""
        edges = box_outlines(np.array(boxes, np.float64).reshape(-1, 4))
        self.draw_lines(list(edges), color=color, width_px=width_px, animated=animated)

    def draw_frames(self, boxes: Sequence[Box]) -> None:
        """Draw frames of one pixel just outside boxes."""
        self.draw_outlines([(x - 1, y - 1, w + 1, h + 1) for x, y, w, h in boxes], LINE_COLOR, 1.0)

    def _draw_static(self) -> None:
        """Draw the static part and keep its pixels as the background."""
        self._trim_top()
        # Matplotlib leaves out animated artists.
        self._draw()
        # Copy boxes on the page. At the edges of the page a target may be smaller than its box.
        pixels = np.asarray(self.agg.buffer_rgba())  # (height, width, 4), the renderer's own memory
        for (x, y, width, height), corners in self._copies:
            for corner_x, corner_y in corners:
                target = pixels[corner_y : corner_y + height, corner_x : corner_x + width]
                target[:] = pixels[y : y + target.shape[0], x : x + target.shape[1]]
        self._background = self.agg.copy_from_bbox(self.figure.bbox)

    def render_pixels(self) -> NDArray[np.uint8]:
        """Return the pixels of the figure in its present state, (height, width, 3)."""
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
        """Try to write an image's pixels directly into the renderer's memory; return whether that was possible.

        It is possible if the cells are aligned with pixels (each covers whole pixels) and their
        colours are opaque.
        """
        if not self.paper.is_pixel_exact:
            return False
        # The colours of cells, (row, column, 4).
        colours = image.to_rgba(image.get_array(), bytes=True)
        rows, columns = colours.shape[:2]
        x, y, width, height = map(int, box)
        is_aligned = box == (x, y, width, height) and height % rows == 0 and width % columns == 0
        is_opaque = (colours[:, :, 3] == 255).all()
        if not (is_aligned and is_opaque):
            return False
        # The colours of pixels, (height, width, 4).
        pixels = colours.repeat(height // rows, 0).repeat(width // columns, 1)
        np.asarray(self.agg.buffer_rgba())[y : y + height, x : x + width] = pixels
        return True

    def render_vector(self, kind: str) -> bytes:
        """Return the figure in its present state as "svg" or "pdf". Maps with few cells are drawn as rectangles."""
        self._trim_top()
        # Group the images with few cells by their drawing order (zorder).
        hidden_images: list[Artist] = []
        images_by_zorder: dict[float, list[tuple[Box, NDArray[np.uint8]]]] = {}
        for image, box in self._cell_boxes.items():
            colours = image.to_rgba(image.get_array(), bytes=True)
            if max(colours.shape[:2]) <= MAX_VECTOR_CELLS:
                images_by_zorder.setdefault(image.get_zorder(), []).append((box, colours))
                if image.get_visible():
                    hidden_images.append(image)
        # Add rectangles that replace these images.
        rectangles: list[Artist] = []
        for zorder in sorted(images_by_zorder):
            for patch in cells_as_rectangles(images_by_zorder[zorder]):
                patch.set_zorder(zorder)
                rectangles.append(self.axes.add_artist(patch))
        # Hide the images and write the file. Then undo both changes, even if writing fails.
        try:
            for artist in hidden_images:
                artist.set_visible(False)
            return super().render_vector(kind)
        finally:
            for artist in hidden_images:
                artist.set_visible(True)
            for artist in rectangles:
                artist.remove()

    def _trim_top(self) -> None:
        """Cut off the empty top of a figure without a caption. Call it only after everything is on the figure."""
        if self.paper.caption or self._is_trimmed:
            return
        self._is_trimmed = True
        # Find the upper edge of letters, images and shapes. The renderer measures y from below, the axes from above.
        renderer = self.agg.get_renderer()
        artists = (*self.axes.texts, *self.axes.images, *self.axes.patches)
        extents = [artist.get_window_extent(renderer) for artist in artists if artist.get_visible()]
        highest = max((extent.y1 for extent in extents if extent.width and extent.height), default=0.0)
        to_pixels = self.axes.transData
        tops = [float(to_pixels.inverted().transform((0, highest))[1])]
        # The upper edge of a collection, such as filled cells, is y0 in units of the axes. It is infinite if empty.
        collection_tops = [artist.get_datalim(to_pixels).y0 for artist in self.axes.collections]
        tops += [y for y in collection_tops if math.isfinite(y)]
        # Let the figure begin a margin above that, but not above its former top. Keep a height of at least one pixel.
        bottom, former_top = self.axes.get_ylim()
        top = min(tops) - (layout.MARGIN_PX - 10 - self.paper.crop_vertical_px)
        self._set_ends(min(max(top, former_top), bottom - 1), bottom)


def wrap_lines(text: str, room: float, lettering: Lettering) -> tuple[str, ...]:
    """Break a text into lines, in the font size of captions, that are at most `room` pixels wide."""
    return layout.wrap_text(lettering.replace_undrawable(text), room, lettering.width_px)


def colormap(cmap: Colormap | str) -> Colormap:
    """Return the matplotlib colormap with this name; return a colormap unchanged."""
    import matplotlib as mpl

    return mpl.colormaps.get_cmap(cmap)
