"""Declare and check how figures look: colours, size, letters. Drawing them is left to `canvas` and `page`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attnscope.drawing.layout import CAPTION_PX, MIN_WIDTH_PX, Paper
from attnscope.drawing.lettering import find_font
from attnscope.errors import UsageError

Scale = Literal["fixed", "head", "figure"]
SCALES: tuple[Scale, ...] = ("fixed", "head", "figure")
DEFAULT_CMAP = "Blues"
WIDTHS = {"column": 3.3, "page": 6.9}
"""Widths by name, in inches: a column and the page of a paper in two columns."""

UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
"""Inches in each unit of length."""

PRINT_DPI, PRINT_PT = 300, 6.5
_INCHES, _DPI, _POINTS = (1.0, 40.0), (30, 2400), (3.0, 40.0)


@dataclass(frozen=True)
class Style:
    """The look of figures: colours, scale, paper and font.

    Attributes:
        scale: Of maps: what the darkest colour means: weight 1 ("fixed"), each head's largest weight ("head"), or
            the figure's ("figure"). Usually "fixed"; "figure" for rollout, "head" for pictures and sound.
        cmap: Of maps: the name of a matplotlib colormap.
        colours: Of maps: "linear", or "log" over four powers of ten.
        smooth: Over a photo: whether weights are interpolated between patches; else a patch is a square.
        layout: Of maps that were picked: rows and columns of panels, such as "2x1"; they share their labels. None = as
            many side by side as make the figure near 4:3, each with its labels.
        width: Width of each figure in inches, exactly, or such as "85mm", or "column" (3.3) or "page" (6.9); None = as
            wide as it needs to be.
        dpi: Pixels an inch of a PNG; None = 100, with a width 300.
        font_size: Size in points of the smallest letters; None = fitted to the figure, with a width 6.5.
        caption: Whether a figure says above itself what it shows, and below itself how to read it.
        font: A font to take first: the name of an installed family, or a file.
        failed: A sentence for each part of the study that failed, at every figure's foot.
    """

    scale: Scale = "fixed"
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
        # Names.
        if self.scale not in SCALES:
            raise UsageError(f"there is no scale {self.scale!r}", f"choose one of {', '.join(SCALES)}")
        if self.colours not in ("linear", "log"):
            raise UsageError(f"there are no colours {self.colours!r}", "choose linear or log")
        if self.layout is not None and not re.fullmatch(r"[1-9]\d?x[1-9]\d?", self.layout):
            raise UsageError(f"{self.layout!r} is no layout", "give rows and columns of panels, such as 2x1")
        if self.cmap != DEFAULT_CMAP:  # which needs no drawing library to be known
            import matplotlib as mpl

            if self.cmap not in mpl.colormaps:
                raise UsageError(f"matplotlib has no colormap {self.cmap!r}", "such as Blues, viridis, magma, Greys")
        # Sizes.
        if self.width is not None:
            object.__setattr__(self, "width", _inches(self.width))
        _require("dpi", self.dpi, _DPI)
        _require("font-size", self.font_size, _POINTS)
        if self.font is not None:
            find_font(self.font)

    @property
    def columns(self) -> int:
        """Return how many panels stand side by side; 0 = as many as look well."""
        return 0 if self.layout is None else int(self.layout.partition("x")[2])

    def limits(self, tops: Sequence[float]) -> list[float]:
        """Return the value of the darkest colour of each map of a figure, from the largest value of each."""
        if self.scale == "fixed":
            return [1.0] * len(tops)
        return [(top if self.scale == "head" else max(tops)) or 1.0 for top in tops]

    @property
    def paper(self) -> Paper:
        """Return the paper that a figure is laid out on."""
        if self.width is None:
            inch_px = 100.0 if self.font_size is None else 72 * CAPTION_PX / self.font_size
            least = 0.0 if self.font_size is None else CAPTION_PX
            paper = Paper(MIN_WIDTH_PX, False, least, inch_px, self.dpi or 100, self.caption, font=self.font)
        else:
            points = PRINT_PT if self.font_size is None else self.font_size
            paper = Paper.of_width(_inches(self.width), points, self.dpi or PRINT_DPI, self.caption, self.font)
        return replace(paper, failed=self.failed)


def _inches(width: float | str) -> float:
    """Return a width in inches, by its name, or with a unit."""
    try:
        if isinstance(width, str) and width in WIDTHS:
            return WIDTHS[width]
        unit = width[-2:] if isinstance(width, str) and width[-2:] in UNITS else "in"
        inches = float(width.removesuffix(unit) if isinstance(width, str) else width) * UNITS[unit]
    except (TypeError, ValueError):
        hint = f"give inches, a length such as 85mm or 8.5cm, or one of {', '.join(WIDTHS)}"
        raise UsageError(f"{width!r} is no width", hint) from None
    _require("width", inches, _INCHES)
    return inches


def _require(name: str, value: float | None, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if value is not None and not (isinstance(value, int | float) and low <= value <= high):
        raise UsageError(f"there is no {name} {value!r}", f"it is a number from {low:g} to {high:g}")


def meanings(what: str, own: str) -> dict[Scale, str]:
    """Return the meaning of colours by their scale: `what` a value is, and `own`, its share of each map's largest."""
    return {"fixed": what, "figure": f"{what} (scale: largest of this figure)", "head": own}


USUAL = Style()
