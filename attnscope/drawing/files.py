"""Write figures (pages) as files in several formats. Threads compress a page while the next one is drawn."""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import DPI, FigureRenderer, matplotlib_defaults
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
    """Write figures into a folder, each file whole or not at all; the same figures give the same bytes.

    Args:
        pages: The names of files, without a suffix, and the figures. All may be one object that changes from step to
            step.
        folder: The folder.
        formats: Some of "png", "svg" and "pdf".
        threads: How many threads compress and write pages while the next one is drawn; 0 = the calling thread does.

    Returns:
        The paths of the files.

    Raises:
        UsageError: There is no such format.
    """
    for kind in formats:
        if kind not in FIGURE_FORMATS:
            raise UsageError(
                f"figures are not drawn as {kind!r}", f"choose from {', '.join(FIGURE_FORMATS)}"
            )
    if not formats:
        return []

    def contents() -> Iterator[tuple[Path, Callable[[], bytes]]]:
        """Yield each path, with a function that makes the content of the file."""
        for stem, page in pages:
            for kind in formats:
                # Draw at once, as the next page may change this one. A thread compresses the pixels.
                if kind == "png":
                    pixels = page.pixels()
                    content = partial(png, pixels, page.dpi)
                else:
                    # A vector file is finished: `bytes` returns it as it is.
                    content = partial(bytes, page.vector(kind))
                yield Path(folder) / f"{stem}.{kind}", content

    # A user's own record may hold infinite or negative values. NumPy's warnings of them would not help the user.
    with matplotlib_defaults(), np.errstate(all="ignore"):
        if not threads:
            return list(map(_write, contents()))
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(_write, contents()))


def _write(path_and_content: tuple[Path, Callable[[], bytes]]) -> Path:
    """Make the content of a file, write it, and return the path."""
    path, content = path_and_content
    return write_whole(path, content())


def distinct(stems: Iterable[str]) -> list[str]:
    """Return file names without duplicates: a, a, A become a, a-2, A-3. On some disks, a and A are one file."""
    names: dict[str, str] = {}
    for stem in stems:
        # Count up until no earlier name is the same.
        name = stem
        number = 2
        while name.lower() in names:
            name = f"{stem}-{number}"
            number += 1
        names[name.lower()] = name
    return list(names.values())


def first_png(pages: Iterable[tuple[str, FigureRenderer]]) -> bytes:
    """Return the first of some figures as a PNG, for notebooks."""
    with matplotlib_defaults():
        page = next(iter(pages))[1]
        return png(page.pixels(), page.dpi)


def png(pixels: NDArray[np.uint8], dpi: int = DPI) -> bytes:
    """Return pixels, (height, width, 3), as a PNG file.

    Every row is filtered as its difference to the one above (PNG specification, third edition, 9.2): figures are made
    of rectangles. Libraries try all filters on every row, which takes twice as long and makes larger files of them.
    """
    # Rows of bytes, each behind the number of its filter: (height, 1 + 3 width).
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels).reshape(height, 3 * width)
    filtered = np.empty((height, 1 + 3 * width), np.uint8)
    filtered[:, 0] = 2  # "Up"
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    # Chunks: size and resolution, then the compressed rows.
    dots_per_metre = round(dpi / 0.0254)
    chunks = (
        # 8 bits each of red, green and blue.
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"tEXt", f"Software\0attnscope {VERSION}".encode("latin-1")),
        (b"pHYs", struct.pack(">IIB", dots_per_metre, dots_per_metre, 1)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 6)),
        (b"IEND", b""),
    )
    # The signature, then each chunk: its length, kind, data and checksum.
    content = [b"\x89PNG\r\n\x1a\n"]
    for kind, data in chunks:
        checksum = zlib.crc32(kind + data)
        content += [struct.pack(">I", len(data)), kind, data, struct.pack(">I", checksum)]
    return b"".join(content)
