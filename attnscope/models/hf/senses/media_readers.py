"""Turn a photo or a recording into inputs of a model by its own processor, with its patches or frames as tokens.

A *frame* is the piece of a recording that one token of an audio model stands for.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.arrays import divide
from attnscope.errors import AttnscopeError, as_failure
from attnscope.models.hf.parts import forward_accepts, has_audio_window, patch_order_noise, takes_audio
from attnscope.models.model import SensoryInput
from attnscope.questions.places import Picture, Sound, Spectrogram
from attnscope.senses.photos import Photo
from attnscope.senses.recordings import Recording
from attnscope.senses.tokens import make_frame_tokens, make_patch_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel

_TOKEN_PARAMETERS = {
    "CLS": ("cls_token", "class_embedding", "class_token"),
    "DIST": ("distillation_token", "dist_token"),
}
"""Label of a token before the patches -> the names of its parameter in various families of models."""

_REGISTER_PARAMETERS = ("register_tokens", "register_token", "reg_token")
"""Names of the parameter that holds register tokens, (..., register, d)."""

_INTERPOLATE = "interpolate_pos_encoding"
"""The name of the forward's argument that makes the model interpolate its positions for pictures of other sizes."""


class MediaReader:
    """Hold a model and its transformers processor, which is None if the model came without a processor."""

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        self.model = model
        self._base = model.base
        self._name = model.info.name
        self._processor = processor

    def _require_processor(self, kind: str) -> None:
        """Raise AttnscopeError without a processor; `kind` is its name in the message, such as "image processor"."""
        if self._processor is None:
            raise AttnscopeError(
                f"{self._name} came without its {kind}",
                f"save it beside the model, or hand it over: attnscope.load(model, {kind.replace(' ', '_')})",
            )


class ImageReader(MediaReader):
    """Prepare photos for a vision model."""

    def prepare_photo(self, photo: Photo) -> SensoryInput:
        """Return a photo as inputs of the model, made by its own image processor, with its patches as tokens.

        The model must cut pictures into one grid of patches, and process all patches in each layer.
        """
        self._require_processor("image processor")
        # The processor's picture is (1, 3, height, width).
        options = {} if photo.size is None else self._resize(photo.size)
        with as_failure(f"the image processor of {self._name} fails on {photo.source}"):
            features = self._processor(images=photo.image, return_tensors="pt", **options)
        pixels = features.get("pixel_values")
        shape = getattr(pixels, "shape", ())
        if len(shape) != 4 or shape[:2] != (1, 3):
            raise AttnscopeError(
                f"the image processor of {self._name} gives no picture of three colours, but {tuple(shape) or 'none'}",
                "models that see one picture as one grid of patches are supported, videos are not",
            )
        # Cut the picture into a grid of whole patches. Pixels beyond the last whole patch are cut off.
        patch_height, patch_width = read_patch_size(self._base, self._name)
        rows = pixels.shape[2] // patch_height
        columns = pixels.shape[3] // patch_width
        if not rows or not columns:
            raise AttnscopeError(
                f"{self._name} sees {photo.source} smaller than one of its patches", "give another photo"
            )
        colours = undo_normalisation(self._processor, pixels)
        covered_pixels = np.ascontiguousarray(colours[: rows * patch_height, : columns * patch_width])
        notes: tuple[str, ...] = ()
        if covered_pixels.shape != colours.shape:
            notes = (
                "the patches do not reach the right and lower edge of what the model is given: that is cut off",
            )
        # ViT-MAE shuffles its patches by an argument `noise`. `patch_order_noise` returns a noise that keeps their
        # order, and returns {} for other models.
        inputs: dict[str, Any] = {
            **patch_order_noise(self._base, pixels),
            "pixel_values": pixels.to(self._base.dtype),
        }
        if photo.size and forward_accepts(self._base, _INTERPOLATE):
            inputs[_INTERPOLATE] = True
        # The tokens are those before the patches (CLS, registers), then the patches row by row.
        tokens = make_patch_tokens((rows, columns), list_prefix_tokens(self._base), photo.source)
        # Let the model refuse a run on these inputs in which a layer has another number of tokens.
        self.model.expect(inputs, len(tokens))
        picture = Picture(covered_pixels, (rows, columns), photo.source, photo.image.size)
        return SensoryInput(inputs, tokens, picture, notes=notes)

    def _resize(self, size: int) -> dict[str, Any]:
        """Return the processor's options for a square of `size` pixels. The cropped fraction is that of the default."""
        # Some processors scale a photo to a size. Others scale its shorter edge to a size, and crop the middle.
        default_size = getattr(self._processor, "size", None)
        shortest_edge = getattr(default_size, "shortest_edge", None)
        can_scale = shortest_edge or getattr(default_size, "height", None)
        # Only models that interpolate their positions read other sizes, in whole patches. DINOv2 does it unasked.
        is_dinov2 = self._base.config.model_type.startswith("dinov2")
        if not can_scale or not (is_dinov2 or forward_accepts(self._base, _INTERPOLATE)):
            raise AttnscopeError(
                f"{self._name} takes pictures of one size", "leave out --size; DINOv2 and ViT have it"
            )
        height, width = read_patch_size(self._base, self._name)
        if size % height or size % width:
            raise AttnscopeError(
                f"{size} pixels are no whole patches of {height}", f"--size {size // height * height} is"
            )
        square = {"height": size, "width": size}
        if not shortest_edge:
            return {"size": square}
        default_crop = (
            getattr(getattr(self._processor, "crop_size", None), "height", None) or shortest_edge
        )
        edge = round(shortest_edge * size / default_crop)
        return {"size": {"shortest_edge": edge}, "crop_size": square}


