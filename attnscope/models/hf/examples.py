"""Make up inputs to check a Hugging Face model on: random texts, pictures or sounds, and the lengths of texts.

Windows, chunks and rotary factors that a configuration names are lengths from which on a model may compute otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError
from attnscope.models.devices import input_device
from attnscope.models.hf.parts import (
    accepts,
    causal_types,
    input_name,
    pad_id,
    patch_order,
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
_GRID = (2, 3)

_STEPS = 24
"""Steps of what a decision transformer did."""

_FRAMES = 96
"""Hundredths of a second in a spectrogram: more than eight, which encoders of speech make one token of."""


@dataclass(frozen=True, eq=False)
class Example:
    """Inputs of one forward pass, and which of its positions are real."""

    inputs: dict[str, Any]
    real: Tensor | None = (
        None  # (batch, token), bool, of an encoder-decoder: of the encoder; None = all, or not texts
    )
    target_real: Tensor | None = None  # as real, of the decoder

    @property
    def batch_size(self) -> int:
        """Return how many texts, pictures or sounds it holds."""
        return len(next(iter(self.inputs.values())))

    def real_rows(self, name: str) -> Tensor | None:
        """Return which rows are no padding, (batch, token), of hidden states or of a kind of attention; None = all."""
        is_target = self.target_real is not None and name.startswith(("hidden", "decoder", "cross"))
        return self.target_real if is_target else self.real


def examples(model: PreTrainedModel, n_tokens: int | None = None) -> tuple[Example, Example]:
    """Return two random inputs of different length padded together, and the second of them alone.

    Texts and targets are all of `n_tokens` where it is given.

    Raises:
        AttnscopeError: Inputs of the model's kind cannot be made up.
    """
    config = model.config
    name = input_name(model)
    generator = torch.Generator().manual_seed(0)
    lengths = LENGTHS if n_tokens is None else (n_tokens, n_tokens)
    target_lengths = TARGET_LENGTHS if n_tokens is None else lengths
    if name in ("input_ids", "decoder_input_ids") or accepts(model, "input_ids"):
        padded, alone = _text_examples(model, "", lengths, generator)
    else:
        shape = _sample_shape(config, name)
        both = torch.randn(2, *shape, generator=generator).to(input_device(model), model.dtype)
        padded, alone = (
            Example({name: values, **_beside(model, values)}) for values in (both, both[1:])
        )
        # Whisper reads half a minute whatever is said in it: maps of 1500 x 1500, once is enough.
        n_positions = getattr(config, "max_source_positions", 0)
        patch_size = getattr(config, "patch_size", None)
        if len(shape) == 3 and isinstance(patch_size, int):
            n_positions = (shape[-1] // patch_size) * (shape[-2] // patch_size)
        if n_positions > _MANY_POSITIONS:
            padded = alone
    if config.is_encoder_decoder:
        if not accepts(model, "decoder_input_ids"):
            message = f"{config.model_type} has a decoder that reads no text, which is not supported"
            raise AttnscopeError(message, OWN_INPUTS)
        # An encoder-decoder also needs a target, of lengths that differ from the text's.
        target_padded, target_alone = _text_examples(model, "decoder_", target_lengths, generator)
        if padded.batch_size == 1:
            target_padded = target_alone
        padded = _with_target(padded, target_padded)
        alone = _with_target(alone, target_alone)
    for example in (padded, alone):
        example.inputs.update(standing_arguments(model))
    return padded, alone


def _with_target(source: Example, target: Example) -> Example:
    return Example({**source.inputs, **target.inputs}, source.real, target.real)


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Return the settings of a configuration, by name, those of its language model first."""
    return [*vars(config.get_text_config()).items(), *vars(config).items()]


def _text_examples(
    model: PreTrainedModel, prefix: str, lengths: tuple[int, int], generator: torch.Generator
) -> tuple[Example, Example]:
    # Token numbers without a meaning of their own.
    special = {
        v
        for name, v in _settings(model.config)
        if name.endswith(("_token_id", "_token_index")) and isinstance(v, int)
    }
    plain = [number for number in range(min(vocab_size(model), 1000)) if number not in special] or [0]

    # Two rows, (2, token), of which the second is padded.
    choices = torch.randint(len(plain), (2, lengths[0]), generator=generator)
    real = torch.arange(lengths[0])[None] < torch.tensor(lengths)[:, None]
    ids = torch.tensor(plain)[choices].masked_fill(~real, pad_id(model)).to(input_device(model))
    real = real.to(ids.device)
    alone = ids[1:, : lengths[1]]
    ids_name = f"{prefix}input_ids"
    inputs = {ids_name: ids, f"{prefix}attention_mask": real.long(), **causal_types(model, ids)}
    return Example(inputs, real), Example(
        {ids_name: alone, **causal_types(model, alone)}, real[1:, : lengths[1]]
    )


# What is no text --------------------------------------------------------------------------------------------------


