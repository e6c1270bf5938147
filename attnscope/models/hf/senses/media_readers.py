"""Turn a photo or a recording into inputs of a model by its own processor, with its patches or frames as tokens."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError, as_failure
from attnscope.models.hf.parts import accepts, hears_windows, patch_order, takes_recordings
from attnscope.models.model import SensoryInput
from attnscope.questions.places import Picture, Sound, Spectrogram
from attnscope.senses.photos import Photo
from attnscope.senses.recordings import Recording
from attnscope.senses.tokens import make_frame_tokens, make_patch_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel

_PARAMETERS = {
    "CLS": ("cls_token", "class_embedding", "class_token"),
    "DIST": ("distillation_token", "dist_token"),
}
"""Label of a token before the patches -> the names that families of models give to the parameter that holds it."""

_REGISTERS = ("register_tokens", "register_token", "reg_token")
"""Names of the parameter that holds registers, (..., register, d)."""

_INTERPOLATE = "interpolate_pos_encoding"
"""The forward's argument that has positions interpolated for pictures of another size."""


class MediaReader:
    """Hold a model, and its processor of transformers, which is None if the model came without one."""

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        self.model = model
        self._base = model.base
        self._name = model.info.name
        self._processor = processor

    def _require_processor(self, kind: str) -> None:
        """Refuse a model that came without its processor; `kind` is what to call that, such as "image processor"."""
        if self._processor is None:
            raise AttnscopeError(
                f"{self._name} came without its {kind}",
                f"save it beside the model, or hand it over: attnscope.load(model, {kind.replace(' ', '_')})",
            )


class ImageReader(MediaReader):
    """The part of a model that sees pictures."""

    def see(self, photo: Photo) -> SensoryInput:
        """Return a photo as the model sees it: through its own image processor, cut into its patches.

        Models must cut pictures into one grid of patches, and see all of them in each layer.
        """
        self._require_processor("image processor")
        # The processor's picture, (1, 3, y, x)
        options = {} if photo.size is None else self._resize(photo.size)
        with as_failure(f"the image processor of {self._name} fails on {photo.source}"):
            features = self._processor(images=photo.image, return_tensors="pt", **options)
        pixels = features.get("pixel_values")
        shape = getattr(pixels, "shape", ())
        if len(shape) != 4 or shape[:2] != (1, 3):
            found = tuple(shape) or "none"
            raise AttnscopeError(
                f"the image processor of {self._name} gives no picture of three colours, but {found}",
                "models that see one picture as one grid of patches are supported, videos are not",
            )
        # The grid of patches; pixels beyond whole patches are cut off.
        patch_height, patch_width = patch_size(self._base, self._name)
        rows = pixels.shape[2] // patch_height
        columns = pixels.shape[3] // patch_width
        if not rows or not columns:
            raise AttnscopeError(
                f"{self._name} sees {photo.source} smaller than one of its patches", "give another photo"
            )
        colours = undo_normalisation(self._processor, pixels)
        covered = np.ascontiguousarray(colours[: rows * patch_height, : columns * patch_width])
        notes: tuple[str, ...] = ()
        if covered.shape != colours.shape:
            notes = (
                "the patches do not reach the right and lower edge of what the model is given: that is cut off",
            )
        # ViT-MAE sorts its patches by a noise: `patch_order` keeps them in order.
        inputs: dict[str, Any] = {
            **patch_order(self._base, pixels),
            "pixel_values": pixels.to(self._base.dtype),
        }
        if photo.size and accepts(self._base, _INTERPOLATE):
            inputs[_INTERPOLATE] = True
        # Tokens before the patches (CLS, registers), then the patches row by row.
        tokens = make_patch_tokens((rows, columns), tokens_before(self._base), photo.source)
        # A run whose layers see another number of tokens is refused.
        self.model.expect(inputs, len(tokens))
        picture = Picture(covered, (rows, columns), photo.source, photo.image.size)
        return SensoryInput(inputs, tokens, picture, notes=notes)

    def _resize(self, size: int) -> dict[str, Any]:
        """Return the processor's options for a square of `size` pixels; it crops the same share as by default."""
        # A processor scales a photo to a size, or scales its shorter edge to a size and crops the middle.
        usual = getattr(self._processor, "size", None)
        shortest_edge = getattr(usual, "shortest_edge", None)
        can_scale = shortest_edge or getattr(usual, "height", None)
        # Only models that interpolate their positions take other sizes, of whole patches. DINOv2 does so by itself.
        is_dinov2 = self._base.config.model_type.startswith("dinov2")
        if not can_scale or not (is_dinov2 or accepts(self._base, _INTERPOLATE)):
            raise AttnscopeError(
                f"{self._name} takes pictures of one size", "leave out --size; DINOv2 and ViT have it"
            )
        height, width = patch_size(self._base, self._name)
        if size % height or size % width:
            raise AttnscopeError(
                f"{size} pixels are no whole patches of {height}", f"--size {size // height * height} is"
            )
        square = {"height": size, "width": size}
        if not shortest_edge:
            return {"size": square}
        usual_crop = (
            getattr(getattr(self._processor, "crop_size", None), "height", None) or shortest_edge
        )
        edge = round(shortest_edge * size / usual_crop)
        return {"size": {"shortest_edge": edge}, "crop_size": square}


