"""Prepare the cells of maps: pool them where pixels are few, scale them, and lay their colours over a photo."""

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
"""How bright a colour is over a black pixel of a photo, as a share of its brightness over a white one."""

DECADES = 4
"""How many powers of ten a logarithmic scale has, from its palest to its darkest colour."""


def log_share(values: NDArray[Any], top: float) -> Values:
    """Return values on a logarithmic scale: `top` becomes 1, and `top` / 10 ** DECADES or less becomes 0."""
    smallest = top * 10.0**-DECADES
    shares = np.log10(np.maximum(np.asarray(values, np.float64), smallest) / top) / DECADES + 1
    return np.clip(shares, 0, 1).astype(np.float32)


def pool_to_pixels(values: NDArray[Any], room: tuple[float, float]) -> NDArray[Any]:
    """Return values, (row, column), max-pooled so that there is at most one per pixel of a room, (width, height)."""
    width, height = map(int, room)
    for axis, n_pixels in enumerate((height, width)):
        n = values.shape[axis]
        if n > n_pixels:
            # The first value of each pixel: i n / n_pixels, rounded down.
            starts = np.arange(n_pixels) * n // n_pixels
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def max_pool(values: Values, pool: int, axes: Sequence[int] = (0, 1)) -> Values:
    """Return the largest of every `pool` neighbours along some axes. At the end of an axis there may be fewer."""
    if pool > 1:
        for axis in axes:
            starts = np.arange(0, values.shape[axis], pool)
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def overlay(
    photo: Pixels, patches: NDArray[Any], cmap: Colormap, top: float, *, is_smooth: bool = False
) -> Pixels:
    """Lay the weights of patches over a photo as colours, and return the pixels, (height, width, 3).

    Where the photo is dark, a colour gets darker, down to the share DARKEST of its brightness. So weights can be told
    apart on dark photos, too.

    Args:
        photo: The photo, (height, width, 3).
        patches: The weights, (row, column).
        cmap: The colours of weights from 0 to `top`.
        top: The weight of the last colour.
        is_smooth: Whether weights are interpolated linearly between the middles of patches; else all of a patch has
            one colour.
    """
    # Luminance by Rec. 709, 0 to 1: (height, width).
    grey = np.asarray(photo.astype(np.float64) / 255 @ np.array([0.2126, 0.7152, 0.0722]))
    if is_smooth:
        from PIL import Image

        shares = Image.fromarray(np.clip(patches / top, 0, 1).astype(np.float32))
        pixels = shares.resize(photo.shape[1::-1], Image.Resampling.BILINEAR)
        return tint(cmap(np.asarray(pixels))[:, :, :3], grey)
    # The colours of patches, (row, column, 3), then of the pixels of the photo.
    colours = cmap(np.clip(patches / top, 0, 1))[:, :, :3]
    patch_height = photo.shape[0] // patches.shape[0]
    patch_width = photo.shape[1] // patches.shape[1]
    return tint(colours.repeat(patch_height, 0).repeat(patch_width, 1), grey)


def tint(colours: NDArray[np.float64], grey: NDArray[np.float64]) -> Pixels:
    """Return colours, (height, width, 3), darkened where the brightness of a photo, (height, width), is below 1.

    Colours and brightness are 0 to 1, the result 0 to 255.
    """
    brightness = DARKEST + (1 - DARKEST) * grey[:, :, None]
    return np.rint(255 * colours * brightness).astype(np.uint8)
