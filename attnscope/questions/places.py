"""What tokens stand for where there is no text: patches of a picture, frames of a recording. NumPy only.

`senses` makes the tokens themselves, and `questions.heatmap` keeps all of this in its result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount

SMALL = ", small"
"""What the name of a picture ends in that is all of a photo, made small, beside one with more detail."""

MEAN = "mean"
"""The query that stands for the mean over all patches."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A photo as a vision model saw it.

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
        """Return what the photo is called, of which this may be one of several pictures."""
        return self.source.removesuffix(SMALL)

    def move(self, place_of: NDArray[Any]) -> Picture:
        """Return the same where each token has another place, (token,)."""
        assert self.cells is not None
        return replace(self, cells=np.where(self.cells >= 0, place_of[self.cells], -1).astype(np.int32))

    def over(self, row: NDArray[Any]) -> NDArray[np.float64]:
        """Return what tokens get, (key,), as what patches get, (row, column); NaN where no token stands for one."""
        assert self.cells is not None
        return np.append(row.astype(np.float64), np.nan)[self.cells]

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return self.pixels.shape[0] // self.grid[0], self.pixels.shape[1] // self.grid[1]

    @property
    def facts(self) -> str:
        """Return what it is, in one line."""
        (rows, columns), (high, wide) = self.grid, self.patch
        height, width = self.pixels.shape[:2]
        return (
            f"{self.source}, {self.size[0]} × {self.size[1]}, as the model saw it: {width} × {height} pixels, "
            f"{columns} × {rows} patches of {wide} × {high}"
        )

    def describe(self) -> dict[str, Any]:
        """Return all but its arrays, as plain JSON values."""
        return {name: getattr(self, name) for name in ("grid", "source", "size", "area")}

    def require_whole(self) -> None:
        """Refuse pixels that are not whole patches."""
        self.source.encode()
        is_picture = self.pixels.ndim == 3 and self.pixels.shape[2] == 3 and self.pixels.size > 0
        whole = min(self.grid) > 0 and is_picture
        if not whole or any(n % parts for n, parts in zip(self.pixels.shape, self.grid, strict=False)):
            raise ValueError("its picture does not fit its patches")
        if self.cells is not None and self.cells.shape != self.grid:
            raise ValueError("its tokens are not the patches of its pictures")


@dataclass(frozen=True)
class SpokenWord:
    """A word of a transcript, and when it is spoken.

    Attributes:
        text: The word, with the punctuation after it.
        start: When it begins, in seconds.
        end: When the next word begins; of the last, when its last token has been listened to.
        tokens: Its first token and the last + 1, as numbers of the transcript's.
    """

    text: str
    start: float
    end: float
    tokens: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Spectrogram:
    """The log-mel spectrogram that a model was given, of the frames with sound.

    Attributes:
        levels: (band, step), uint8: 0 = the quietest, 255 = the loudest; the lowest band first. As many steps for each
            frame of the encoder as its convolutions merge.
        hertz: The middle of each band, ascending.
        decibels: How much louder the loudest is than the quietest.
    """

    levels: NDArray[np.uint8]
    hertz: tuple[float, ...]
    decibels: float


@dataclass(frozen=True, eq=False)
class Sound:
    """A recording as a speech model heard it.

    Attributes:
        envelope: The loudest sample of each frame, (frame,), float32, 0 to 1.
        seconds_per_frame: How long a frame of the encoder lasts.
        seconds: How long the sound lasts.
        window_seconds: How long the model listens; what follows the sound is silence that it was padded with.
        source: What the recording is called.
        words: When each word of the transcript is spoken, if that was asked for.
        followed: The heads, (layer, head), whose cross-attention that was read off.
        spectrogram: What the model was given, where words are timed; None = not kept.
    """

    envelope: NDArray[np.float32]
    seconds_per_frame: float
    seconds: float
    window_seconds: float
    source: str
    words: tuple[SpokenWord, ...] = ()
    followed: tuple[tuple[int, int], ...] = ()
    spectrogram: Spectrogram | None = None

    @property
    def facts(self) -> str:
        """Return what it is, in one line."""
        return (
            f"{self.source}: {self.seconds:.2f} s, {amount(len(self.envelope), 'frame')} of "
            f"{self.seconds_per_frame:g} s; the model listens for {self.window_seconds:g} s"
        )

    def describe(self) -> dict[str, Any]:
        """Return all but its arrays and words, as plain JSON values."""
        names = ("seconds_per_frame", "seconds", "window_seconds", "source", "followed")
        described: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.spectrogram is not None:
            described |= {"hertz": self.spectrogram.hertz, "decibels": self.spectrogram.decibels}
        return described

    @classmethod
    def rebuild(
        cls, described: Mapping[str, Any], envelope: Any, levels: Any, words: tuple[SpokenWord, ...]
    ) -> Sound:
        """Return the sound that `describe` was made of; what is damaged raises anything."""
        known = {**described}
        hertz, decibels = known.pop("hertz", ()), known.pop("decibels", 0.0)
        spectrogram = (
            None if levels is None else Spectrogram(levels.astype(np.uint8), hertz, float(decibels))
        )
        return cls(envelope=envelope, words=words, spectrogram=spectrogram, **known)

    def require_whole(self) -> None:
        """Refuse times that make no sense, and bands that do not ascend."""
        # Names and times, then words within the sound, then bands.
        self.source.encode()
        lengths = (self.seconds_per_frame, self.seconds, self.window_seconds)
        if not len(self.envelope) or not all(math.isfinite(length) and length > 0 for length in lengths):
            raise ValueError("its sound makes no sense")
        end = self.seconds + self.seconds_per_frame
        if any(not 0 <= word.start <= word.end <= end for word in self.words):
            raise ValueError("its words are not spoken within its sound")
        if self.spectrogram is None:
            return
        hertz = self.spectrogram.hertz
        if (
            hertz != tuple(sorted(hertz))
            or self.spectrogram.levels.shape[:1] != (len(hertz),)
            or not hertz
        ):
            raise ValueError("its spectrogram makes no sense")
