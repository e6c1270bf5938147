"""Make up inputs to check a Hugging Face model on: random texts, pictures, sounds or time series.

Also find the text lengths beyond which attention may change: windows, chunks and the limits of rotary positions. Such a
length is called a *reach*.
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
    as_list,
    causal_token_types,
    first_setting,
    fixed_arguments,
    forward_accepts,
    input_name,
    pad_token_id,
    patch_order_noise,
    vocab_size,
)

TEXT_LENGTHS = (9, 6)
"""Tokens of the two texts of a batch. The second is padded to the length of the first, and is also run alone."""

TARGET_LENGTHS = (5, 3)
"""Tokens of the two decoder texts of an encoder-decoder. No length occurs in TEXT_LENGTHS: so the shape of attention
weights tells whether they are of the encoder, of the decoder, or cross-attention."""

OWN_INPUTS_HINT = "make its inputs yourself: attnscope.load(model, inputs=…, labels=…) in Python"
"""The hint of errors on models for which attnscope cannot make up inputs."""

_MAX_POSITIONS = 512
"""The most tokens of a picture or sound in a batch of two: Whisper's attention maps of 1500 x 1500 are too large.

Also the most time steps of a series.
"""

_PATCH_GRID = (2, 3)
"""Rows and columns of patches in a picture, for models whose processor cuts pictures into patches (SigLIP 2)."""

_N_FRAMES = 96
"""Frames of a spectrogram, 10 ms each. Speech encoders merge up to eight frames into one token."""

Inputs = dict[str, Any]
"""Arguments of one forward pass, by name, the main input first. Attention masks mark padding."""


def make_examples(model: PreTrainedModel, n_tokens: int | None = None) -> tuple[Inputs, Inputs]:
    """Return a batch of two random inputs, the second of them padded, and that second input alone.

    Large pictures and sounds are not batched. Then the same dict, a single input, is returned twice: `padded is alone`.

    Args:
        model: The model, without the head for its task.
        n_tokens: Tokens of every text, the decoder's too; None = TEXT_LENGTHS and TARGET_LENGTHS.

    Raises:
        AttnscopeError: attnscope cannot make up inputs for this model.
    """
    name = input_name(model)
    generator = torch.Generator().manual_seed(0)
    lengths = TEXT_LENGTHS
    target_lengths = TARGET_LENGTHS
    if n_tokens is not None:
        lengths = (n_tokens, n_tokens)
        target_lengths = lengths
    if name == "input_ids" or forward_accepts(model, "input_ids"):
        padded, alone = _make_texts(model, "", lengths, generator)
    else:
        padded, alone = _make_samples(model, name, generator)
    if model.config.is_encoder_decoder:
        if not forward_accepts(model, "decoder_input_ids"):
            raise AttnscopeError(
                f"{model.config.model_type} has a decoder that reads no text, which is not supported",
                OWN_INPUTS_HINT,
            )
        target_padded, target_alone = _make_texts(model, "decoder_", target_lengths, generator)
        # A batch of two inputs needs two decoder texts; a single large input needs one.
        if padded is not alone:
            padded.update(target_padded)
        alone.update(target_alone)
    for inputs in (padded, alone):
        inputs.update(fixed_arguments(model))
    return padded, alone


def real_token_mask(inputs: Mapping[str, Any], name: str) -> Tensor | None:
    """Return a mask that is True at real tokens and False at padding, bool (text, token); None if no text is read.

    Args:
        inputs: Arguments of a forward pass.
        name: The result whose rows the mask selects: "hidden" (the last hidden states, the decoder's if there is one),
            "encoded" (the encoder's), or attention of a kind, such as "cross" or "cross layer 3".
    """
    is_target = "decoder_input_ids" in inputs and name.startswith(("hidden", "decoder", "cross"))
    prefix = "decoder_" if is_target else ""
    ids = inputs.get(f"{prefix}input_ids")
    if ids is None:
        return None
    mask = inputs.get(f"{prefix}attention_mask")
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _list_settings(config: Any) -> list[tuple[str, Any]]:
    """Return all settings of a configuration as (name, value): first those of its language model, then its own."""
    return [*vars(config.get_text_config()).items(), *vars(config).items()]


def _make_texts(
    model: PreTrainedModel, prefix: str, lengths: tuple[int, int], generator: torch.Generator
) -> tuple[Inputs, Inputs]:
    """Return a batch of two random texts of these lengths, the second of them padded, and the second text alone.

    The names of the forward's arguments begin with the prefix, "" or "decoder_".
    """
    # Draw from the tokens that are not special, such as [SEP].
    special_ids = {
        value
        for name, value in _list_settings(model.config)
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    plain_ids = torch.tensor(
        [token_id for token_id in range(min(vocab_size(model), 1000)) if token_id not in special_ids]
    )
    # (text, token): indices into plain_ids
    choices = torch.randint(len(plain_ids), (2, lengths[0]), generator=generator)
    # (text, token): True at real tokens
    is_real = torch.arange(lengths[0])[None] < torch.tensor(lengths)[:, None]
    ids = plain_ids[choices].masked_fill(~is_real, pad_token_id(model)).to(input_device(model))
    padded = {
        f"{prefix}input_ids": ids,
        f"{prefix}attention_mask": is_real.long().to(ids.device),
        **causal_token_types(model, ids),
    }
    # The second text without its padding, (1, token)
    second_ids = ids[1:, : lengths[1]]
    alone = {f"{prefix}input_ids": second_ids, **causal_token_types(model, second_ids)}
    return padded, alone


# Pictures, sounds and series --------------------------------------------------------------------------------------


def _make_samples(
    model: PreTrainedModel, name: str, generator: torch.Generator
) -> tuple[Inputs, Inputs]:
    """Return a batch of two random pictures, videos, recordings or series, and the second sample alone.

    If samples are large, return the second one alone twice. `name` is the model's main input, such as "pixel_values".
    """
    config = model.config
    shape = _sample_shape(config, name)
    # (sample, ...)
    samples = torch.randn(2, *shape, generator=generator).to(input_device(model), model.dtype)
    second_sample = samples[1:]
    alone = {name: second_sample, **_other_arguments(model, second_sample)}
    # Count the tokens: frames of a recording, or patches of a picture, (channel, height, width).
    n_positions = getattr(config, "max_source_positions", 0)
    patch_size = getattr(config, "patch_size", None)
    if len(shape) == 3 and isinstance(patch_size, int):
        n_positions = (shape[-1] // patch_size) * (shape[-2] // patch_size)
    if n_positions > _MAX_POSITIONS:
        return alone, alone
    return {name: samples, **_other_arguments(model, samples)}, alone


def _other_arguments(model: PreTrainedModel, values: Tensor) -> Inputs:
    """Return the arguments that a model needs in addition to its main input, `values`, (batch, ...).

    They say that `values` holds no padding.
    """
    # ViT-MAE: noise that keeps the patches in order.
    if forward_accepts(model, "noise"):
        return patch_order_noise(model, values)
    all_real = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
    # SigLIP 2: which patches are real, and the rows and columns of each picture.
    if forward_accepts(model, "spatial_shapes"):
        shape = torch.tensor([_PATCH_GRID], device=values.device).expand(len(values), -1)
        return {"pixel_attention_mask": all_real, "spatial_shapes": shape}
    # TimesFM: in its padding mask 0 means a real step. A frequency of 0 means that steps are a day or less apart.
    if forward_accepts(model, "past_values_padding"):
        zeros = torch.zeros_like(all_real)
        arguments = {"past_values_padding": zeros}
        if forward_accepts(model, "freq"):
            arguments["freq"] = zeros[:, :1]
        return arguments
    return {"input_features_mask": all_real} if forward_accepts(model, "input_features_mask") else {}


def _sample_shape(config: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one picture, video, recording or series, without the batch axis. `name` is the main input."""
    match name:
        case "pixel_values" if hasattr(config, "num_patches"):
            # SigLIP 2 takes flat patches: (patch, channels * height * width).
            return _PATCH_GRID[0] * _PATCH_GRID[1], getattr(
                config, "num_channels", 3
            ) * config.patch_size**2
        case "pixel_values" | "pixel_values_videos":
            # The sizes may stand in the configuration of the vision tower.
            vision = config
            if not hasattr(config, "image_size"):
                vision = getattr(config, "vision_config", config)
            # image_size is the side of a square, or [height, width].
            sides_px = as_list(first_setting(vision, "image_size") or 32)
            picture_shape = (getattr(vision, "num_channels", 3), sides_px[0], sides_px[-1])
            # A video has frames.
            n_frames = getattr(vision, "num_frames", None)
            return picture_shape if n_frames is None else (n_frames, *picture_shape)
        case "past_values":
            n_steps = min(config.context_length, _MAX_POSITIONS)
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
    return _spectrogram_shape(config, name)


def _spectrogram_shape(config: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a spectrogram; refuse a main input, `name`, of any other kind."""
    # The sizes may stand in the configuration of the audio tower.
    audio = first_setting(config, "encoder_config", "audio_config") or config
    n_bands = first_setting(audio, "num_mel_bins", "input_feat_per_channel")
    if name != "input_features" or not n_bands:
        raise AttnscopeError(
            f"{config.model_type} reads {name}, which attnscope cannot make up for its self-check",
            OWN_INPUTS_HINT,
        )
    # Models like Whisper take only spectrograms of full length, (band, frame): two frames for each position.
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return n_bands, 2 * config.max_source_positions
    if audio.model_type in ("glmasr_encoder", "voxtral_realtime_encoder"):
        return n_bands, 2 * audio.max_position_embeddings
    # Others take (frame, band). They may stack several frames into one.
    n_stacked = getattr(audio, "input_channels", 1) * getattr(audio, "num_stacked_frames", 1)
    return _N_FRAMES, n_bands * n_stacked


# Lengths ----------------------------------------------------------------------------------------------------------

_LENGTH_SETTING = re.compile(
    r"(window|window_size|chunk_size|chunk_length|block_size|local_attention|local_radius|index_top_?k"
    r"|original_max_position_embeddings)$"
)
"""The names of settings that are windows, chunks or limits, in tokens, end like this: "sliding_window"."""

_OTHER_PART_SETTING = re.compile(
    r"mamba|ssm|linear|feed_forward|vision|image|video|audio|speech|conv|n_window"
)
"""The names of settings that do not concern attention over text contain one of these: "vision_window_size"."""


def find_reaches(config: Any) -> list[int]:
    """Return the reaches that a configuration names: lengths of windows, chunks and blocks, in tokens, sorted."""
    settings = _list_settings(config)
    # Rotary settings, such as rope_parameters, are dicts of further settings.
    for name, value in list(settings):
        if isinstance(value, dict) and "rope" in name:
            settings += value.items()
    reaches: set[int] = set()
    for name, value in settings:
        if _LENGTH_SETTING.search(str(name)) and not _OTHER_PART_SETTING.search(str(name)):
            reaches |= {length for length in as_list(value) if isinstance(length, int) and length > 1}
    return sorted(reaches)


def length_beyond(reach: int) -> int:
    """Return a text length at which a window of `reach` tokens hides keys, and a block of it stays partly filled."""
    # Add half a window, at most 32 tokens, so that many queries lose keys. The 1 makes the sum odd for windows of 4, 8,
    # 12 … tokens, so that the last block is only partly filled.
    return reach + 1 + min(reach // 2, 32)


def depends_on_batch(config: Any, mask: Tensor | None) -> bool:
    """Return whether the longest text of a batch changes what a model computes for the shorter ones.

    Rotary positions of type "longrope" choose between short and long factors by the longest text of a batch. Rotary
    positions of a "dynamic" type are scaled by the length of that text, if it exceeds a limit. The mask is (text,
    token), 1 or True at real tokens; None = no padding.
    """
    if mask is None:
        return False
    min_length = int(mask.sum(1).min())
    max_length = mask.shape[1]
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", 0)
    # rope_parameters holds the rotary settings, or one dict of them for each type of layer.
    rope = getattr(text_config, "rope_parameters", None) or {}
    all_settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for settings in all_settings:
        rope_type = settings.get("rope_type", "")
        short_limit = settings.get("original_max_position_embeddings", limit)
        if rope_type == "longrope" and min_length <= short_limit < max_length:
            return True
        # Texts of equal length are scaled alike.
        if "dynamic" in rope_type and max_length > max(limit, min_length):
            return True
    return False
