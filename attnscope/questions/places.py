"""Hold pictures and recordings as a model saw or heard them, and where its tokens lie in them. NumPy only.

A photo is the image file. A `Picture` is what the model was given of it: one photo may become several pictures, such as
a small one of the whole photo and detailed ones of its parts. `studies.inputs` makes these objects. `questions.heatmap`
keeps them in its result, for figures and pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount

THUMBNAIL_SUFFIX = ", small"
"""The end of `source` in a small picture of a whole photo, which comes beside detailed pictures of its parts."""

MEAN_QUERY = "mean"
"""The value of `--query` that asks for the mean over all patches as queries."""


@dataclass(frozen=True, eq=False)
class Picture:
    """Hold a photo as a vision model saw it.

    Attributes:
        pixels: The photo after the model's own resizing and cropping, before its normalisation: (height, width, 3),
            uint8, red, green, blue. Tiles are joined; edges that no patch covers are missing.
        grid: Rows and columns of patches; the patch in row i and column j is the token "i,j".
        source: The name of the photo.
        size: Width and height of the photo before it was resized.
        cells: For a picture among words: the index of each patch's token, (row, column), int32; -1 = the patch has no
            token. None = the picture is the whole input: all tokens but special ones are patches, row by row.
        area: The part of the photo that the picture shows: left, top, right and lower edge in pixels of the photo.
            None = not known.
    """

    pixels: NDArray[np.uint8]
    grid: tuple[int, int]
    source: str
    size: tuple[int, int]
    cells: NDArray[np.int32] | None = None
    area: tuple[float, float, float, float] | None = None

    @property
    def photo(self) -> str:
        """Return the name of the photo, which several pictures may share."""
        return self.source.removesuffix(THUMBNAIL_SUFFIX)

    def renumber(self, new_places: NDArray[Any]) -> Picture:
        """Return the picture with other token indices in `cells`, for example after word pieces were merged.

        `new_places`, (old token,), maps each old index to the new one. The picture must have `cells`.
        """
        assert self.cells is not None
        cells = np.where(self.cells >= 0, new_places[self.cells], -1)
        return replace(self, cells=cells.astype(np.int32))

    def over(self, row: NDArray[Any]) -> NDArray[np.float64]:
        """Arrange one query's weights, (key,), on the grid of patches: (row, column), NaN where a patch has no token.

        The picture must have `cells`.
        """
        assert self.cells is not None
        # A patch without a token has the index -1, which reads the NaN appended at the end.
        return np.append(row.astype(np.float64), np.nan)[self.cells]

    @property
    def patch(self) -> tuple[int, int]:
        """Return the height and width of a patch in pixels."""
        return self.pixels.shape[0] // self.grid[0], self.pixels.shape[1] // self.grid[1]

    @property
    def facts(self) -> str:
        """Return a line with the name and size of the photo, and the sizes of the picture and its patches."""
        rows, columns = self.grid
        patch_height, patch_width = self.patch
        height, width = self.pixels.shape[:2]
        return (
            f"{self.source}, {self.size[0]} × {self.size[1]}, as the model saw it: {width} × {height} pixels, "
            f"{columns} × {rows} patches of {patch_width} × {patch_height}"
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields that are no arrays, as plain JSON values, for the header of a file."""
        return {name: getattr(self, name) for name in ("grid", "source", "size", "area")}

    def require_whole(self) -> None:
        """Refuse a picture whose parts do not fit together.

        These are pixels that do not divide into the patches of the grid, and cells of another shape than the grid. A
        name that no file can store is refused too.
        """
        # Raises an error if the name holds characters that no file can store, such as half a surrogate pair.
        self.source.encode()
        # Pixels are (height, width, 3). Height and width must be multiples of the numbers of patches.
        is_picture = self.pixels.ndim == 3 and self.pixels.shape[2] == 3 and self.pixels.size > 0
        if not is_picture or min(self.grid) < 1 or np.mod(self.pixels.shape[:2], self.grid).any():
            raise ValueError("its picture does not fit its patches")
        if self.cells is not None and self.cells.shape != self.grid:
            raise ValueError("its tokens are not the patches of its pictures")


