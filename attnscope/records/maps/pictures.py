"""A picture as a model saw it, and which of its tokens stands for which part of it. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    pixels: NDArray[np.uint8]
    grid: tuple[int, int]
    source: str
    size: tuple[int, int]
    cells: NDArray[np.int32] | None = None
    area: tuple[float, float, float, float] | None = None

    @property
    def photo(self) -> str:
        """What the photo is called, of which this may be one of several pictures."""
        return self.source.removesuffix(SMALL)

    def moved(self, place_of: NDArray[Any]) -> Picture:
        """The same where each token has another place, (token,)."""
        assert self.cells is not None
        return replace(self, cells=np.where(self.cells >= 0, place_of[self.cells], -1).astype(np.int32))

    def over(self, row: NDArray[Any]) -> NDArray[np.float64]:
        """What tokens get, (key,), as what patches get, (row, column); NaN where no token stands for a patch."""
        assert self.cells is not None
        given = np.append(row.astype(np.float64), np.nan)
        return given[self.cells]

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

    def describe(self) -> dict[str, Any]:
        """All but the pixels, as plain JSON values."""
        described: dict[str, Any] = {"grid": list(self.grid), "source": self.source, "size": list(self.size)}
        described |= {} if self.cells is None else {"cells": self.cells.tolist()}
        return described | ({} if self.area is None else {"area": list(self.area)})


def picture_from(described: Mapping[str, Any] | None, pixels: Any) -> Picture | None:
    """The picture that `Picture.describe` tells of; None where there is none.

    Raises:
        ValueError: Pixels and patches do not fit each other.
    """
    if described is None:
        return None
    rows, columns = map(int, described["grid"])
    width, height = map(int, described["size"])
    given = np.asarray(pixels)
    if not np.all((given >= 0) & (given <= 255)):  # NaN is neither
        raise ValueError("its picture has no colours")
    held = given.astype(np.uint8)
    fits = held.ndim == 3 and held.shape[2] == 3 and held.size and min(rows, columns) > 0
    if not fits or held.shape[0] % rows or held.shape[1] % columns:
        raise ValueError("its picture does not fit its patches")
    cells = None if described.get("cells") is None else np.asarray(described["cells"], np.int32)
    if cells is not None and cells.shape != (rows, columns):
        raise ValueError("the places of its patches do not fit its picture")
    left, top, right, bottom = map(float, described.get("area") or (0, 0, 0, 0))
    area = None if described.get("area") is None else (left, top, right, bottom)
    return Picture(held, (rows, columns), str(described["source"]), (width, height), cells, area)
