"""Read recordings: WAV files as one channel of samples at the rate that a model wants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.senses import reading

MAX_BYTES = 1_000_000_000
"""The largest file that is read, in bytes."""

MAX_SAMPLES = 200_000_000
"""The most samples in a file, over all channels, and the most after resampling: three and a half hours at 16 kHz."""

MAX_RATE = 1_000_000
"""The highest rate, in samples a second; studios use up to 768,000. The resampling filter is as long as it is high."""

_HINT = "give a WAV file, in Python also (samples, rate); others can be converted: ffmpeg -i speech.mp3 speech.wav"


@dataclass(frozen=True, eq=False)
class Recording:
    """Hold a recording, mixed to one channel.

    Attributes:
        samples: (sample,), float32, -1 to 1.
        rate: Samples a second.
        source: What to call it: the file's name.
    """

    samples: NDArray[np.float32]
    rate: int
    source: str

    @property
    def seconds(self) -> float:
        """Return how long it lasts."""
        return len(self.samples) / self.rate

    def resampled(self, rate: int) -> Recording:
        """Return the recording at another rate, by a polyphase filter.

        Raises:
            AttnscopeError: It would have more than MAX_SAMPLES samples.
        """
        if rate == self.rate:
            return self
        if self.seconds * rate > MAX_SAMPLES:
            raise _too_long(self.source)
        from scipy.signal import resample_poly

        # rate / self.rate as a fraction in lowest terms.
        common = math.gcd(rate, self.rate)
        samples = resample_poly(self.samples.astype(np.float64), rate // common, self.rate // common)
        return Recording(samples.astype(np.float32), rate, self.source)


def read_recording(source: Any) -> Recording:
    """Read a WAV file of any rate, of 8 to 64 bits; several channels are averaged.

    Args:
        source: A path, or a pair (samples, rate) with samples (sample,) or (sample, channel), floats from -1 to 1.

    Raises:
        AttnscopeError: There is no such file; it is no WAV file, damaged, or holds no sound; or it exceeds
            MAX_BYTES, MAX_SAMPLES or MAX_RATE.
    """
    if isinstance(source, Recording):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        return _one_channel(np.asarray(source[0]), int(source[1]), "a recording in memory")
    from scipy.io import wavfile

    with reading(source, "recording", _HINT) as path:
        if path.stat().st_size > MAX_BYTES:
            raise _too_long(path.name)
        rate, samples = wavfile.read(path)
        return _one_channel(samples, int(rate), path.name)


def _one_channel(samples: NDArray[Any], rate: int, name: str) -> Recording:
    """Return samples, (sample,) or (sample, channel), as a recording: scaled to -1 to 1, and channels averaged."""
    if samples.ndim not in (1, 2) or not samples.size or not 1 <= rate <= MAX_RATE:
        raise AttnscopeError(
            f"{name} holds no sound, or not at 1 to {MAX_RATE:,} samples a second", _HINT
        )
    if samples.size > MAX_SAMPLES:
        raise _too_long(name)
    # Scale integers to -1 to 1. In uint8 silence is 128; in signed types it is 0, and the lowest number becomes -1.
    values = samples.astype(np.float64)
    if samples.dtype == np.uint8:
        values = (values - 128) / 128
    elif samples.dtype.kind == "i":
        values = values / -float(np.iinfo(samples.dtype).min)
    # (sample, channel) -> (sample,)
    if values.ndim == 2:
        values = values.mean(1)
    if not np.isfinite(values).all():
        raise AttnscopeError(f"{name} holds samples that are no numbers", "get the file again")
    return Recording(values.astype(np.float32), rate, name)


def _too_long(name: str) -> AttnscopeError:
    """Return the error for a recording of more than MAX_SAMPLES, or of more bytes than MAX_BYTES."""
    return AttnscopeError(
        f"{name} is too long: more than {MAX_SAMPLES // 1_000_000} million samples",
        "cut it first: ffmpeg -i long.wav -t 30 short.wav",
    )
