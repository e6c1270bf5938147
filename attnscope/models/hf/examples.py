"""Make up inputs to check a Hugging Face model on: random texts, pictures or sounds.

Also find the lengths from which on a model may compute otherwise: windows, chunks and rotary limits.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError
from attnscope.models.devices import input_device
from attnscope.models.hf.parts import (
    accepts,
    as_list,
    causal_types,
    input_name,
    pad_id,
    patch_order,
    setting,
    standing_arguments,
    vocab_size,
)

LENGTHS = (9, 6)
"""Tokens of the two texts that are padded together; the second is also run alone."""

TARGET_LENGTHS = (5, 3)
"""Tokens of the two targets of an encoder-decoder; lengths unlike its texts' tell the kinds of attention apart."""

OWN_INPUTS = "make its inputs yourself: attnscope.load(model, inputs=…, labels=…) in Python"
"""The hint where inputs cannot be made up."""

_MANY_POSITIONS = 512
"""Tokens of a picture or sound from which on a single one is run: maps of 1500 x 1500, as Whisper's, are large."""

_GRID = (2, 3)
"""Rows and columns of patches of a picture that comes cut already."""

_TRAJECTORY_STEPS = 24
"""Steps of the trajectory that a decision transformer reads."""

_FRAMES = 96
"""Hundredths of a second in a spectrogram: more than eight, which encoders of speech make one token of."""

Inputs = dict[str, Any]
"""Arguments of one forward pass, by name, the main input first. Where texts are padded, attention masks say so."""


def examples(model: PreTrainedModel, n_tokens: int | None = None) -> tuple[Inputs, Inputs]:
    """Return two random inputs of different length padded together, and the second of them alone.

    Both are the same object where two would be too large. Texts and targets are all of `n_tokens` where it is given.

    Raises:
        AttnscopeError: Inputs of the model's kind cannot be made up.
    """
    name = input_name(model)
    generator = torch.Generator().manual_seed(0)
    if name in ("input_ids", "decoder_input_ids") or accepts(model, "input_ids"):
        lengths = LENGTHS if n_tokens is None else (n_tokens, n_tokens)
        padded, alone = _make_texts(model, "", lengths, generator)
    else:
        padded, alone = _make_samples(model, name, generator)
    if model.config.is_encoder_decoder:
        if not accepts(model, "decoder_input_ids"):
            message = (
                f"{model.config.model_type} has a decoder that reads no text, which is not supported"
            )
            raise AttnscopeError(message, OWN_INPUTS)
        lengths = TARGET_LENGTHS if n_tokens is None else (n_tokens, n_tokens)
        target_padded, target_alone = _make_texts(model, "decoder_", lengths, generator)
        if padded is not alone:
            padded.update(target_padded)
        alone.update(target_alone)
    for inputs in (padded, alone):
        inputs.update(standing_arguments(model))
    return padded, alone