class AudioReader(MediaReader):
    """The part of a model that hears recordings."""

    def hear(self, recording: Recording) -> SensoryInput:
        """Return a recording as the model hears it, through its own feature extractor."""
        if not takes_recordings(self._base):
            raise AttnscopeError(
                f"{self._name} hears recordings in a way that is not supported",
                "leave out --audio, or name a model such as Whisper or wav2vec 2.0",
            )
        self._require_processor("feature extractor")
        # Whisper listens for a window of fixed length, wav2vec 2.0 to the whole recording.
        return (
            self._hear_window(recording) if hears_windows(self._base) else self._hear_frames(recording)
        )

    @property
    def _rate(self) -> int:
        """Return the rate of the extractor, in samples a second."""
        return int(self._processor.sampling_rate)

    def _hear_window(self, recording: Recording) -> SensoryInput:
        """Pad or cut a recording to the window that a model listens for (Whisper)."""
        base = self._base
        # The encoder makes a frame of `stride` steps of the spectrogram, each of hop_length samples.
        stride = int(base.encoder.conv1.stride[0]) * int(base.encoder.conv2.stride[0])
        frame_samples = stride * int(self._processor.hop_length)
        n_frames = int(base.config.max_source_positions)
        window_samples = n_frames * frame_samples
        window_s = window_samples / self._rate
        notes: tuple[str, ...] = ()
        samples = recording.resampled(self._rate).samples
        if len(samples) > window_samples:
            lasts = f"{recording.source} lasts {recording.seconds:.1f} s"
            notes = (f"{lasts}, {self._name} listens for {window_s:g} s: the rest is left out",)
            samples = samples[:window_samples]
        # The spectrogram: (1, band, step)
        features = self._extract(samples)
        shape = (1, int(base.config.num_mel_bins), n_frames * stride)
        if tuple(features.shape) != shape:
            raise AttnscopeError(
                f"the feature extractor of {self._name} gives {tuple(features.shape)}, the model takes {shape}",
                "preprocessor_config.json and config.json belong to different models",
            )
        # What is drawn ends with the recording, not with the window: (band, step)
        n_heard = math.ceil(len(samples) / frame_samples)
        heard = features[0, :, : n_heard * stride]
        sound = self._sound(samples, frame_samples, n_heard, window_s, recording.source)
        sound = replace(sound, spectrogram=_spectrogram(heard, self._processor))
        tokens = make_frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
        return SensoryInput({base.main_input_name: features}, tokens, sound=sound, notes=notes)

    def _hear_frames(self, recording: Recording) -> SensoryInput:
        """Hear all of a recording, in frames (wav2vec 2.0)."""
        config = self._base.config
        samples = recording.resampled(self._rate).samples
        values = self._extract(samples)
        # Each convolution shortens the sequence: (sample,) -> (frame,).
        n_frames = values.shape[1]
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            n_frames = (n_frames - kernel) // stride + 1
        if n_frames < 1:
            message = f"{recording.source} is too short for {self._name}: {len(samples)} samples"
            raise AttnscopeError(message, "give a longer one")
        seconds = len(samples) / self._rate
        frame_samples = math.prod(config.conv_stride)
        sound = self._sound(samples, frame_samples, n_frames, seconds, recording.source)
        inputs = {self._base.main_input_name: values}
        # A run whose layers see another number of frames is refused.
        self.model.expect(inputs, n_frames)
        tokens = make_frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
        return SensoryInput(inputs, tokens, sound=sound)

    def _extract(self, samples: NDArray[np.float32]) -> Tensor:
        """Return what the extractor makes of samples for the model: (1, band, step) of Whisper's, else (1, sample)."""
        with as_failure(f"the feature extractor of {self._name} fails"):
            features = self._processor(samples, sampling_rate=self._rate, return_tensors="pt")
            values: Tensor = features[self._base.main_input_name].to(self._base.dtype)
        return values

    def _sound(
        self,
        samples: NDArray[np.float32],
        frame_samples: int,
        n_frames: int,
        window_s: float,
        source: str,
    ) -> Sound:
        """Return the sound in frames of `frame_samples`, with the largest absolute sample of each frame."""
        # (sample,) -> (frame, sample) -> (frame,); the last frame is filled up with silence.
        loudness = np.abs(samples[: n_frames * frame_samples])
        loudness = np.pad(loudness, (0, n_frames * frame_samples - len(loudness)))
        envelope = loudness.reshape(n_frames, frame_samples).max(1)
        frame_s = frame_samples / self._rate
        return Sound(envelope, frame_s, len(samples) / self._rate, window_s, source)


