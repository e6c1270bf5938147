"""Declare and check how figures look: colours, size, letters. Drawing them is left to `canvas` and `page`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attnscope.drawing.layout import CAPTION_PX, PAGE_WIDTH_PX, Paper
from attnscope.drawing.lettering import find_font
from attnscope.errors import UsageError, require_choice

ScaleChoice = Literal["fixed", "head", "figure"]
SCALES: tuple[ScaleChoice, ...] = ("fixed", "head", "figure")
DEFAULT_CMAP = "Blues"
WIDTHS = {"column": 3.3, "page": 6.9}
"""Widths by name, in inches: a column and the page of a paper in two columns."""

UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
"""Inches in each unit of length."""

# Figures of an exact width, for print, unless options say otherwise.
_PRINT_DPI = 300
_PRINT_PT = 6.5  # the smallest letters
_PRINT_LABEL_PT = 4.5  # labels of tokens, where there are many

# The smallest and the largest value of options.
_INCHES_RANGE = (1.0, 40.0)
_DPI_RANGE = (30, 2400)
_POINTS_RANGE = (3.0, 40.0)


@dataclass(frozen=True)
class Style:
    """Hold the look of figures: colours, scale, paper and font.

    Attributes:
        scale: What the darkest colour of a map means: weight 1 ("fixed"), each head's largest weight ("head"), or
            the figure's ("figure"). Usually "fixed"; "figure" for rollout, "head" for pictures and sound.
        cmap: The matplotlib colormap of maps.
        colours: How weights become colours of maps: "linear", or "log" over four powers of ten.
        smooth: Whether weights over a photo are interpolated between patches; else a patch is a square.
        layout: Rows and columns of panels, such as "2x1", for maps that were picked; they share their labels. None = as
            many side by side as make the figure near 4:3, each with its labels.
        width: Exact width of each figure: inches, a length such as "85mm", "column" (3.3 in) or "page" (6.9 in). None =
            as wide as it needs to be.
        dpi: Pixels per inch of a PNG; None = 300 if a width is given, else 100.
        font_size: Size in points of the smallest letters; None = 6.5 if a width is given, else fitted to the figure.
        caption: Whether a figure says above itself what it shows, and below itself how to read it.
        font: The font to try first: the name of an installed family, or a file.
        failed: A sentence for each part of the study that failed; they stand at every figure's foot.
    """

    scale: ScaleChoice = "fixed"
    cmap: str = DEFAULT_CMAP
    colours: str = "linear"
    smooth: bool = False
    layout: str | None = None
    width: float | str | None = None
    dpi: int | None = None
    font_size: float | None = None
    caption: bool = True
    font: str | None = None
    failed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Check names.
        require_choice("scale", self.scale, SCALES)
        if self.colours not in ("linear", "log"):
            raise UsageError(f"there are no colours {self.colours!r}", "choose linear or log")
        if self.layout is not None and not re.fullmatch(r"[1-9]\d?x[1-9]\d?", self.layout):
            raise UsageError(
                f"{self.layout!r} is no layout", "give rows and columns of panels, such as 2x1"
            )
        # A command that draws nothing does not load matplotlib to check the default.
        if self.cmap != DEFAULT_CMAP:
            import matplotlib as mpl

            if self.cmap not in mpl.colormaps:
                raise UsageError(
                    f"matplotlib has no colormap {self.cmap!r}", "such as Blues, viridis, magma, Greys"
                )
        # Check sizes, and convert the width to inches.
        if self.width is not None:
            object.__setattr__(self, "width", _inches(self.width))
        _require_within("dpi", self.dpi, _DPI_RANGE)
        _require_within("font-size", self.font_size, _POINTS_RANGE)
        if self.font is not None:
            find_font(self.font)

    @property
    def columns(self) -> int:
        """Return how many panels stand side by side by the layout; 0 = as many as make the figure near 4:3."""
        return 0 if self.layout is None else int(self.layout.partition("x")[2])

    def darkest_values(self, largest: Sequence[float]) -> list[float]:
        """Return the value of each map of a figure that has the darkest colour, from the largest value of each."""
        if self.scale == "fixed":
            return [1.0] * len(largest)
        # A map or a figure of zeros is scaled by 1.
        if self.scale == "figure":
            return [max(largest, default=0.0) or 1.0] * len(largest)
        return [value or 1.0 for value in largest]

    @property
    def paper(self) -> Paper:
        """Return the paper that a figure is laid out on."""
        # Paper of an exact width has sizes of its own; else the figure is laid out as for a screen.
        if self.width is not None:
            points = self.font_size or _PRINT_PT
            label_points = self.font_size or _PRINT_LABEL_PT
            dpi = self.dpi or _PRINT_DPI
            paper = Paper.of_width(float(self.width), points, dpi, self.caption, self.font, label_points)
        else:
            paper = Paper(PAGE_WIDTH_PX, dpi=self.dpi or 100, caption=self.caption, font=self.font)
            # Choose the pixels per inch, which is 72 points, so that captions, the smallest letters, have that size.
            if self.font_size is not None:
                paper = replace(paper, min_px=CAPTION_PX, inch_px=72 * CAPTION_PX / self.font_size)
        return replace(paper, failed=self.failed)


def _inches(width: float | str) -> float:
    """Return a width in inches, from inches, a length with a unit, or the name of a width."""
    written = str(width)
    if written in WIDTHS:
        return WIDTHS[written]
    # A number without a unit is in inches.
    unit = written[-2:] if written[-2:] in UNITS else "in"
    try:
        inches = float(written.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        raise UsageError(
            f"{width!r} is no width",
            f"give inches, a length such as 85mm or 8.5cm, or one of {', '.join(WIDTHS)}",
        ) from None
    _require_within("width", inches, _INCHES_RANGE)
    return inches


def _require_within(name: str, value: float | None, bounds: tuple[float, float]) -> None:
    """Refuse a value outside its bounds by a UsageError; None passes."""
    low, high = bounds
    if value is not None and not (isinstance(value, int | float) and low <= value <= high):
        raise UsageError(f"there is no {name} {value!r}", f"it is a number from {low:g} to {high:g}")


def meanings(value: str, share: str) -> dict[ScaleChoice, str]:
    """Return what the colours mean under each scale, for the colour bar.

    Args:
        value: The meaning of a map's values, such as "attention weight".
        share: The meaning of values that are divided by the largest value of their map.
    """
    return {"fixed": value, "figure": f"{value} (scale: largest of this figure)", "head": share}


USUAL = Style()
"""The style of a figure for which no options are given."""
