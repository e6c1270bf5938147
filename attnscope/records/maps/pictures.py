"""A picture as a model saw it, and which of its tokens stands for which part of it. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import OMITTED, beside, parts

SMALL = ", small"
"""What the name of a picture ends in that is all of a photo, made small, beside one with more detail."""
MEAN = "mean"
"""The query that stands for the mean over all patches."""


@dataclass(frozen=True, eq=False)
class Picture:
    """What a vision model saw of a photo.

    Attributes:
        pixels: The picture after the model's own resizing and cropping, without its normalisation, as far as patches
            cover it, put together from its tiles: (height, width, 3), uint8, red, green, blue.
        grid: Rows and columns of patches; the patch in row i and column j is the token "i,j".
        source: What the photo is called.
        size: Width and height of the photo before it was resized.
        cells: Of a picture among words: the place in the text of the token that stands for each patch, (row, column),
            int32; -1 = none does. None = all tokens that are not special are its patches, row by row.
        area: What of the photo it covers: left, top, right and lower edge, in pixels of the photo. None = not known.
    """

    pixels: NDArray[np.uint8] = field(metadata=shaped("height width 3", filled=True, **beside("")))
    grid: tuple[int, int]
    source: str
    size: tuple[int, int]
    cells: NDArray[np.int32] | None = field(default=None, metadata=shaped("n_rows n_columns", **OMITTED))
    area: tuple[float, float, float, float] | None = field(default=None, metadata=OMITTED)

    @property
    def n_rows(self) -> int:
        """Rows of patches."""
        return self.grid[0]

    @property
    def n_columns(self) -> int:
        """Columns of patches."""
        return self.grid[1]

    @property
    def photo(self) -> str:
        """What the photo is called, of which this may be one of several pictures."""
        return self.source.removesuffix(SMALL)

    def move(self, place_of: NDArray[Any]) -> Picture:
        """The same where each token has another place, (token,)."""
        assert self.cells is not None
        return replace(self, cells=np.where(self.cells >= 0, place_of[self.cells], -1).astype(np.int32))

    def over(self, row: NDArray[Any]) -> NDArray[np.float64]:
        """What tokens get, (key,), as what patches get, (row, column); NaN where no token stands for a patch."""
        assert self.cells is not None
        return np.append(row.astype(np.float64), np.nan)[self.cells]

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return self.pixels.shape[0] // self.grid[0], self.pixels.shape[1] // self.grid[1]

    @property
    def facts(self) -> str:
        """What it is, in one line."""
        (rows, columns), (high, wide) = self.grid, self.patch
        height, width = self.pixels.shape[:2]
        return (
            f"{self.source}, {self.size[0]} × {self.size[1]}, as the model saw it: {width} × {height} pixels, "
            f"{columns} × {rows} patches of {wide} × {high}"
        )

    def require_whole(self) -> None:
        """Refuses pixels that are not whole patches."""
        if min(self.grid) < 1 or any(n % n_patches for n, n_patches in zip(self.pixels.shape, self.grid, strict=False)):
            raise ValueError("its picture does not fit its patches")


PICTURES = parts(lambda _, number: f"picture_{number}")
"""Metadata of several pictures."""