# What a model is made of ---------------------------------------------------------------------------------------------


def hides_patches(base: PreTrainedModel) -> bool:
    """Return whether a model is an autoencoder that hides patches by chance."""
    # Hiera's plain model hides none, though it has the setting. Its modules carry `is_mae`.
    if any(hasattr(module, "is_mae") for module in base.modules()):
        return False
    # Only forwards that hide patches take the noise that orders them.
    return bool(getattr(base.config, "mask_ratio", 0)) and accepts(base, "noise")


def patch_size(base: PreTrainedModel, name: str) -> tuple[int, int]:
    """Return the height and width of the patches that a model cuts pictures into, in pixels.

    Where stages merge patches, two by two (Swin), those of the last stage. `name` is the model's, for an error.
    """
    size = getattr(base.config, "patch_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise AttnscopeError(
            f"{name} does not cut pictures into patches of one size", "vision transformers are supported"
        )
    height, width = sides
    if merges_patches(base):
        # Each stage after the first merges two by two patches.
        times = 2 ** (len(base.config.depths) - 1)
        return height * times, width * times
    return height, width


def merges_patches(base: PreTrainedModel) -> bool:
    """Return whether what sees pictures attends within windows, and merges patches from stage to stage (Swin)."""
    return hasattr(base.config, "depths") and hasattr(base.config, "window_size")


def tokens_before(base: PreTrainedModel) -> tuple[str, ...]:
    """Return the labels of the tokens before the patches, which are parameters of the model."""
    parameters = {key.rpartition(".")[2]: parameter for key, parameter in base.named_parameters()}
    labels = [label for label, names in _PARAMETERS.items() if not parameters.keys().isdisjoint(names)]
    for name in _REGISTERS:
        if name in parameters:
            labels += [f"REG{number}" for number in range(parameters[name].shape[-2])]
    return tuple(labels)


def undo_normalisation(processor: Any, pixels: Tensor) -> NDArray[np.uint8]:
    """Return a processor's picture, (1, 3, height, width), as colours from 0 to 255, (height, width, 3)."""
    values = pixels[0].cpu().double().numpy().transpose(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        deviation = np.asarray(processor.image_std, np.float64)
        values = values * deviation + np.asarray(processor.image_mean, np.float64)
    if getattr(processor, "do_rescale", False):
        values = values / float(processor.rescale_factor)
    values = np.rint(values.clip(0, 255))
    colours: NDArray[np.uint8] = values.astype(np.uint8)
    return colours


# Sounds --------------------------------------------------------------------------------------------------------------


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
    middles = np.zeros(len(weights))
    np.divide(bins @ filters, weights, out=middles, where=weights > 0)
    # A band of no bins has no middle: it takes that of the band before, so that they never fall.
    hertz = tuple(np.maximum.accumulate(middles).tolist())
    # Bytes: 0 for the least power, 255 for the largest.
    extent = float(np.ptp(values))
    levels = (values - values.min()) / (extent or 1.0)
    shades: NDArray[np.uint8] = np.rint(255 * levels).astype(np.uint8)
    return Spectrogram(shades, hertz, 40 * extent)
