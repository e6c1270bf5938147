"""A recording as a speech model heard it, and how its frames lie in time. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.codec import convert


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
        """What it is, in one line."""
        return (
            f"{self.source}: {self.seconds:.2f} s, {len(self.envelope)} frames of {self.seconds_per_frame:g} s; "
            f"the model listens for {self.window_seconds:g} s"
        )

    def describe(self) -> dict[str, Any]:
        """All but the envelope, as plain JSON values."""
        return {
            "source": self.source,
            "seconds": self.seconds,
            "seconds_per_frame": self.seconds_per_frame,
            "window_seconds": self.window_seconds,
            **({"words": [vars(word) for word in self.words], "followed": self.followed} if self.words else {}),
            **({"hertz": seen.hertz, "decibels": seen.decibels} if (seen := self.spectrogram) else {}),
        }


def sound_from(described: Mapping[str, Any] | None, envelope: Any, levels: Any = None) -> Sound | None:
    """The sound that `Sound.describe` tells of; None where there is none.

    Raises:
        ValueError: Its numbers make no sense.
    """
    if described is None:
        return None
    held = np.asarray(envelope, np.float32)
    each, seconds, window = (float(described[name]) for name in ("seconds_per_frame", "seconds", "window_seconds"))
    if held.ndim != 1 or not len(held) or not all(math.isfinite(t) and t > 0 for t in (each, seconds, window)):
        raise ValueError("its sound makes no sense")
    words = convert(described.get("words", ()), tuple[SpokenWord, ...])
    if any(not 0 <= word.start <= word.end <= seconds + each for word in words):
        raise ValueError("its words are not spoken within its sound")
    followed = convert(described.get("followed", ()), tuple[tuple[int, int], ...])
    seen = None if levels is None else _spectrogram(described, np.asarray(levels))
    return Sound(held, each, seconds, window, str(described["source"]), words, followed, seen)


def _spectrogram(described: Mapping[str, Any], levels: NDArray[Any]) -> Spectrogram:
    hertz = tuple(map(float, described["hertz"]))
    whole = levels.ndim == 2 and levels.size and len(levels) == len(hertz) and hertz == tuple(sorted(hertz))
    if not whole or not np.all((levels >= 0) & (levels <= 255)):  # NaN is neither
        raise ValueError("its spectrogram makes no sense")
    return Spectrogram(levels.astype(np.uint8), hertz, float(described["decibels"]))