class AudioReader(MediaReader):
    """Prepare recordings for an audio model."""

    def prepare_recording(self, recording: Recording) -> SensoryInput:
        """Return a recording as inputs of the model, made by its own feature extractor."""
        if not takes_audio(self._base):
            raise AttnscopeError(
                f"{self._name} hears recordings in a way that is not supported",
                "leave out --audio, or name a model such as Whisper or wav2vec 2.0",
            )
        self._require_processor("feature extractor")
        # Whisper reads a window of fixed length, wav2vec 2.0 the whole recording.
        return (
            self._prepare_window(recording)
            if has_audio_window(self._base)
            else self._prepare_frames(recording)
        )

    @property
    def _sampling_rate(self) -> int:
        """Return the sampling rate of the extractor, in samples per second."""
        return int(self._processor.sampling_rate)

    def _prepare_window(self, recording: Recording) -> SensoryInput:
        """Prepare a recording for a model that reads a window of fixed length (Whisper): pad it or cut it."""
        base = self._base
        # The encoder makes one frame from `stride` steps of the spectrogram. Each step has hop_length samples.
        stride = int(base.encoder.conv1.stride[0]) * int(base.encoder.conv2.stride[0])
        frame_samples = stride * int(self._processor.hop_length)
        n_frames = int(base.config.max_source_positions)
        window_samples = n_frames * frame_samples
        window_s = window_samples / self._sampling_rate
        notes: tuple[str, ...] = ()
        samples = recording.resampled(self._sampling_rate).samples
        if len(samples) > window_samples:
            lasts = f"{recording.source} lasts {recording.seconds:.1f} s"
            notes = (f"{lasts}, {self._name} listens for {window_s:g} s: the rest is left out",)
            samples = samples[:window_samples]
        # The spectrogram of the window: (1, band, step)
        features = self._extract(samples)
        shape = (1, int(base.config.num_mel_bins), n_frames * stride)
        if tuple(features.shape) != shape:
            raise AttnscopeError(
                f"the feature extractor of {self._name} gives {tuple(features.shape)}, the model takes {shape}",
                "preprocessor_config.json and config.json belong to different models",
            )
        # Draw the recording without the padding of the window: (band, step)
        n_heard = math.ceil(len(samples) / frame_samples)
        heard_features = features[0, :, : n_heard * stride]
        sound = self._make_sound(samples, frame_samples, n_heard, window_s, recording.source)
        sound = replace(sound, spectrogram=_make_spectrogram(heard_features, self._processor))
        tokens = make_frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
        return SensoryInput({base.main_input_name: features}, tokens, sound=sound, notes=notes)

    def _prepare_frames(self, recording: Recording) -> SensoryInput:
        """Prepare a recording for a model that reads all of it, in frames (wav2vec 2.0)."""
        config = self._base.config
        samples = recording.resampled(self._sampling_rate).samples
        values = self._extract(samples)
        # Each convolution shortens the sequence, from samples to frames.
        n_frames = values.shape[1]
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            n_frames = (n_frames - kernel) // stride + 1
        if n_frames < 1:
            raise AttnscopeError(
                f"{recording.source} is too short for {self._name}: {len(samples)} samples",
                "give a longer one",
            )
        seconds = len(samples) / self._sampling_rate
        frame_samples = math.prod(config.conv_stride)
        sound = self._make_sound(samples, frame_samples, n_frames, seconds, recording.source)
        inputs = {self._base.main_input_name: values}
        # Let the model refuse a run on these inputs in which a layer has another number of frames.
        self.model.expect(inputs, n_frames)
        tokens = make_frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
        return SensoryInput(inputs, tokens, sound=sound)

    def _extract(self, samples: NDArray[np.float32]) -> Tensor:
        """Return the extractor's output for samples: (1, band, step) for Whisper, (1, sample) for other models."""
        with as_failure(f"the feature extractor of {self._name} fails"):
            features = self._processor(samples, sampling_rate=self._sampling_rate, return_tensors="pt")
            values: Tensor = features[self._base.main_input_name].to(self._base.dtype)
        return values

    def _make_sound(
        self,
        samples: NDArray[np.float32],
        frame_samples: int,
        n_frames: int,
        window_s: float,
        source: str,
    ) -> Sound:
        """Return the sound in frames of `frame_samples` samples, with the largest absolute sample of each frame.

        `window_s` is the length of what the model reads, in seconds.
        """
        # Pad the last frame with silence: (sample,) -> (frame, sample) -> (frame,)
        magnitudes = np.abs(samples[: n_frames * frame_samples])
        magnitudes = np.pad(magnitudes, (0, n_frames * frame_samples - len(magnitudes)))
        envelope = magnitudes.reshape(n_frames, frame_samples).max(1)
        return Sound(
            envelope,
            frame_samples / self._sampling_rate,
            len(samples) / self._sampling_rate,
            window_s,
            source,
        )