def real_tokens(inputs: Mapping[str, Any], name: str) -> Tensor | None:
    """Return which tokens of texts are real and no padding, (text, token); None where no text is read.

    Args:
        inputs: Arguments of a forward pass.
        name: Which tokens: those with a row in "hidden" states (of the decoder, if there is one), in "encoded" states,
            or in attention of this kind.
    """
    is_target = "decoder_input_ids" in inputs and name.startswith(("hidden", "decoder", "cross"))
    prefix = "decoder_" if is_target else ""
    ids = inputs.get(f"{prefix}input_ids")
    if ids is None:
        return None
    mask = inputs.get(f"{prefix}attention_mask")
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Return the settings of a configuration with their names, those of its language model first."""
    return [*vars(config.get_text_config()).items(), *vars(config).items()]


def _make_texts(
    model: PreTrainedModel, prefix: str, lengths: tuple[int, int], generator: torch.Generator
) -> tuple[Inputs, Inputs]:
    """Return two random texts of these lengths, the second of them padded, and the second alone."""
    # Choose among token numbers without a meaning of their own.
    special = {
        value
        for name, value in _settings(model.config)
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    n_known = min(vocab_size(model), 1000)
    plain = torch.tensor(sorted({*range(n_known)} - special) or [0])
    # Two rows, (text, token).
    choices = torch.randint(len(plain), (2, lengths[0]), generator=generator)
    real = torch.arange(lengths[0])[None] < torch.tensor(lengths)[:, None]
    ids = plain[choices].masked_fill(~real, pad_id(model)).to(input_device(model))
    padded = {
        f"{prefix}input_ids": ids,
        f"{prefix}attention_mask": real.long().to(ids.device),
        **causal_types(model, ids),
    }
    second = ids[1:, : lengths[1]]
    alone = {f"{prefix}input_ids": second, **causal_types(model, second)}
    return padded, alone


# What is no text --------------------------------------------------------------------------------------------------


def _make_samples(
    model: PreTrainedModel, name: str, generator: torch.Generator
) -> tuple[Inputs, Inputs]:
    """Return two random pictures, videos, recordings or series, and the second alone; both alone if they are large."""
    config = model.config
    shape = _sample_shape(config, name)
    both = torch.randn(2, *shape, generator=generator).to(input_device(model), model.dtype)
    alone = {name: both[1:], **_other_arguments(model, both[1:])}
    n_positions = getattr(config, "max_source_positions", 0)
    patch_size = getattr(config, "patch_size", None)
    if len(shape) == 3 and isinstance(patch_size, int):
        n_positions = (shape[-1] // patch_size) * (shape[-2] // patch_size)
    if n_positions > _MANY_POSITIONS:
        return alone, alone
    return {name: both, **_other_arguments(model, both)}, alone


def _other_arguments(model: PreTrainedModel, values: Tensor) -> Inputs:
    """Return the arguments that a model needs beside its main input, (batch, ...), without padding."""
    if accepts(model, "noise"):
        return patch_order(model, values)
    all_real = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
    # SigLIP 2, whose patches come cut already.
    if accepts(model, "spatial_shapes"):
        shape = torch.tensor([_GRID], device=values.device).expand(len(values), -1)
        return {"pixel_attention_mask": all_real, "spatial_shapes": shape}
    # Decision Transformer: what it did, what that brought, and when.
    if accepts(model, "returns_to_go"):
        return {
            "actions": values[..., :1].expand(-1, -1, model.config.act_dim),
            "rewards": values[..., :1],
            "returns_to_go": values[..., 1:2],
            "timesteps": torch.arange(values.shape[1], device=values.device).expand(len(values), -1),
            "attention_mask": all_real,
        }
    # TimesFM: 0 is no padding, and as a series' frequency it is days or finer.
    if accepts(model, "past_values_padding"):
        zeros = torch.zeros_like(all_real)
        arguments = {"past_values_padding": zeros}
        if accepts(model, "freq"):
            arguments["freq"] = zeros[:, :1]
        return arguments
    return {"input_features_mask": all_real} if accepts(model, "input_features_mask") else {}


def _sample_shape(config: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one picture, video, recording or series, without the batch."""
    match name:
        case "pixel_values" if hasattr(config, "num_patches"):
            return _GRID[0] * _GRID[1], getattr(config, "num_channels", 3) * config.patch_size**2
        case "pixel_values" | "pixel_values_videos":
            inner = config
            if not hasattr(config, "image_size"):
                inner = getattr(config, "vision_config", config)
            size = setting(inner, "image_size") or 32
            height, width = size if isinstance(size, (tuple, list)) else (size, size)
            picture = (getattr(inner, "num_channels", 3), height, width)
            # Of a video.
            n_frames = getattr(inner, "num_frames", None)
            return picture if n_frames is None else (n_frames, *picture)
        case "past_values":
            n_steps = min(config.context_length, _MANY_POSITIONS)
            n_channels = getattr(config, "num_input_channels", None)
            return (n_steps,) if n_channels is None else (n_steps, n_channels)
        case "states":
            return _TRAJECTORY_STEPS, config.state_dim
        case "input_values" if hasattr(config, "frequency_stride"):
            # AST: a spectrogram of full length.
            return config.max_length, config.num_mel_bins
        case "input_values":
            # A wave: a quarter of a second at 16 kHz.
            return (4000,)
        case "input_features" if hasattr(config, "feature_projection_input_dim"):
            # w2v-BERT: a dozen pairs of a spectrogram's frames.
            return 12, config.feature_projection_input_dim
    # A spectrogram, whose sizes may stand in the configuration of the part that hears.
    part = setting(config, "encoder_config", "audio_config") or config
    n_bands = setting(part, "num_mel_bins", "input_feat_per_channel")
    if name != "input_features" or not n_bands:
        raise AttnscopeError(
            f"{config.model_type} reads {name}, which attnscope cannot make up for its self-check",
            OWN_INPUTS,
        )
    # Encoders of full length only, which halve the number of frames: Whisper first.
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return n_bands, 2 * config.max_source_positions
    if part.model_type in ("glmasr_encoder", "voxtral_realtime_encoder"):
        return n_bands, 2 * part.max_position_embeddings
    n_stacked = getattr(part, "input_channels", 1) * getattr(part, "num_stacked_frames", 1)
    return _FRAMES, n_bands * n_stacked


