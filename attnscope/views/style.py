"""How figures are coloured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnscope.errors import UsageError

Scale = Literal["fixed", "head", "figure"]
SCALES: tuple[Scale, ...] = ("fixed", "head", "figure")
DEFAULT_CMAP = "Blues"


@dataclass(frozen=True)
class Style:
    """How figures are coloured.

    Attributes:
        scale: What the darkest colour means: weight 1 ("fixed"), the largest weight of each head ("head"), or the
            largest of the figure ("figure").
        cmap: Name of a matplotlib colormap.
    """

    scale: Scale = "fixed"
    cmap: str = DEFAULT_CMAP

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UsageError(f"there is no scale {self.scale!r}", f"choose one of {', '.join(SCALES)}")
        if self.cmap != DEFAULT_CMAP:  # which needs no drawing library to be known
            import matplotlib as mpl

            if self.cmap not in mpl.colormaps:
                raise UsageError(f"matplotlib has no colormap {self.cmap!r}", "such as Blues, viridis, magma, Greys")
