"""Read photos: turned upright, as RGB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.senses import reading

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000
"""A photo of more pixels is refused before it is unpacked: a small file can hold gigabytes of one colour."""

FORMATS = ("PNG", "JPEG", "WebP", "GIF", "TIFF", "BMP")
"""The formats of photos, recognised by content. Pillow reads more, but for EPS it starts Ghostscript."""

_HINT = f"give a photo: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; in Python also an image of Pillow, or an array"


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo as a model's processor takes it.

    Attributes:
        image: The photo, upright, mode RGB.
        source: What to call it: the file's name.
        size: The side in pixels of the square that the model sees; None = what its processor makes of any photo.
    """

    image: Image
    source: str
    size: int | None = None


def read_photo(source: Any) -> Photo:
    """Read a photo as RGB.

    It is rotated as its EXIF data says. Of an animation the first frame is taken, and transparency is laid on white.

    Args:
        source: A path, a Photo, an image of Pillow, or an array (height, width, 3) or (height, width) of uint8.

    Raises:
        AttnscopeError: There is no such file; it is no picture, damaged, or has more than MAX_PIXELS pixels.
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
        return _upright(source, "a picture in memory")
    # Pillow loads its code for all formats as soon as one of FORMATS is missing: load that of the common ones first.
    Image.preinit()
    with reading(source, "picture", _HINT) as path, Image.open(path, formats=FORMATS) as image:
        return _upright(image, path.name)


def _upright(image: Image, name: str) -> Photo:
    """Return an image as a photo, turned as its EXIF data says, on white, in RGB."""
    import PIL.Image
    from PIL import ImageOps

    width, height = image.size
    if width * height > MAX_PIXELS:
        raise AttnscopeError(
            f"{name} has more than {MAX_PIXELS // 1_000_000} million pixels: {width:,} x {height:,}",
            "shrink it first: models see far fewer",
        )
    turned = ImageOps.exif_transpose(image)
    # Modes of more than 8 bits: as RGB, Pillow would clip them at 255.
    if turned.mode.startswith("I") or turned.mode == "F":
        raise AttnscopeError(f"{name} has greys of more than 8 bits", "scale them to 8 bits first")
    if "A" in turned.getbands() or "transparency" in turned.info:
        layer = turned.convert("RGBA")
        white = PIL.Image.new("RGBA", layer.size, "white")
        turned = PIL.Image.alpha_composite(white, layer)
    return Photo(turned.convert("RGB"), name)
