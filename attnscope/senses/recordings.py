"""Read WAV files as one channel of samples, and resample them to the rate that a model wants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.senses import translate_decoder_errors

MAX_FILE_BYTES = 1_000_000_000
"""The size of the largest file that is read, in bytes."""

MAX_SAMPLES = 200_000_000
"""The most samples in a file, over all channels, and the most after resampling: 3.5 hours of one channel at 16 kHz."""

MAX_RATE_HZ = 1_000_000
"""The highest sampling rate in Hz; studios use up to 768,000. The resampling filter grows with the rate."""

_HINT = "give a WAV file, in Python also (samples, rate); others can be converted: ffmpeg -i speech.mp3 speech.wav"


@dataclass(frozen=True, eq=False)
class Recording:
    """Hold a recording, mixed to one channel.

    Attributes:
        samples: The samples, (sample,), float32, from -1 to 1.
        rate: The sampling rate in Hz.
        source: Its name in messages and titles: the file's name, or "a recording in memory".
    """

    samples: NDArray[np.float32]
    rate: int
    source: str

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return len(self.samples) / self.rate

    def resampled(self, rate: int) -> Recording:
        """Return the recording at another sampling rate in Hz, by a polyphase filter.

        Raises:
            AttnscopeError: The result would have more than MAX_SAMPLES samples.
        """
        if rate == self.rate:
            return self
        if self.seconds * rate > MAX_SAMPLES:
            raise _too_long_error(self.source)
        from scipy.signal import resample_poly

        # `resample_poly` takes the ratio of the rates as two integers without a common divisor.
        divisor = math.gcd(rate, self.rate)
        samples = resample_poly(self.samples.astype(np.float64), rate // divisor, self.rate // divisor)
        return Recording(samples.astype(np.float32), rate, self.source)


def read_recording(source: Any) -> Recording:
    """Read a WAV file of 8 to 64 bits per sample; average its channels.

    Args:
        source: A path, a Recording, or a pair (samples, rate). These samples are (sample,) or (sample, channel), floats
            from -1 to 1 or integers; the rate is in Hz.

    Raises:
        AttnscopeError: There is no such file, the file is no WAV file, damaged or without samples, or it exceeds
            MAX_FILE_BYTES, MAX_SAMPLES or MAX_RATE_HZ.
    """
    if isinstance(source, Recording):
        return source
    if isinstance(source, tuple) and len(source) == 2:
        return _to_recording(np.asarray(source[0]), int(source[1]), "a recording in memory")
    from scipy.io import wavfile

    with translate_decoder_errors(source, "recording", _HINT) as path:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _too_long_error(path.name)
        rate, samples = wavfile.read(path)
        return _to_recording(samples, int(rate), path.name)


def _to_recording(samples: NDArray[Any], rate: int, name: str) -> Recording:
    """Return samples, (sample,) or (sample, channel), as a Recording: scaled to -1 to 1, with channels averaged."""
    if samples.ndim not in (1, 2) or not samples.size or not 1 <= rate <= MAX_RATE_HZ:
        raise AttnscopeError(
            f"{name} holds no sound, or not at 1 to {MAX_RATE_HZ:,} samples a second", _HINT
        )
    if samples.size > MAX_SAMPLES:
        raise _too_long_error(name)
    # Scale integers to -1 to 1. Silence is 128 in uint8 and 0 in signed types, whose lowest number becomes -1.
    scaled = samples.astype(np.float64)
    if samples.dtype == np.uint8:
        scaled = (scaled - 128) / 128
    elif samples.dtype.kind == "i":
        scaled /= -float(np.iinfo(samples.dtype).min)
    # (sample, channel) -> (sample,)
    if scaled.ndim == 2:
        scaled = scaled.mean(1)
    if not np.isfinite(scaled).all():
        raise AttnscopeError(f"{name} holds samples that are no numbers", "get the file again")
    return Recording(scaled.astype(np.float32), rate, name)


def _too_long_error(name: str) -> AttnscopeError:
    """Return the error for a recording of more than MAX_SAMPLES samples, or of a file over MAX_FILE_BYTES."""
    return AttnscopeError(
        f"{name} is too long: more than {MAX_SAMPLES // 1_000_000} million samples",
        "cut it first: ffmpeg -i long.wav -t 30 short.wav",
    )
