"""Declare and check the options for the look of figures: colours, sizes, letters. `canvas` and `page` draw figures."""

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
INCHES_BY_WIDTH_NAME = {"column": 3.3, "page": 6.9}
"""The widths of figures that have a name, in inches: one column or the full page of a two-column paper."""

INCHES_BY_UNIT = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
"""The length of each unit in inches."""

# Defaults for figures of an exact width, which are for print.
_PRINT_DPI = 300
_PRINT_FONT_PT = 6.5  # the smallest letters of all text but the labels of tokens
_PRINT_LABEL_PT = 4.5  # the smallest letters of labels of tokens, which shrink if there are many

# The smallest and the largest allowed values of the options width, dpi and font_size.
_INCHES_RANGE = (1.0, 40.0)
_DPI_RANGE = (30, 2400)
_POINTS_RANGE = (3.0, 40.0)


@dataclass(frozen=True)
class Style:
    """Hold the look of figures: colours, scale, paper and font.

    Attributes:
        scale: Which weight has the darkest colour of a map: 1 ("fixed"), the head's largest weight ("head"), or the
            figure's largest weight ("figure"). Callers pass "fixed" by default, but "figure" for rollout and "head" for
            pictures and sound.
        cmap: The matplotlib colormap of maps.
        colours: How weights become colours: "linear", or "log" over four powers of ten.
        smooth: Whether weights over a photo are interpolated between patches; else each patch has one colour.
        layout: Rows and columns of panels, such as "2x1", for a selection of maps, which then share their labels. None
            = chosen so that the figure is near 4:3, and each map has its own labels.
        width: Exact width of each figure: inches, a length such as "85mm", "column" (3.3 in) or "page" (6.9 in). None =
            as wide as the figure needs.
        dpi: Pixels per inch of a PNG; None = 300 if `width` is set, else 100.
        font_size: Size in points of the smallest letters; None = 6.5 if `width` is set, else fitted to the figure.
        caption: Whether a figure has a title and a subtitle above, and notes below.
        font: The font to try first: the name of an installed family, or a file; None = DejaVu Sans.
        failed: A sentence for each part of the study that failed. They stand at the foot of every figure.
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
        # Check the options that are names.
        require_choice("scale", self.scale, SCALES)
        if self.colours not in ("linear", "log"):
            raise UsageError(f"there are no colours {self.colours!r}", "choose linear or log")
        if self.layout is not None and not re.fullmatch(r"[1-9]\d?x[1-9]\d?", self.layout):
            raise UsageError(
                f"{self.layout!r} is no layout", "give rows and columns of panels, such as 2x1"
            )
        # Skip the check for the default, so that a command that draws nothing need not load matplotlib.
        if self.cmap != DEFAULT_CMAP:
            import matplotlib as mpl

            if self.cmap not in mpl.colormaps:
                raise UsageError(
                    f"matplotlib has no colormap {self.cmap!r}", "such as Blues, viridis, magma, Greys"
                )
        # Check sizes, and convert the width to inches.
        if self.width is not None:
            object.__setattr__(self, "width", _parse_inches(self.width))
        _require_within("dpi", self.dpi, _DPI_RANGE)
        _require_within("font-size", self.font_size, _POINTS_RANGE)
        if self.font is not None:
            find_font(self.font)

    @property
    def columns(self) -> int:
        """Return the number of panels side by side; 0 = no layout is set, so `drawing.layout` chooses the number."""
        return 0 if self.layout is None else int(self.layout.partition("x")[2])

    def darkest_values(self, largest_values: Sequence[float]) -> list[float]:
        """Return the value with the darkest colour, for each map of a figure, given the largest value of each map."""
        if self.scale == "fixed":
            return [1.0] * len(largest_values)
        # If all values are 0, give the darkest colour to 1 (`or 1.0`), as a scale must not have length 0.
        if self.scale == "figure":
            return [max(largest_values, default=0.0) or 1.0] * len(largest_values)
        return [value or 1.0 for value in largest_values]

    @property
    def paper(self) -> Paper:
        """Return the sizes of page and letters that a figure is laid out with."""
        # With an exact width, use the sizes for print; otherwise lay the figure out for a screen.
        if self.width is not None:
            points = self.font_size or _PRINT_FONT_PT
            label_points = self.font_size or _PRINT_LABEL_PT
            dpi = self.dpi or _PRINT_DPI
            paper = Paper.of_width(float(self.width), points, dpi, self.caption, self.font, label_points)
        else:
            paper = Paper(PAGE_WIDTH_PX, dpi=self.dpi or 100, caption=self.caption, font=self.font)
            # Choose `inch_px`, the pixels of the layout per inch, so that captions, which are CAPTION_PX in the layout,
            # are `font_size` points (1/72 inch). `dpi` stays: the pixels of the PNG per inch are another number.
            if self.font_size is not None:
                paper = replace(paper, min_px=CAPTION_PX, inch_px=72 * CAPTION_PX / self.font_size)
        return replace(paper, failures=self.failed)


def _parse_inches(width: float | str) -> float:
    """Convert a width to inches. It may be a number of inches, a length with a unit, or the name of a width."""
    width_text = str(width)
    if width_text in INCHES_BY_WIDTH_NAME:
        return INCHES_BY_WIDTH_NAME[width_text]
    # A number without a unit is in inches. All units have two letters.
    unit = width_text[-2:] if width_text[-2:] in INCHES_BY_UNIT else "in"
    try:
        inches = float(width_text.removesuffix(unit)) * INCHES_BY_UNIT[unit]
    except ValueError:
        raise UsageError(
            f"{width!r} is no width",
            f"give inches, a length such as 85mm or 8.5cm, or one of {', '.join(INCHES_BY_WIDTH_NAME)}",
        ) from None
    _require_within("width", inches, _INCHES_RANGE)
    return inches


def _require_within(name: str, value: float | None, bounds: tuple[float, float]) -> None:
    """Raise a UsageError if a value is outside its bounds. None, an option that is not set, is allowed."""
    low, high = bounds
    if value is not None and not (isinstance(value, int | float) and low <= value <= high):
        raise UsageError(f"there is no {name} {value!r}", f"it is a number from {low:g} to {high:g}")


def scale_meanings(value: str, share: str) -> dict[ScaleChoice, str]:
    """Return what the colours mean for each value of `Style.scale`, as a text for the colour bar.

    Args:
        value: The meaning of a map's values, such as "attention weight".
        share: The meaning of values divided by the largest value of their map.
    """
    return {"fixed": value, "figure": f"{value} (scale: largest of this figure)", "head": share}


DEFAULT_STYLE = Style()
"""The style of a figure without any options."""
