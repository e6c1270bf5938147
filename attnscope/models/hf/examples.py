"""Make up inputs to check a Hugging Face model on: random texts, pictures or sounds.

Also find the text lengths beyond which attention may change: windows, chunks and the limits of rotary positions.
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
"""Tokens of two texts. The second is padded to the length of the first, and is also run alone."""

TARGET_LENGTHS = (5, 3)
"""Tokens of the two texts of a decoder beside an encoder. Attention between other lengths is of another kind."""

OWN_INPUTS = "make its inputs yourself: attnscope.load(model, inputs=…, labels=…) in Python"
"""The hint of an error that says that inputs cannot be made up."""

_MANY_POSITIONS = 512
"""The most tokens of a picture or sound in a batch of two: maps of 1500 x 1500, as Whisper's, are large.

Also the most steps of a series.
"""

_GRID = (2, 3)
"""Rows and columns of patches in a picture that a processor has cut into patches, as SigLIP 2's does."""

_FRAMES = 96
"""Frames of a spectrogram, of 10 ms each: many tokens, for speech encoders merge up to eight frames into one."""

Inputs = dict[str, Any]
"""Arguments of one forward pass, by name, the main input first. Where texts are padded, attention masks say so."""


def examples(model: PreTrainedModel, n_tokens: int | None = None) -> tuple[Inputs, Inputs]:
    """Return a batch of two random inputs, the second of them padded, and that second input alone.

    Large pictures and sounds are not batched: then the same object, a single input, is returned twice.

    Args:
        model: The model, without the head for its task.
        n_tokens: Tokens of every text, the decoder's too; None = LENGTHS and TARGET_LENGTHS.

    Raises:
        AttnscopeError: Inputs of the model's kind cannot be made up.
    """
    name = input_name(model)
    generator = torch.Generator().manual_seed(0)
    lengths = LENGTHS
    target_lengths = TARGET_LENGTHS
    if n_tokens is not None:
        lengths = (n_tokens, n_tokens)
        target_lengths = lengths
    if name == "input_ids" or accepts(model, "input_ids"):
        padded, alone = _make_texts(model, "", lengths, generator)
    else:
        padded, alone = _make_samples(model, name, generator)
    if model.config.is_encoder_decoder:
        if not accepts(model, "decoder_input_ids"):
            message = (
                f"{model.config.model_type} has a decoder that reads no text, which is not supported"
            )
            raise AttnscopeError(message, OWN_INPUTS)
        target_padded, target_alone = _make_texts(model, "decoder_", target_lengths, generator)
        # Two texts of the decoder fit a batch of two inputs, not a single large one.
        if padded is not alone:
            padded.update(target_padded)
        alone.update(target_alone)
    for inputs in (padded, alone):
        inputs.update(standing_arguments(model))
    return padded, alone


