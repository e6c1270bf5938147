"""A recording as a speech model heard it, and how its frames lie in time. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY, FLAT, OMITTED, beside


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

    levels: NDArray[np.uint8] = field(metadata=shaped("hertz n_steps", filled=True, **beside("spectrogram")))
    hertz: tuple[float, ...]
    decibels: float

    def require_whole(self) -> None:
        """Refuses bands that do not ascend."""
        if self.hertz != tuple(sorted(self.hertz)):
            raise ValueError("its spectrogram makes no sense")


@dataclass(frozen=True, eq=False)
class Sound:
    """What a speech model heard.

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

    envelope: NDArray[np.float32] = field(metadata=shaped("n_frames", filled=True, **ARRAY))
    seconds_per_frame: float
    seconds: float
    window_seconds: float
    source: str
    words: tuple[SpokenWord, ...] = field(default=(), metadata=OMITTED)
    followed: tuple[tuple[int, int], ...] = field(default=(), metadata=OMITTED)
    spectrogram: Spectrogram | None = field(default=None, metadata=FLAT)

    @property
    def facts(self) -> str:
        """What it is, in one line."""
        return (
            f"{self.source}: {self.seconds:.2f} s, {len(self.envelope)} frames of {self.seconds_per_frame:g} s; "
            f"the model listens for {self.window_seconds:g} s"
        )

    def require_whole(self) -> None:
        """Refuses times that make no sense."""
        if not all(math.isfinite(t) and t > 0 for t in (self.seconds_per_frame, self.seconds, self.window_seconds)):
            raise ValueError("its sound makes no sense")
        if any(not 0 <= word.start <= word.end <= self.seconds + self.seconds_per_frame for word in self.words):
            raise ValueError("its words are not spoken within its sound")
