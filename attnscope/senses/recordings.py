"""Recordings on their way in: WAV files as one channel of samples at the rate that a model wants."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import refuse_pipe

MOST_BYTES = 1_000_000_000
"""Of a file."""
MOST_SAMPLES = 200_000_000
"""Of all channels, and of one at the rate that a model hears: three and a half hours at 16,000 a second."""
MOST_RATE = 1_000_000
"""Samples a second; studios use up to 768,000. The filter that resamples grows with it."""

_HINT = "give a WAV file; others can be converted: ffmpeg -i speech.mp3 speech.wav"


@dataclass(frozen=True, eq=False)
class Recording:
    """A recording.

    Attributes:
        samples: One channel, (sample,), float32, -1 to 1.
        rate: Samples a second.
        source: What to call it: the file's name.
        notes: What was done to it that its owner may not expect.
    """

    samples: NDArray[np.float32]
    rate: int
    source: str
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return how long it lasts."""
        return len(self.samples) / self.rate

    def at(self, rate: int) -> Recording:
        """Return the same at another rate: by a polyphase filter.

        Raises:
            AttnscopeError: It would have more than MOST_SAMPLES samples.
        """
        if rate == self.rate:
            return self
        if self.seconds * rate > MOST_SAMPLES:
            raise _too_long(self.source)
        from scipy.signal import resample_poly

        common = math.gcd(rate, self.rate)
        samples = resample_poly(self.samples.astype(np.float64), rate // common, self.rate // common)
        note = f"{self.source} has {self.rate:,} samples a second: resampled to the {rate:,} that the model hears"
        return Recording(samples.astype(np.float32), rate, self.source, (*self.notes, note))


def read_recording(given: Any) -> Recording:
    """Read a WAV file of any rate, of 8 to 64 bits; several channels are averaged.

    Args:
        given: A path, or a pair (samples, rate) with samples (sample,) or (sample, channel), floats from -1 to 1.

    Raises:
        AttnscopeError: There is no such file; it is no WAV file, damaged, or holds no sound; or it is
            over MOST_BYTES, MOST_SAMPLES or MOST_RATE.
    """
    if isinstance(given, Recording):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return _one_channel(np.asarray(given[0]), int(given[1]), "a recording in memory")
    if not isinstance(given, str | os.PathLike):
        raise AttnscopeError(f"{type(given).__name__} is no recording", "give a path, or (samples, rate)")
    from scipy.io import wavfile

    path = Path(given)
    refuse_pipe(path, "a recording")
    if path.is_dir():
        raise AttnscopeError(f"{path} is a folder, not a recording", _HINT)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _too_long(path.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of chunks beside the sound, which are passed over
            rate, samples = wavfile.read(path)
    except AttnscopeError:
        raise
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}", _HINT) from None
    except PermissionError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # the reader raises what it likes on what is no WAV file
        what = "is empty" if path.stat().st_size == 0 else f"is no WAV file that can be read ({first_line(error)[:80]})"
        raise AttnscopeError(f"{path} {what}", _HINT) from None
    return _one_channel(samples, int(rate), path.name)


def _one_channel(samples: NDArray[Any], rate: int, name: str) -> Recording:
    if samples.ndim not in (1, 2) or not samples.size or rate < 1:
        raise AttnscopeError(f"{name} holds no sound", _HINT)
    if rate > MOST_RATE:
        raise AttnscopeError(f"{name} says that it has {rate:,} samples a second, more than {MOST_RATE:,}", _HINT)
    if samples.size > MOST_SAMPLES:
        raise _too_long(name)
    if samples.dtype == np.uint8:
        values = (samples.astype(np.float64) - 128) / 128
    elif samples.dtype.kind == "i":
        values = samples.astype(np.float64) / -float(np.iinfo(samples.dtype).min)
    else:
        values = samples.astype(np.float64)
    notes: tuple[str, ...] = ()
    if values.ndim == 2 and values.shape[1] > 1:
        notes = (f"{name} has {values.shape[1]} channels: averaged",)
    values = values.mean(1) if values.ndim == 2 else values
    if not np.isfinite(values).all():
        raise AttnscopeError(f"{name} holds samples that are no numbers", "get the file again")
    return Recording(values.astype(np.float32), rate, name, notes)


def _too_long(name: str) -> AttnscopeError:
    return AttnscopeError(
        f"{name} is too long: more than {MOST_SAMPLES // 1_000_000} million samples",
        "cut it first: ffmpeg -i long.wav -t 30 short.wav",
    )