def real_tokens(inputs: Mapping[str, Any], name: str) -> Tensor | None:
    """Return which tokens are real and no padding, bool (text, token); None where no text is read.

    Args:
        inputs: Arguments of a forward pass.
        name: What the tokens have rows in: "hidden" (the last hidden states, the decoder's if there is one), "encoded"
            (the encoder's), or attention of a kind, such as "cross" or "cross layer 3".
    """
    is_target = "decoder_input_ids" in inputs and name.startswith(("hidden", "decoder", "cross"))
    prefix = "decoder_" if is_target else ""
    ids = inputs.get(f"{prefix}input_ids")
    if ids is None:
        return None
    mask = inputs.get(f"{prefix}attention_mask")
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Return all settings of a configuration as (name, value): those of its language model, then its own."""
    return [*vars(config.get_text_config()).items(), *vars(config).items()]


def _make_texts(
    model: PreTrainedModel, prefix: str, lengths: tuple[int, int], generator: torch.Generator
) -> tuple[Inputs, Inputs]:
    """Return a batch of two random texts of these lengths, the second of them padded, and the second text alone.

    Arguments of the forward are named with the prefix, "" or "decoder_".
    """
    # Draw from tokens that are not special.
    special = {
        value
        for name, value in _settings(model.config)
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    n_known = min(vocab_size(model), 1000)
    plain = torch.tensor([number for number in range(n_known) if number not in special])
    choices = torch.randint(len(plain), (2, lengths[0]), generator=generator)
    # (text, token): True at real tokens
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


# Pictures, sounds and series --------------------------------------------------------------------------------------


def _make_samples(
    model: PreTrainedModel, name: str, generator: torch.Generator
) -> tuple[Inputs, Inputs]:
    """Return a batch of two random pictures, videos, recordings or series, and the second alone.

    If they are large, return the second alone twice. `name` is the model's main input.
    """
    config = model.config
    shape = _sample_shape(config, name)
    both = torch.randn(2, *shape, generator=generator).to(input_device(model), model.dtype)
    second = both[1:]
    alone = {name: second, **_other_arguments(model, second)}
    # Count the tokens: frames of a recording, or patches of a picture of shape (channel, height, width).
    n_positions = getattr(config, "max_source_positions", 0)
    patch_size = getattr(config, "patch_size", None)
    if len(shape) == 3 and isinstance(patch_size, int):
        n_positions = (shape[-1] // patch_size) * (shape[-2] // patch_size)
    if n_positions > _MANY_POSITIONS:
        return alone, alone
    return {name: both, **_other_arguments(model, both)}, alone


def _other_arguments(model: PreTrainedModel, values: Tensor) -> Inputs:
    """Return the arguments that a model needs beside `values`, its main input, (batch, ...): nothing is padding."""
    # ViT-MAE: the order in which it takes patches.
    if accepts(model, "noise"):
        return patch_order(model, values)
    all_real = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
    # SigLIP 2: which patches are real, and the rows and columns of each picture.
    if accepts(model, "spatial_shapes"):
        shape = torch.tensor([_GRID], device=values.device).expand(len(values), -1)
        return {"pixel_attention_mask": all_real, "spatial_shapes": shape}
    # TimesFM: in its mask 0 means a real step; as the frequency of a series, 0 means daily or more often.
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
            # SigLIP 2 takes flat patches: (patch, channels * height * width).
            return _GRID[0] * _GRID[1], getattr(config, "num_channels", 3) * config.patch_size**2
        case "pixel_values" | "pixel_values_videos":
            # The sizes may stand in the configuration of the part that sees.
            vision = config
            if not hasattr(config, "image_size"):
                vision = getattr(config, "vision_config", config)
            # One side of a square, or height and width.
            sides = as_list(setting(vision, "image_size") or 32)
            picture = (getattr(vision, "num_channels", 3), sides[0], sides[-1])
            # A video has frames.
            n_frames = getattr(vision, "num_frames", None)
            return picture if n_frames is None else (n_frames, *picture)
        case "past_values":
            n_steps = min(config.context_length, _MANY_POSITIONS)
            n_channels = getattr(config, "num_input_channels", None)
            return (n_steps,) if n_channels is None else (n_steps, n_channels)
        case "input_values" if hasattr(config, "frequency_stride"):
            # AST takes a spectrogram, always of full length: (frame, band).
            return config.max_length, config.num_mel_bins
        case "input_values":
            # A waveform: a quarter of a second at 16 kHz.
            return (4000,)
        case "input_features" if hasattr(config, "feature_projection_input_dim"):
            # w2v-BERT takes two frames of a spectrogram as one step; make a dozen steps.
            return 12, config.feature_projection_input_dim
    # What is left is a spectrogram. Its sizes may stand in the configuration of the part that hears.
    audio = setting(config, "encoder_config", "audio_config") or config
    n_bands = setting(audio, "num_mel_bins", "input_feat_per_channel")
    if name != "input_features" or not n_bands:
        raise AttnscopeError(
            f"{config.model_type} reads {name}, which attnscope cannot make up for its self-check",
            OWN_INPUTS,
        )
    # Whisper and its kin take a spectrogram of full length only, (band, frame): two frames for each position.
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return n_bands, 2 * config.max_source_positions
    if audio.model_type in ("glmasr_encoder", "voxtral_realtime_encoder"):
        return n_bands, 2 * audio.max_position_embeddings
    # Others take (frame, band), where a frame may be several ones stacked.
    n_stacked = getattr(audio, "input_channels", 1) * getattr(audio, "num_stacked_frames", 1)
    return _FRAMES, n_bands * n_stacked


# Lengths ----------------------------------------------------------------------------------------------------------

_LENGTH_SETTING = re.compile(
    r"(window|window_size|chunk_size|chunk_length|block_size|local_attention|local_radius|index_top_?k"
    r"|original_max_position_embeddings)$"
)
"""How names of settings end that are windows, chunks or limits, in tokens."""

_OTHER_PART = re.compile(r"mamba|ssm|linear|feed_forward|vision|image|video|audio|speech|conv|n_window")
"""Names of settings of parts other than attention over text."""


def reaches(config: Any) -> list[int]:
    """Return the lengths of all windows, chunks and blocks that a configuration names, in tokens, sorted."""
    settings = _settings(config)
    # Rotary settings are dicts: look into them too.
    for name, value in list(settings):
        if isinstance(value, dict) and "rope" in name:
            settings += value.items()
    lengths: set[int] = set()
    for name, value in settings:
        if _LENGTH_SETTING.search(str(name)) and not _OTHER_PART.search(str(name)):
            lengths |= {length for length in as_list(value) if isinstance(length, int) and length > 1}
    return sorted(lengths)


def length_beyond(reach: int) -> int:
    """Return a text length at which a window of `reach` tokens hides keys, and a block of it stays partly filled."""
    # Add half a window, so that many queries are affected, and 1: the sum is odd for windows of 4, 8, 12 … tokens.
    return reach + 1 + min(reach // 2, 32)


def mixes_lengths(config: Any, mask: Tensor | None) -> bool:
    """Return whether padding changes what a model computes for a text of a batch.

    Rotary positions of type "longrope" choose between short and long factors by the longest text of a batch. Those of a
    "dynamic" type are scaled by its length, if it is beyond a limit. The mask is (text, token), 1 or True at real
    tokens.
    """
    if mask is None:
        return False
    shortest = int(mask.sum(1).min())
    longest = mask.shape[1]
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", 0)
    # There is one set of rotary settings, or one for each type of layer.
    rope = getattr(text_config, "rope_parameters", None) or {}
    all_settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for settings in all_settings:
        kind = settings.get("rope_type", "")
        short_limit = settings.get("original_max_position_embeddings", limit)
        if kind == "longrope" and shortest <= short_limit < longest:
            return True
        # Two texts of equal length are scaled alike.
        if "dynamic" in kind and longest > max(limit, shortest):
            return True
    return False
