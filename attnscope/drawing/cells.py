"""Cells of maps: fewer of them where there is no room for all, their logarithmic scale, and colours over a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

Values = NDArray[np.float32]
Pixels = NDArray[np.uint8]

DARKEST = 0.6
"""How much of a colour is left where the picture below it is black."""

DECADES = 4
"""Powers of ten from the palest to the darkest colour. Attention spread evenly over 256 cells is 0.004 in each."""


def log_share(values: NDArray[Any], top: float) -> Values:
    """Return values on a logarithmic scale, 0 to 1: 1 is `top`, 0 is `top` / 10 ** DECADES and less."""
    floor = top * 10.0**-DECADES
    shares = np.log10(np.maximum(np.asarray(values, np.float64), floor) / top) / DECADES + 1
    return np.clip(shares, 0, 1).astype(np.float32)


def fit(values: NDArray[Any], room: tuple[float, float]) -> NDArray[Any]:
    """Return values, (row, column), with at most one per pixel of a room, (width, height): the largest of several."""
    for axis, pixels in ((1, int(room[0])), (0, int(room[1]))):
        n = values.shape[axis]
        if n > pixels:
            values = np.maximum.reduceat(values, np.arange(pixels) * n // pixels, axis=axis)
    return values


def max_pool(values: Values, pool: int, axes: Sequence[int] = (0, 1)) -> Values:
    """Return the largest of every `pool` values along each axis; the last of them may be of fewer."""
    for axis in axes if pool > 1 else ():
        values = np.maximum.reduceat(values, np.arange(0, values.shape[axis], pool), axis=axis)
    return values


def overlay(
    photo: Pixels, patches: NDArray[Any], cmap: Colormap, top: float, *, is_smooth: bool = False
) -> Pixels:
    """Lay a number for each patch, (row, column), over a photo; the colormap is of 0 to `top`.

    A weight is a colour of the colormap, the same everywhere; the photo, in grey, only makes it lighter or darker, by
    no more than a part, so that weights can be told on dark photos and on bright ones. A patch is a square of one
    colour, or with `is_smooth` weights are interpolated linearly between the middles of patches.
    """
    # Luminance after Rec. 709.
    grey = np.asarray(photo.astype(np.float64) / 255 @ np.array([0.2126, 0.7152, 0.0722]))
    if is_smooth:
        from PIL import Image

        shares = Image.fromarray(np.clip(patches / top, 0, 1).astype(np.float32))
        pixels = shares.resize(photo.shape[1::-1], Image.Resampling.BILINEAR)
        return tint(cmap(np.asarray(pixels))[:, :, :3], grey)
    # (row, column, 3), then as many pixels as the photo has.
    colours = cmap(np.clip(patches / top, 0, 1))[:, :, :3]
    rows, columns = (photo.shape[axis] // patches.shape[axis] for axis in (0, 1))
    return tint(colours.repeat(rows, 0).repeat(columns, 1), grey)


def tint(colours: NDArray[np.float64], grey: NDArray[np.float64]) -> Pixels:
    """Lay colours over a photo, which is 0 to 1."""
    return np.rint(255 * colours * (DARKEST + (1 - DARKEST) * grey[:, :, None])).astype(np.uint8)
