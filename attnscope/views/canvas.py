"""One Axes in pixels: what stays is drawn once, what changes from figure to figure is drawn over it.

Text is what makes attention figures slow: 12 heads of 16 tokens have 384 labels. So a canvas draws its labels once and
keeps the picture; each further figure of the same text restores it and adds its maps (what matplotlib calls blitting).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope import __version__
from attnscope.views.lettering import Lettering

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage
    from matplotlib.text import Text

DPI = 100
INK, FAINT, LINE = "#1a1a1a", "#6f6f6f", "#b8b8b8"

# The same input gives the same bytes: no dates, and ids in SVG that do not depend on chance.
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": f"attnscope {__version__}"},
    "pdf": {"CreationDate": None, "Creator": f"attnscope {__version__}"},
}
_RC: Any = {"svg.hashsalt": "attnscope", "pdf.fonttype": 42, "svg.fonttype": "path"}
# Whatever settings of matplotlib bear upon a figure of ours.
_SHIPPED = (
    *("agg.", "axes.", "figure.", "font.", "image.", "lines."),
    *("patch.", "path.", "pdf.", "savefig.", "svg.", "text."),
)
# Viewers of vector files smooth small images; cells that are drawn larger keep sharp edges.
_VECTOR_CELL_PX = 8
_VECTOR_MAP_PX = 1024


@contextmanager
def as_shipped() -> Iterator[None]:
    """Within it matplotlib has its own defaults: a user's style must not change figures, or ask for LaTeX."""
    import matplotlib as mpl

    wanted: Any = {name: value for name, value in mpl.rcParamsDefault.items() if name.startswith(_SHIPPED)}
    with mpl.rc_context(wanted | _RC):
        yield


class Canvas:
    """A figure of a fixed size whose one Axes counts pixels from the upper left corner.

    Args:
        width_px: Width.
        height_px: Height.
        lettering: The fonts.

    Attributes:
        passing: Whether what is placed from now on is for this figure alone; `wipe` takes it away.
    """

    def __init__(self, width_px: int, height_px: int, lettering: Lettering) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.lettering = lettering
        self.width_px, self.height_px = width_px, height_px
        self.figure = Figure(figsize=(width_px / DPI, height_px / DPI), dpi=DPI, facecolor="white")
        self.agg: Any = FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, width_px)
        self.axes.set_ylim(height_px, 0)
        self.axes.set_autoscale_on(False)
        self.passing = False
        self._moving: list[Artist] = []
        self._passing: list[Artist] = []
        self._background: Any = None

    def write(
        self, x: float, y: float, text: str, size_px: float, *, moving: bool = False, color: str = INK, **how: Any
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
        self.keep(placed, moving)
        return placed

    def keep(self, placed: Artist, moving: bool = False) -> None:
        """Takes down whether an artist, which is on the axes, is drawn anew in each figure."""
        placed.set_animated(moving or self.passing)
        if moving or self.passing:
            self._moving.append(placed)
        if self.passing:
            self._passing.append(placed)

    def wipe(self) -> None:
        """Takes away what was for one figure alone; what stays need not be drawn again for the next."""
        self.prepare()
        for artist in self._passing:
            artist.remove()
        self._moving = [artist for artist in self._moving if artist not in self._passing]
        self._passing = []

    def image(
        self, box: tuple[float, float, float, float], cmap: Colormap | None = None, *, moving: bool = True
    ) -> AxesImage:
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
        self.keep(placed, moving)
        return placed

    def lines(
        self,
        segments: Sequence[Sequence[tuple[float, float]]],
        *,
        color: str = LINE,
        width_px: float = 1.0,
        moving: bool = False,
        **how: Any,
    ) -> None:
        """Straight or broken lines, each a sequence of points."""
        from matplotlib.collections import LineCollection

        placed = LineCollection(segments, colors=color, linewidths=width_px * 72 / DPI, **how)
        self.axes.add_collection(placed, autolim=False)
        self.keep(placed, moving)

    def frames(self, boxes: Sequence[tuple[float, float, float, float]]) -> None:
        """Thin frames just outside of boxes (x, y, width, height)."""
        self.lines(
            [[(x - 1, y - 1), (x + w, y - 1), (x + w, y + h), (x - 1, y + h), (x - 1, y - 1)] for x, y, w, h in boxes]
        )

    def boxes(self, *, color: str) -> PolyCollection:
        """Filled rectangles that change from figure to figure; `place_boxes` says where they are."""
        from matplotlib.collections import PolyCollection

        placed = PolyCollection([], facecolors=color, edgecolors="none")
        self.axes.add_collection(placed, autolim=False)
        self.keep(placed, moving=True)
        return placed

    @staticmethod
    def place_boxes(boxes: PolyCollection, places: NDArray[np.float64]) -> None:
        """Moves rectangles to places, (box, 4): x, y, width, height."""
        x, y, width, height = places.T
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        boxes.set_verts(list(np.stack([np.stack(corner, 1) for corner in corners], 1)))

    def prepare(self) -> None:
        """Draws what stays, if it is not drawn yet."""
        if self._background is None:
            self.agg.draw()
            self._background = self.agg.copy_from_bbox(self.figure.bbox)

    def pixels(self) -> NDArray[np.uint8]:
        """The figure as it stands now, (height, width, 3)."""
        self.prepare()
        self.agg.restore_region(self._background)
        for artist in self._moving:
            self.axes.draw_artist(artist)
        return np.array(np.asarray(self.agg.buffer_rgba())[:, :, :3])

    def vector(self, kind: str) -> bytes:
        """The figure as it stands now as SVG or PDF."""
        held = io.BytesIO()
        self.figure.savefig(held, format=kind, metadata=_METADATA[kind])
        return held.getvalue()


def enlarged(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """An array with every cell repeated, for vector files."""
    times = max(1, min(_VECTOR_CELL_PX, _VECTOR_MAP_PX // max(values.shape)))
    return values.repeat(times, 0).repeat(times, 1)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Pixels as a PNG file."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("Software", f"attnscope {__version__}")
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, format="png", compress_level=6, dpi=(DPI, DPI), pnginfo=info)
    return held.getvalue()
