"""Prepare the cells of attention maps for drawing: max-pool them, scale them, and lay their colours over a photo.

A cell is one weight of a map. Functions take and return arrays; `maps` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

Values = NDArray[np.float32]
Pixels = NDArray[np.uint8]

MIN_BRIGHTNESS = 0.6
"""The brightness of a colour over a black pixel of a photo / the colour's brightness over a white pixel."""

N_DECADES = 4
"""The number of powers of ten between the palest and the darkest colour of a logarithmic scale."""


def scale_logarithmically(values: NDArray[Any], top: float) -> Values:
    """Map values to 0 … 1 on a logarithmic scale: `top` becomes 1; `top` / 10 ** N_DECADES or less becomes 0."""
    smallest = top * 10.0**-N_DECADES
    scaled = np.log10(np.maximum(np.asarray(values, np.float64), smallest) / top) / N_DECADES + 1
    return np.clip(scaled, 0, 1).astype(np.float32)


def pool_to_pixels(values: NDArray[Any], room: tuple[float, float]) -> NDArray[Any]:
    """Max-pool values, (row, column), until there is at most one value per pixel of `room`, (width, height)."""
    width, height = map(int, room)
    for axis, n_pixels in enumerate((height, width)):
        n = values.shape[axis]
        if n > n_pixels:
            # Pixel i shows the values from index floor(i * n / n_pixels) on: their largest.
            starts = np.arange(n_pixels) * n // n_pixels
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def max_pool(values: Values, pool: int, axes: Sequence[int] = (0, 1)) -> Values:
    """Return the largest of every `pool` adjacent values along some axes. The last group of an axis may be smaller."""
    if pool > 1:
        for axis in axes:
            starts = np.arange(0, values.shape[axis], pool)
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def overlay(
    photo: Pixels, patches: NDArray[Any], cmap: Colormap, top: float, *, is_smooth: bool = False
) -> Pixels:
    """Draw the weights of patches as colours over a photo, and return the pixels, (height, width, 3).

    The colour shows the weight. The photo only darkens it, at most by the factor MIN_BRIGHTNESS, so that weights can be
    compared even on dark photos.

    Args:
        photo: The photo, (height, width, 3). Its sides are multiples of the numbers of patches.
        patches: The weight of each patch, (row, column).
        cmap: The colours of weights from 0 to `top`.
        top: The weight of the last colour.
        is_smooth: Whether weights are interpolated linearly between the centres of patches; else each patch has one
            colour.
    """
    # The photo's luminance by Rec. 709, 0 to 1, (height, width).
    grey = np.asarray(photo.astype(np.float64) / 255 @ np.array([0.2126, 0.7152, 0.0722]))
    if is_smooth:
        from PIL import Image

        small_image = Image.fromarray(np.clip(patches / top, 0, 1).astype(np.float32))
        pixels = small_image.resize(photo.shape[1::-1], Image.Resampling.BILINEAR)
        return darken(cmap(np.asarray(pixels))[:, :, :3], grey)
    # Look up one colour per patch, (row, column, 3), and repeat it over the pixels of the patch, (height, width, 3).
    colours = cmap(np.clip(patches / top, 0, 1))[:, :, :3]
    patch_height = photo.shape[0] // patches.shape[0]
    patch_width = photo.shape[1] // patches.shape[1]
    return darken(colours.repeat(patch_height, 0).repeat(patch_width, 1), grey)


def darken(colours: NDArray[np.float64], grey: NDArray[np.float64]) -> Pixels:
    """Darken colours, (height, width, 3), by the luminance of a photo, `grey`, (height, width).

    The factor is 1 where the photo is white, and MIN_BRIGHTNESS where it is black. Both inputs are 0 to 1; the result
    is 0 to 255.
    """
    brightness = MIN_BRIGHTNESS + (1 - MIN_BRIGHTNESS) * grey[:, :, None]
    return np.rint(255 * colours * brightness).astype(np.uint8)
