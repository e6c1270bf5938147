"""Prepare the cells of maps: pool them where there is no room for all, scale them, lay their colours over a photo."""

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
"""The brightness of a colour over a black photo, as a share of that over a white one."""

DECADES = 4
"""Powers of ten from the palest to the darkest colour. Attention spread evenly over 256 cells is 0.004 in each."""


def log_share(values: NDArray[Any], top: float) -> Values:
    """Return values on a logarithmic scale: `top` becomes 1, and `top` / 10 ** DECADES or less becomes 0."""
    floor = top * 10.0**-DECADES
    shares = np.log10(np.maximum(np.asarray(values, np.float64), floor) / top) / DECADES + 1
    return np.clip(shares, 0, 1).astype(np.float32)


def pool_to_pixels(values: NDArray[Any], room: tuple[float, float]) -> NDArray[Any]:
    """Return values, (row, column), at most one per pixel of a room, (width, height): the largest of several."""
    width, height = map(int, room)
    for axis, n_pixels in enumerate((height, width)):
        n = values.shape[axis]
        if n > n_pixels:
            starts = np.arange(n_pixels) * n // n_pixels
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def max_pool(values: Values, pool: int, axes: Sequence[int] = (0, 1)) -> Values:
    """Return the largest of every `pool` values along each of some axes; the last one may be of fewer values."""
    if pool > 1:
        for axis in axes:
            starts = np.arange(0, values.shape[axis], pool)
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def overlay(
    photo: Pixels, patches: NDArray[Any], cmap: Colormap, top: float, *, is_smooth: bool = False
) -> Pixels:
    """Lay a weight for each patch over a photo, and return the pixels, (height, width, 3).

    A weight has the same colour everywhere. The photo, in grey, makes it lighter or darker by no more than a part, so
    that weights can be told apart on dark photos and on bright ones.

    Args:
        photo: The photo, (height, width, 3).
        patches: The weights, (row, column).
        cmap: The colours of weights from 0 to `top`.
        top: The weight of the last colour.
        is_smooth: Whether weights are interpolated linearly between the middles of patches; else a patch is a square of
            one colour.
    """
    # Luminance after Rec. 709.
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
    """Make colours, (height, width, 3), lighter and darker as the brightness of a photo is, (height, width), 0 to 1."""
    brightness = DARKEST + (1 - DARKEST) * grey[:, :, None]
    return np.rint(255 * colours * brightness).astype(np.uint8)
