"""What Hugging Face models hear: a recording through the model's own feature extractor, and its frames as tokens."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.hf.senses import holds_processor, tokens_before
from attnscope.models.model import HeardSound, SeenPicture
from attnscope.records.pictures import Picture
from attnscope.records.sounds import Sound
from attnscope.senses.recordings import Recording
from attnscope.senses.tokens import frame_tokens, patch_tokens


def hears(base: PreTrainedModel) -> bool:
    """Whether a model listens as Whisper does: to a window of fixed length, by an encoder that a decoder reads."""
    encoder = getattr(base, "encoder", None)
    convolves = hasattr(encoder, "conv1") and hasattr(encoder, "conv2")
    return base.main_input_name == "input_features" and bool(base.config.is_encoder_decoder) and convolves


def listens(base: PreTrainedModel) -> bool:
    """Whether a model is an encoder of sound whose tokens are frames in time: wav2vec 2.0, HuBERT, WavLM, w2v-BERT."""
    takes = "input_values" if hasattr(base.config, "conv_stride") else "input_features"
    frames = hasattr(base.config, "conv_stride") or hasattr(base.config, "feature_projection_input_dim")
    return frames and base.main_input_name == takes and not base.config.is_encoder_decoder


def open_feature_extractor(folder: Path, options: Mapping[str, Any]) -> Any:
    """The feature extractor of a folder; None where it has none.

    Raises:
        AttnscopeError: It cannot be loaded.
    """
    if not holds_processor(folder):
        return None
    auto: Any = transformers.AutoFeatureExtractor
    try:
        return auto.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises what it likes on files that it does not understand
        raise AttnscopeError(
            f"cannot load the feature extractor in {folder}: {first_line(error)}", "get its files again"
        ) from error


def heard_by(base: Any, extractor: Any, name: str, recording: Recording) -> HeardSound:
    """A recording as a model hears it: through its own feature extractor, padded to the window that it listens for.

    Args:
        base: The model.
        extractor: Its feature extractor.
        name: What the model is called.
        recording: The recording.

    Raises:
        AttnscopeError: The extractor fails, or is another model's.
    """
    rate, hop = int(extractor.sampling_rate), int(extractor.hop_length)
    stride = int(base.encoder.conv1.stride[0]) * int(base.encoder.conv2.stride[0])
    n_frames = int(base.config.max_source_positions)
    window, given = n_frames * stride * hop / rate, recording.seconds
    recording = recording.at(rate)
    notes = [*recording.notes]
    samples = recording.samples
    if len(samples) > n_frames * stride * hop:
        samples = samples[: n_frames * stride * hop]
        notes.append(f"{recording.source} lasts {given:.1f} s, {name} listens for {window:g} s: the rest is left out")
    try:
        made = extractor(samples, sampling_rate=rate, return_tensors="pt")
    except Exception as error:
        raise AttnscopeError(f"the feature extractor of {name} fails: {first_line(error)}") from error
    features = made["input_features"].to(base.dtype)
    if tuple(features.shape) != (1, int(base.config.num_mel_bins), n_frames * stride):
        raise AttnscopeError(
            f"the feature extractor of {name} gives {tuple(features.shape)}, the model takes "
            f"(1, {base.config.num_mel_bins}, {n_frames * stride})",
            "preprocessor_config.json and config.json belong to different models",
        )
    each = stride * hop
    n_sound = -(-len(samples) // each)
    loud = np.zeros(n_sound * each, np.float32)
    loud[: len(samples)] = np.abs(samples)
    sound = Sound(loud.reshape(n_sound, each).max(1), each / rate, len(samples) / rate, window, recording.source)
    tokens = frame_tokens(n_frames, sound.seconds_per_frame, recording.source)
    return HeardSound({"input_features": features}, tokens, sound, tuple(notes))


def frames_heard_by(base: Any, extractor: Any, name: str, recording: Recording) -> HeardSound:
    """A recording as an encoder of sound hears it: all of it, in frames.

    Args:
        base: The model.
        extractor: Its feature extractor.
        name: What the model is called.
        recording: The recording.

    Raises:
        AttnscopeError: The extractor fails, or the recording is shorter than a frame.
    """
    rate = int(extractor.sampling_rate)
    recording = recording.at(rate)
    samples = recording.samples
    try:
        made = extractor(samples, sampling_rate=rate, return_tensors="pt")
        given = made[base.main_input_name].to(base.dtype)
    except Exception as error:
        raise AttnscopeError(f"the feature extractor of {name} fails: {first_line(error)}") from error
    if hasattr(base.config, "conv_stride"):
        each = math.prod(base.config.conv_stride)
        n = given.shape[1]
        for kernel, stride in zip(base.config.conv_kernel, base.config.conv_stride, strict=True):
            n = (n - kernel) // stride + 1
    else:
        # A spectrogram of a window each hundredth of a second; the last frame may be half a one, filled up.
        each = rate // 100 * int(getattr(extractor, "stride", 1))
        n = given.shape[1]
    if n < 1:
        raise AttnscopeError(f"{recording.source} is too short for {name}: {len(samples)} samples", "give a longer one")
    loud = np.zeros(max(n * each, len(samples)), np.float32)
    loud[: len(samples)] = np.abs(samples)
    seconds = len(samples) / rate
    sound = Sound(loud[: n * each].reshape(n, each).max(1), each / rate, seconds, seconds, recording.source)
    tokens = frame_tokens(n, sound.seconds_per_frame, recording.source)
    return HeardSound({base.main_input_name: given}, tokens, sound, recording.notes)


def sees_sound(base: PreTrainedModel) -> bool:
    """Whether a model cuts the spectrogram of a recording into patches, as the audio spectrogram transformer does."""
    config = base.config
    return (
        base.main_input_name == "input_values"
        and hasattr(config, "frequency_stride")
        and hasattr(config, "time_stride")
    )


def spectrogram_seen_by(base: Any, extractor: Any, name: str, recording: Recording) -> SeenPicture:
    """A recording as a model sees it that looks at its spectrogram: time across, pitch down, the lowest at the top.

    Raises:
        AttnscopeError: The extractor fails, or is another model's.
    """
    recording = recording.at(int(extractor.sampling_rate))
    try:
        made = extractor(recording.samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        values = made["input_values"].to(base.dtype)
    except Exception as error:
        raise AttnscopeError(f"the feature extractor of {name} fails: {first_line(error)}") from error
    config = base.config
    if tuple(values.shape) != (1, config.max_length, config.num_mel_bins):
        raise AttnscopeError(
            f"the feature extractor of {name} gives {tuple(values.shape)}, the model takes "
            f"(1, {config.max_length}, {config.num_mel_bins})",
            "preprocessor_config.json and config.json belong to different models",
        )
    high, wide = config.frequency_stride, config.time_stride
    rows = (config.num_mel_bins - config.patch_size) // high + 1
    columns = (config.max_length - config.patch_size) // wide + 1
    shown = values[0].T.float().numpy()
    shown = (shown - shown.min()) / (float(np.ptp(shown)) or 1.0)
    grey = np.rint(255 * shown[: rows * high, : columns * wide]).astype(np.uint8)
    pixels = np.ascontiguousarray(np.repeat(grey[:, :, None], 3, 2))
    picture = Picture(pixels, (rows, columns), recording.source, (pixels.shape[1], pixels.shape[0]))
    notes = [*recording.notes, "a spectrogram: time goes across, pitch down from the lowest"]
    if config.patch_size > min(high, wide):
        notes.append(f"patches of {config.patch_size} overlap: each is drawn as the {high} x {wide} where it begins")
    tokens = patch_tokens(picture.grid, tokens_before(base), recording.source)
    return SeenPicture({"input_values": values}, tokens, picture, tuple(notes))


def require_all_frames(sizes: set[tuple[int, int]], n_frames: int, name: str) -> None:
    """Refuses models whose layers do not each see all frames.

    Args:
        sizes: Queries and keys of the attentions that the model computes on a recording.
        n_frames: Frames of the recording.
        name: What the model is called.
    """
    strange = sorted(sizes - {(n_frames, n_frames)})
    if strange:
        raise AttnscopeError(
            f"{name} has attention of {strange[0][0]} queries on {strange[0][1]} keys where the recording has "
            f"{n_frames} frames: it merges or adds some, which is not supported",
            "wav2vec 2.0, HuBERT, WavLM and w2v-BERT can be shown",
        )


def written_by(model: Any, features: torch.Tensor, prompt: list[int], ends: set[int], most: int) -> list[int]:
    """What a model writes greedily on features, after a prompt: at each step the token of the largest probability."""
    written = list(prompt)
    with torch.no_grad():
        encoded = model.get_encoder()(features)
        for _ in range(most):
            ids = torch.tensor([written], device=features.device)
            token = int(model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits[0, -1].argmax())
            if token in ends:
                break
            written.append(token)
    return written
