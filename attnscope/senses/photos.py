"""Reads photos: upright, in red, green and blue; a note says what had to be changed."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import refuse_pipe

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 100_000_000
"""A photo of more pixels is refused before it is unpacked: a small file can hold gigabytes of one colour."""

FORMATS = ("PNG", "JPEG", "WebP", "GIF", "TIFF", "BMP")
"""The formats of photos, recognised by content. Pillow reads more, one of which starts other programs."""

_HINT = f"give a photo: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo as a model's processor takes it.

    Attributes:
        image: The photo, upright, mode RGB.
        source: What to call it: the file's name.
        notes: What was done to it that its owner may not expect.
        size: The side in pixels of the square that the model is given; None = as its processor makes it.
    """

    image: Image
    source: str
    notes: tuple[str, ...] = ()
    size: int | None = None


def read_photo(given: Any) -> Photo:
    """Read a photo.

    Rotated as its EXIF data says; of an animation the first frame; transparent places on white; greys and CMYK as red,
    green and blue; 16-bit greys scaled to 8 bits.

    Args:
        given: A path, a Photo, an image of Pillow, or an array (height, width, 3) or (height, width) of uint8.

    Raises:
        AttnscopeError: There is no such file; it is no picture, damaged, or has more than MOST_PIXELS pixels.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(given, Photo):
        return given
    if isinstance(given, Image.Image):
        return _upright(given, "a picture in memory")
    if isinstance(given, np.ndarray):
        is_picture = given.ndim == 2 or (given.ndim == 3 and given.shape[2] == 3)
        if given.dtype != np.uint8 or not is_picture or not given.size:
            raise AttnscopeError(
                f"an array of {given.dtype}, {given.shape}, is no picture", "give uint8, (height, width, 3)"
            )
        return _upright(Image.fromarray(given), "a picture in memory")
    if not isinstance(given, str | os.PathLike):
        raise AttnscopeError(f"{type(given).__name__} is no picture", "give a path, an image of Pillow, or an array")
    path = Path(given)
    refuse_pipe(path, "a picture")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its size, which is asked below, and of odd tags
            with Image.open(path, formats=FORMATS) as image:
                _require_size(image, path.name)
                return _upright(image, path.name)
    except AttnscopeError:
        raise
    except Image.DecompressionBombError:
        raise _too_large(path.name, "") from None
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}", _HINT) from None
    except IsADirectoryError:
        raise AttnscopeError(f"{path} is a folder, not a picture", _HINT) from None
    except UnidentifiedImageError:
        what = "is empty" if path.stat().st_size == 0 else "is not a photo that attnscope can read"
        raise AttnscopeError(f"{path} {what}", _HINT) from None
    except PermissionError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # decoders raise what they like on damaged files
        raise AttnscopeError(f"{path} is damaged or cut short: {first_line(error)}", "get the file again") from None


def _require_size(image: Image, name: str) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise _too_large(name, f": {width:,} x {height:,}")
    if not width or not height:
        raise AttnscopeError(f"{name} has no pixels", _HINT)


def _too_large(name: str, size: str) -> AttnscopeError:
    return AttnscopeError(
        f"{name} has more than {MOST_PIXELS // 1_000_000} million pixels{size}", "shrink it first: models see far fewer"
    )


def _upright(image: Image, name: str) -> Photo:
    from PIL import Image as images
    from PIL import ImageOps

    notes = []
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        image.seek(0)
        notes.append(f"{name} has {frames} frames: the first one is shown")
    turned = ImageOps.exif_transpose(image)
    if turned.size != image.size or image.getexif().get(0x0112, 1) not in (0, 1):
        notes.append(f"{name} is turned upright, as its EXIF data says")
    if turned.mode.startswith("I") or turned.mode == "F":
        turned = _from_wide_greys(turned, name)
        notes.append(f"{name} has greys of more than 8 bits: scaled to 8")
    if "A" in turned.getbands() or "transparency" in turned.info:
        clear = turned.convert("RGBA")
        ground = images.new("RGBA", clear.size, "white")
        if np.asarray(clear)[:, :, 3].min() < 255:
            notes.append(f"transparent places of {name} are white")
        turned = images.alpha_composite(ground, clear)
    return Photo(turned.convert("RGB"), name, tuple(notes))


def _from_wide_greys(image: Image, name: str) -> Image:
    """Greys of 16 bits as 8 bits; Pillow's own conversion would cut them off at 255."""
    from PIL import Image as images

    values = np.asarray(image).astype(np.float64)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise AttnscopeError(f"{name} has pixels that are no colours ({image.mode})", _HINT)
    return images.fromarray(np.rint(values / 257).astype(np.uint8))