# Lengths ----------------------------------------------------------------------------------------------------------

_LENGTH_SETTING = re.compile(
    r"(window|window_size|chunk_size|chunk_length|block_size|local_attention|local_radius|index_top_?k"
    r"|original_max_position_embeddings)$"
)
"""Names of settings that are windows, chunks or limits, in tokens."""

_OTHER_PART = re.compile(r"mamba|ssm|linear|feed_forward|vision|image|video|audio|speech|conv|n_window")
"""Names of settings of parts other than attention over text."""


def reaches(config: Any) -> list[int]:
    """Return the windows, chunks and blocks that a configuration names, in tokens, sorted."""
    settings = _settings(config)
    # Rotary settings are dicts: what they hold counts too.
    for name, value in list(settings):
        if isinstance(value, dict) and "rope" in name:
            settings += value.items()
    lengths: set[int] = set()
    for name, value in settings:
        if _LENGTH_SETTING.search(str(name)) and not _OTHER_PART.search(str(name)):
            lengths |= {number for number in as_list(value) if isinstance(number, int) and number > 1}
    return sorted(lengths)


def count_tokens(inputs: Mapping[str, Any]) -> int:
    """Return the tokens of the longest text of a forward's arguments; 0 without a text."""
    return max(
        (inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs),
        default=0,
    )


def length_beyond(reach: int) -> int:
    """Return a length at which some queries see past a window, and that is no multiple of a block."""
    # Half a window further, and one more: an odd number for windows that are multiples of 4.
    return reach + 1 + min(reach // 2, 32)


def mixes_lengths(config: Any, mask: Tensor | None) -> bool:
    """Return whether padding changes what a model computes for a text of a batch.

    Rotary positions by longrope have long and short factors, chosen by the longest text of a batch; dynamic ones are
    scaled by its length beyond a limit. The mask is (text, token), 1 or True at real tokens.
    """
    if mask is None:
        return False
    shortest = int(mask.sum(1).min())
    longest = mask.shape[1]
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", 0)
    # Rotary settings: one set, or several by kind of layer.
    rope = getattr(text_config, "rope_parameters", None) or {}
    all_settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for settings in all_settings:
        kind = settings.get("rope_type", "")
        first_limit = settings.get("original_max_position_embeddings", limit)
        if kind == "longrope" and shortest <= first_limit < longest:
            return True
        if "dynamic" in kind and longest > max(limit, shortest):
            return True
    return False
