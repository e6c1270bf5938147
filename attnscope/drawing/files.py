"""Write figures as PNG, SVG and PDF files. Threads compress one figure while the next one is drawn.

A page here is one figure, a FigureRenderer. `canvas` draws it.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import DEFAULT_DPI, FigureRenderer, matplotlib_defaults
from attnscope.errors import UsageError
from attnscope.results.kinds import FIGURE_FORMATS
from attnscope.results.storage import write_whole
from attnscope.version import VERSION


def write_pages(
    pages: Iterable[tuple[str, FigureRenderer]],
    folder: str | Path,
    formats: Sequence[str],
    threads: int = 2,
) -> list[Path]:
    """Write figures into a folder. Each file is written completely or not at all; equal figures give equal bytes.

    Args:
        pages: For each figure, the file name without a suffix, and the figure. The figures may be one object that
            the iterable changes at each step.
        folder: The folder.
        formats: Some of "png", "svg" and "pdf".
        threads: How many threads compress and write figures while the next one is drawn; 0 = the calling thread does
            everything.

    Returns:
        The paths of the files.

    Raises:
        UsageError: A format is unknown.
    """
    for kind in formats:
        if kind not in FIGURE_FORMATS:
            raise UsageError(
                f"figures are not drawn as {kind!r}", f"choose from {', '.join(FIGURE_FORMATS)}"
            )
    if not formats:
        return []

    def contents() -> Iterator[tuple[Path, Callable[[], bytes]]]:
        """Yield the path of each file, and a function that makes the file's content."""
        for stem, page in pages:
            for kind in formats:
                # Draw here, before the next step of `pages` changes the figure. A thread compresses the pixels later.
                if kind == "png":
                    pixels = page.render_pixels()
                    make_content = partial(encode_png, pixels, page.dpi)
                else:
                    # A vector file is already complete: `bytes` returns its argument unchanged.
                    make_content = partial(bytes, page.render_vector(kind))
                yield Path(folder) / f"{stem}.{kind}", make_content

    # A result file that a user edited may hold infinite or negative values. NumPy's warnings about them are no help.
    with matplotlib_defaults(), np.errstate(all="ignore"):
        if not threads:
            return list(map(_write, contents()))
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(_write, contents()))


def _write(path_and_make_content: tuple[Path, Callable[[], bytes]]) -> Path:
    """Make the content of a file, write it, and return the path."""
    path, make_content = path_and_make_content
    return write_whole(path, make_content())


def number_duplicates(stems: Iterable[str]) -> list[str]:
    """Make file names unique by numbers: a, a, A become a, a-2, A-3. Some file systems do not distinguish a and A."""
    # The names so far, by their lower-case form.
    names: dict[str, str] = {}
    for stem in stems:
        # Count up until no earlier name is equal.
        name = stem
        number = 2
        while name.lower() in names:
            name = f"{stem}-{number}"
            number += 1
        names[name.lower()] = name
    return list(names.values())


def render_first_png(pages: Iterable[tuple[str, FigureRenderer]]) -> bytes:
    """Draw the first of some figures, and return it as a PNG file, for notebooks."""
    with matplotlib_defaults():
        page = next(iter(pages))[1]
        return encode_png(page.render_pixels(), page.dpi)


def encode_png(pixels: NDArray[np.uint8], dpi: int = DEFAULT_DPI) -> bytes:
    """Encode pixels, (height, width, 3), as a PNG file.

    Every row is stored as its difference from the row above, the filter "Up" (PNG specification, third edition, 9.2).
    It suits these figures, which consist of rectangles. Libraries try all filters on every row. For these figures, that
    takes twice as long and gives larger files.
    """
    # In each row of bytes, the number of the row's filter comes first, (height, 1 + 3 width).
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels).reshape(height, 3 * width)
    filtered = np.empty((height, 1 + 3 * width), np.uint8)
    filtered[:, 0] = 2  # "Up"
    filtered[0, 1:] = rows[0]  # the row above the first one counts as zeros
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    # The chunks of the file: size, program, resolution, the compressed rows, end.
    dots_per_metre = round(dpi / 0.0254)
    chunks = (
        # 8 bits per channel; 2 = RGB; the zeros are the standard compression and filtering, without interlacing.
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"tEXt", f"Software\0attnscope {VERSION}".encode("latin-1")),
        (b"pHYs", struct.pack(">IIB", dots_per_metre, dots_per_metre, 1)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 6)),
        (b"IEND", b""),
    )
    # The file is PNG's signature, then of each chunk: length, type, data and checksum.
    content = [b"\x89PNG\r\n\x1a\n"]
    for chunk_type, data in chunks:
        checksum = zlib.crc32(chunk_type + data)
        content += [struct.pack(">I", len(data)), chunk_type, data, struct.pack(">I", checksum)]
    return b"".join(content)
