"""Turn a recording into inputs of a model by its own feature extractor, with its frames as tokens."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import as_failure, hears, takes_recordings
from attnscope.models.model import SensoryInput
from attnscope.questions.places import Sound, Spectrogram
from attnscope.senses.recordings import Recording
from attnscope.senses.tokens import frame_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


class HuggingFaceEars:
    """The part of a model that hears recordings, its Ears. It may lack its feature extractor."""

    def __init__(self, model: "HuggingFaceModel", extractor: Any) -> None:
        self._model = model
        self._base = model.base
        self._name = model.info.name
        self._extractor = extractor

    def hear(self, recording: Recording) -> SensoryInput:
        """Return a recording as the model hears it, through its own feature extractor."""
        if not takes_recordings(self._base):
            raise AttnscopeError(
                f"{self._name} hears recordings in a way that is not supported",
                "leave out --audio, or name a model such as Whisper or wav2vec 2.0",
            )
        if self._extractor is None:
            raise AttnscopeError(
                f"{self._name} came without its feature extractor",
                "save it beside the model as preprocessor_config.json, or: attnscope.load(model, extractor)",
            )
        # Resample to the rate of the extractor; the length in seconds is that of the file.
        seconds = recording.seconds
        recording = recording.at(int(self._extractor.sampling_rate))
        # Whisper listens for a window of fixed length, wav2vec 2.0 to the whole recording.
        if hears(self._base):
            return self._hear_window(recording, seconds)
        return self._hear_frames(recording)

    def _hear_window(self, recording: Recording, seconds: float) -> SensoryInput:
        """Pad or cut a recording to the window that a model listens for (Whisper)."""
        base = self._base
        # A frame is `stride` steps of the spectrogram, each of hop_length samples.
        stride = int(base.encoder.conv1.stride[0]) * int(base.encoder.conv2.stride[0])
        frame_samples = stride * int(self._extractor.hop_length)
        n_frames = int(base.config.max_source_positions)
        window_s = n_frames * frame_samples / int(self._extractor.sampling_rate)
        notes: tuple[str, ...] = ()
        samples = recording.samples[: n_frames * frame_samples]
        if len(samples) < len(recording.samples):
            lasts = f"{recording.source} lasts {seconds:.1f} s"
            notes = (f"{lasts}, {self._name} listens for {window_s:g} s: the rest is left out",)
        # (1, band, step), of which the encoder merges `stride` steps to a frame
        features = self._extract(samples, (1, int(base.config.num_mel_bins), n_frames * stride))
        # The spectrogram that is drawn ends with the recording, not with the window.
        n_heard = -(-len(samples) // frame_samples)  # rounded up
        sound = self._sound(samples, frame_samples, n_heard, window_s, recording.source)
        # (band, step)
        steps = features[0, :, : len(sound.envelope) * stride]
        sound = replace(sound, spectrogram=_spectrogram(steps, self._extractor))
        tokens = frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
        return SensoryInput({base.main_input_name: features}, tokens, sound=sound, notes=notes)

    def _hear_frames(self, recording: Recording) -> SensoryInput:
        """Hear all of a recording, in frames (wav2vec 2.0)."""
        config = self._base.config
        rate = int(self._extractor.sampling_rate)
        samples = recording.samples
        values = self._extract(samples)
        n_frames = values.shape[1]
        frame_samples = math.prod(config.conv_stride)
        # Each convolution shortens the sequence: (sample,) -> (frame,).
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            n_frames = (n_frames - kernel) // stride + 1
        if n_frames < 1:
            message = f"{recording.source} is too short for {self._name}: {len(samples)} samples"
            raise AttnscopeError(message, "give a longer one")
        sound = self._sound(samples, frame_samples, n_frames, len(samples) / rate, recording.source)
        inputs = {self._base.main_input_name: values}
        # A run whose layers see another number of frames is refused.
        self._model.expect(inputs, n_frames)
        tokens = frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
        return SensoryInput(inputs, tokens, sound=sound)

    def _extract(self, samples: NDArray[np.float32], shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the extractor's features of samples; refuse another shape than the model takes."""
        with as_failure(f"the feature extractor of {self._name} fails"):
            features = self._extractor(samples, sampling_rate=int(self._extractor.sampling_rate), return_tensors="pt")
            values: Tensor = features[self._base.main_input_name].to(self._base.dtype)
        if shape is not None and tuple(values.shape) != shape:
            raise AttnscopeError(
                f"the feature extractor of {self._name} gives {tuple(values.shape)}, the model takes {shape}",
                "preprocessor_config.json and config.json belong to different models",
            )
        return values

    def _sound(
        self, samples: NDArray[np.float32], frame_samples: int, n_frames: int, window_s: float, source: str
    ) -> Sound:
        """Return the sound in frames of `frame_samples`, with the largest absolute sample of each frame."""
        rate = int(self._extractor.sampling_rate)
        # (frame, sample) -> (frame,); the last frame is filled up with silence.
        loud = np.zeros(max(n_frames * frame_samples, len(samples)), np.float32)
        loud[: len(samples)] = np.abs(samples)
        envelope = loud[: n_frames * frame_samples].reshape(n_frames, frame_samples).max(1)
        return Sound(envelope, frame_samples / rate, len(samples) / rate, window_s, source)


def _spectrogram(features: Tensor, extractor: Any) -> Spectrogram | None:
    """Return the spectrogram of an extractor like Whisper's, (band, step), with its bands; None if these are unknown.

    The extractor gives (log10 of the power + 4) / 4: a difference of 1 is 40 decibels.
    """
    values = features.float().cpu().numpy()
    filters = np.asarray(getattr(extractor, "mel_filters", None), np.float64)  # (bin, band)
    if filters.ndim != 2 or filters.shape[1] != len(values):
        return None
    # The middle of a band is the mean of its bins, weighted by its filter.
    bins = np.linspace(0, int(extractor.sampling_rate) / 2, len(filters))
    weights = filters.sum(0)
    middles = np.divide(bins @ filters, weights, out=np.zeros(len(weights)), where=weights > 0)
    # A band of no bins has no middle: it takes that of the band before, so that they never fall.
    hertz = tuple(np.maximum.accumulate(middles).tolist())
    range_db = 40 * float(np.ptp(values))
    return Spectrogram(_to_bytes(values), hertz, range_db)


def _to_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale numbers to bytes: 0 for the least, 255 for the largest."""
    levels = (values - values.min()) / (float(np.ptp(values)) or 1.0)
    levels_as_bytes: NDArray[np.uint8] = np.rint(255 * levels).astype(np.uint8)
    return levels_as_bytes
