"""Read photos from image files, Pillow images or arrays: as RGB, rotated upright by their EXIF data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.senses import translate_decoder_errors

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000
"""A photo of more pixels is refused before it is decompressed: a file of a few kilobytes can unpack to gigabytes."""

FORMATS = ("PNG", "JPEG", "WebP", "GIF", "TIFF", "BMP")
"""The formats that are read, recognised by content. Pillow reads more, but for EPS it runs Ghostscript."""

_HINT = f"give a photo: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; in Python also an image of Pillow, or an array"


@dataclass(frozen=True, eq=False)
class Photo:
    """Hold a photo that is ready for a model's image processor.

    Attributes:
        image: The upright image, mode RGB.
        source: Its name in messages and titles: the file's name, or "a picture in memory".
        size: The side in pixels of the square that the model gets; None = the default size of the model's processor.
    """

    image: Image
    source: str
    size: int | None = None


def read_photo(source: Any) -> Photo:
    """Read a photo as RGB.

    It is rotated as its EXIF data says. Transparent pixels get a white background. Of an animation only the first frame
    is read.

    Args:
        source: A path, a Photo, a Pillow image, or a uint8 array (height, width, 3) or (height, width).

    Raises:
        AttnscopeError: There is no such file, the file is no picture or damaged, or the photo has more than MAX_PIXELS
            pixels.
    """
    from PIL import Image

    if isinstance(source, Photo):
        return source
    if isinstance(source, np.ndarray):
        has_image_shape = source.ndim == 2 or source.shape[2:] == (3,)
        if source.dtype != np.uint8 or not has_image_shape or not source.size:
            raise AttnscopeError(
                f"an array of {source.dtype}, {source.shape}, is no picture",
                "give uint8, (height, width, 3)",
            )
        source = Image.fromarray(source)
    if isinstance(source, Image.Image):
        return _to_photo(source, "a picture in memory")
    # `preinit` imports Pillow's plugins of common formats. Without it, `open` would import the plugins of all formats,
    # which is slow.
    Image.preinit()
    with (
        translate_decoder_errors(source, "picture", _HINT) as path,
        Image.open(path, formats=FORMATS) as image,
    ):
        return _to_photo(image, path.name)


def _to_photo(image: Image, name: str) -> Photo:
    """Return a Pillow image as a Photo: rotated by its EXIF data, on a white background, in RGB."""
    import PIL.Image
    from PIL import ImageOps

    width, height = image.size
    if width * height > MAX_PIXELS:
        raise AttnscopeError(
            f"{name} has more than {MAX_PIXELS // 1_000_000} million pixels: {width:,} x {height:,}",
            "shrink it first: models see far fewer",
        )
    upright = ImageOps.exif_transpose(image)
    # The modes I, I;16 and F have more than 8 bits. `convert("RGB")` would clip their values at 255.
    if upright.mode.startswith("I") or upright.mode == "F":
        raise AttnscopeError(f"{name} has greys of more than 8 bits", "scale them to 8 bits first")
    if "A" in upright.getbands() or "transparency" in upright.info:
        layer = upright.convert("RGBA")
        white = PIL.Image.new("RGBA", layer.size, "white")
        upright = PIL.Image.alpha_composite(white, layer)
    return Photo(upright.convert("RGB"), name)