def _beside(model: PreTrainedModel, values: Tensor) -> dict[str, Tensor]:
    """Return the arguments that a model needs beside its main input, (batch, ...), without padding."""
    if accepts(model, "noise"):
        return patch_order(model, values)
    whole = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
    if accepts(model, "spatial_shapes"):  # SigLIP 2, whose patches come cut already
        shape = torch.tensor([_GRID], device=values.device).expand(len(values), -1)
        return {"pixel_attention_mask": whole, "spatial_shapes": shape}
    if accepts(model, "returns_to_go"):  # Decision Transformer: what it did, what that brought, and when
        return {
            "actions": values[..., :1].expand(-1, -1, model.config.act_dim),
            "rewards": values[..., :1],
            "returns_to_go": values[..., 1:2],
            "timesteps": torch.arange(values.shape[1], device=values.device).expand(len(values), -1),
            "attention_mask": whole,
        }
    if accepts(model, "past_values_padding"):  # TimesFM: no padding, and a frequency of days or finer
        padding = torch.zeros_like(whole)
        return {"past_values_padding": padding} | (
            {"freq": padding[:, :1]} if accepts(model, "freq") else {}
        )
    return {"input_features_mask": whole} if accepts(model, "input_features_mask") else {}


def _sample_shape(config: Any, name: str) -> tuple[int, ...]:
    """Return the shape of one picture, video, recording or series, without the batch."""
    # Sizes may stand in the configuration of the part that hears.
    inner: Any = (
        getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    )
    bands: Any = getattr(inner, "num_mel_bins", None) or getattr(inner, "input_feat_per_channel", None)
    match name:
        case "pixel_values" if hasattr(config, "num_patches"):
            return _GRID[0] * _GRID[1], getattr(config, "num_channels", 3) * config.patch_size**2
        case "pixel_values" | "pixel_values_videos":
            inner = config if hasattr(config, "image_size") else getattr(config, "vision_config", config)
            size = getattr(inner, "image_size", None) or 32
            height, width = size if isinstance(size, (tuple, list)) else (size, size)
            picture = (getattr(inner, "num_channels", 3), height, width)
            frames = getattr(inner, "num_frames", None)  # of a video
            return picture if frames is None else (frames, *picture)
        case "past_values":
            channels = (config.num_input_channels,) if hasattr(config, "num_input_channels") else ()
            return min(config.context_length, _MANY_POSITIONS), *channels
        case "states":
            return _STEPS, config.state_dim
        case "input_values":  # of AST a whole spectrogram
            return (
                (config.max_length, config.num_mel_bins)
                if hasattr(config, "frequency_stride")
                else (4000,)
            )
        case "input_features" if hasattr(config, "num_mel_bins") and hasattr(
            config, "max_source_positions"
        ):
            return bands, 2 * config.max_source_positions
        case "input_features" if hasattr(config, "feature_projection_input_dim"):
            # w2v-BERT: frames of a spectrogram, two by two.
            return 12, config.feature_projection_input_dim
        case "input_features" if bands and inner.model_type in (
            "glmasr_encoder",
            "voxtral_realtime_encoder",
        ):
            return bands, 2 * inner.max_position_embeddings
        case "input_features" if bands:
            return _FRAMES, bands * getattr(inner, "input_channels", 1) * getattr(
                inner, "num_stacked_frames", 1
            )
    raise AttnscopeError(
        f"{config.model_type} reads {name}, which attnscope cannot make up for its self-check",
        OWN_INPUTS,
    )


# Lengths ----------------------------------------------------------------------------------------------------------

_REACH = re.compile(
    r"(window|window_size|chunk_size|chunk_length|block_size|local_attention|local_radius|index_top_?k"
    r"|original_max_position_embeddings)$"
)
_ELSEWHERE = re.compile(r"mamba|ssm|linear|feed_forward|vision|image|video|audio|speech|conv|n_window")


def reaches(config: Any) -> list[int]:
    """Return the windows, chunks and blocks that a configuration names, in tokens, sorted."""
    settings = _settings(config)
    for name, value in list(settings):
        if isinstance(value, dict) and "rope" in name:
            settings += value.items()
    lengths: set[int] = set()
    for name, value in settings:
        if _REACH.search(str(name)) and not _ELSEWHERE.search(str(name)):
            values = value if isinstance(value, list | tuple) else [value]
            lengths |= {number for number in values if isinstance(number, int) and number > 1}
    return sorted(lengths)


def count_tokens(inputs: Mapping[str, Any]) -> int:
    """Return the tokens of the longest text of a forward's arguments; 0 without a text."""
    return max(
        (inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs),
        default=0,
    )


def length_beyond(reach: int) -> int:
    """Return a length at which some queries see past a window, and that is no multiple of a block."""
    return reach + 1 + min(reach // 2, 32)


def mixes_lengths(config: Any, mask: Tensor | None) -> bool:
    """Return whether padding changes what a model computes for a text of a batch.

    Rotary positions by longrope have long and short factors, chosen by the longest text of a batch; dynamic ones are
    scaled by its length beyond a limit. The mask is (text, token), 1 or True at real tokens.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if mask is None:
        return False
    shortest = int(mask.sum(1).min())
    longest = mask.shape[1]
    limit = getattr(text, "max_position_embeddings", 0)
    # Some models have several rotary settings, by kind of layer.
    for settings in [rope] if "rope_type" in rope else rope.values():
        kind = settings.get("rope_type", "") if isinstance(settings, dict) else ""
        if (
            kind == "longrope"
            and shortest <= settings.get("original_max_position_embeddings", limit) < longest
        ):
            return True
        if "dynamic" in kind and longest > max(limit, shortest):
            return True
    return False