# Patches and other tokens of a vision model --------------------------------------------------------------------------


def is_masked_autoencoder(base: PreTrainedModel) -> bool:
    """Return whether a model is a masked autoencoder, which hides random patches."""
    # Hiera without its pretraining head hides no patches, though its configuration has a mask ratio. Only Hiera's
    # modules have an attribute `is_mae`.
    if any(hasattr(module, "is_mae") for module in base.modules()):
        return False
    # Only a forward that hides patches has the argument `noise`, which chooses them.
    return bool(getattr(base.config, "mask_ratio", 0)) and forward_accepts(base, "noise")


def read_patch_size(base: PreTrainedModel, name: str) -> tuple[int, int]:
    """Return the height and width of the patches that a model cuts pictures into, in pixels.

    If stages merge patches, two by two (Swin), return those of the last stage. `name` is the model's name in errors.
    """
    size = getattr(base.config, "patch_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise AttnscopeError(
            f"{name} does not cut pictures into patches of one size", "vision transformers are supported"
        )
    height, width = sides
    if merges_patches(base):
        # Each stage after the first one doubles height and width.
        factor = 2 ** (len(base.config.depths) - 1)
        return height * factor, width * factor
    return height, width


def merges_patches(base: PreTrainedModel) -> bool:
    """Return whether a vision model attends within windows, and merges patches from stage to stage (Swin)."""
    return hasattr(base.config, "depths") and hasattr(base.config, "window_size")


def list_prefix_tokens(base: PreTrainedModel) -> tuple[str, ...]:
    """Return the labels of the tokens before the patches, such as ("CLS", "REG0"). They are parameters of the model."""
    parameters = {key.rpartition(".")[2]: parameter for key, parameter in base.named_parameters()}
    labels = [
        label for label, names in _TOKEN_PARAMETERS.items() if not parameters.keys().isdisjoint(names)
    ]
    for name in _REGISTER_PARAMETERS:
        if name in parameters:
            labels += [f"REG{number}" for number in range(parameters[name].shape[-2])]
    return tuple(labels)


def undo_normalisation(processor: Any, pixels: Tensor) -> NDArray[np.uint8]:
    """Return a processor's normalised picture, (1, 3, height, width), as colours from 0 to 255, (height, width, 3)."""
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


def _make_spectrogram(features: Tensor, extractor: Any) -> Spectrogram | None:
    """Return the spectrogram for drawing; None if the extractor does not tell the frequencies of its bands.

    `features` is Whisper's, (band, step): (log10 of the power + 4) / 4. So a difference of 1 is 40 decibels.
    """
    values = features.float().cpu().numpy()
    filters = np.asarray(getattr(extractor, "mel_filters", None), np.float64)  # (bin, band)
    if filters.ndim != 2 or filters.shape[1] != len(values):
        return None
    # The centre of a band is the mean frequency of its bins, weighted by its filter.
    bins = np.linspace(0, int(extractor.sampling_rate) / 2, len(filters))
    weights = filters.sum(0)
    centres_hz = divide(bins @ filters, weights, 0.0)
    # A band without bins has no centre. Give it the centre of the band before, so that the centres never decrease.
    bands_hz = tuple(np.maximum.accumulate(centres_hz).tolist())
    # Shades are bytes: 0 for the lowest power, 255 for the highest.
    value_range = float(np.ptp(values))
    levels = (values - values.min()) / (value_range or 1.0)
    shades: NDArray[np.uint8] = np.rint(255 * levels).astype(np.uint8)
    return Spectrogram(shades, bands_hz, 40 * value_range)