@dataclass(frozen=True)
class SpokenWord:
    """Hold a word of a transcript, and when it is spoken.

    Attributes:
        text: The word, with the punctuation after it.
        start: When it begins, in seconds.
        end: When the next word begins, in seconds; for the last word, the end of the frame that its last token attends
            to.
        tokens: The word's token indices in the transcript, as (start, stop); stop is exclusive.
    """

    text: str
    start: float
    end: float
    tokens: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Spectrogram:
    """Hold the log-mel spectrogram that a model was given, without the silence after the sound.

    Attributes:
        levels: Loudness, (band, step), uint8: 0 = the quietest, 255 = the loudest; the lowest band first. A step is one
            column of the spectrogram. The encoder's convolutions merge several steps into a frame, which is a token.
        hertz: The centre frequency of each band, ascending.
        decibels: The difference between the loudest and the quietest level.
    """

    levels: NDArray[np.uint8]
    hertz: tuple[float, ...]
    decibels: float


@dataclass(frozen=True, eq=False)
class Sound:
    """Hold a recording as a speech model heard it.

    Attributes:
        envelope: The largest amplitude in each frame, (frame,), float32, 0 to 1.
        seconds_per_frame: The length of a frame, which is a token of the encoder.
        seconds: The length of the recording.
        window_seconds: The length of the model's input; a shorter recording is padded with silence.
        source: The name of the recording.
        words: The words of the transcript with their times; empty if the user did not ask for times.
        followed: The heads, (layer, head), whose cross-attention gave the times of words.
        spectrogram: The input of the model; None unless words have times.
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
        """Return a line with the name and the length of the recording, and its frames."""
        return (
            f"{self.source}: {self.seconds:.2f} s, {amount(len(self.envelope), 'frame')} of "
            f"{self.seconds_per_frame:g} s; the model listens for {self.window_seconds:g} s"
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields of the sound and of its spectrogram, without arrays and words, as plain JSON values."""
        names = ("seconds_per_frame", "seconds", "window_seconds", "source", "followed")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.spectrogram is not None:
            fields |= {"hertz": self.spectrogram.hertz, "decibels": self.spectrogram.decibels}
        return fields

    @classmethod
    def rebuild(
        cls, description: Mapping[str, Any], envelope: Any, levels: Any, words: tuple[SpokenWord, ...]
    ) -> Sound:
        """Rebuild the sound from the contents of a file. Damage raises any kind of error.

        Args:
            description: The fields that `describe` wrote.
            envelope: The array of this name.
            levels: The array of this name in the spectrogram; None = the sound has no spectrogram.
            words: The words with their times.
        """
        fields = {**description}
        spectrogram = None
        if levels is not None:
            # `describe` puts two fields of the spectrogram beside those of the sound.
            hertz = fields.pop("hertz")
            decibels = float(fields.pop("decibels"))
            spectrogram = Spectrogram(levels.astype(np.uint8), hertz, decibels)
        return cls(envelope=envelope, words=words, spectrogram=spectrogram, **fields)

    def require_whole(self) -> None:
        """Refuse lengths that are not positive and finite, words outside the sound, and bands that do not ascend.

        A name that no file can store is refused too.
        """
        # Raises an error if the name holds characters that no file can store, such as half a surrogate pair.
        self.source.encode()
        lengths = (self.seconds_per_frame, self.seconds, self.window_seconds)
        if not len(self.envelope) or not all(0 < length < math.inf for length in lengths):
            raise ValueError("its sound makes no sense")
        # The last word may end with the last frame, which may reach beyond the sound.
        end = self.seconds + self.seconds_per_frame
        for word in self.words:
            if not 0 <= word.start <= word.end <= end:
                raise ValueError("its words are not spoken within its sound")
        if self.spectrogram is None:
            return
        hertz = self.spectrogram.hertz
        n_bands = len(self.spectrogram.levels)
        if not hertz or len(hertz) != n_bands or hertz != tuple(sorted(hertz)):
            raise ValueError("its spectrogram makes no sense")
