"""What a Hugging Face model is tried on: two random texts, pictures or sounds, and what its forward gets besides."""

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError
from attnscope.models.hf.dispatch import input_device

LENGTHS = (9, 6)
"""Tokens of the two texts that are padded together; the second is also run alone."""
TARGET_LENGTHS = (5, 3)
"""What an encoder-decoder's decoder reads: other lengths than its encoder's tell the kinds of attention apart."""

_MANY_POSITIONS = 512

OWN_INPUTS = "make its inputs yourself: attnscope.load(model, inputs=…, labels=…) in Python"
"""What to do where inputs cannot be made up."""


@dataclass(frozen=True, eq=False)
class Example:
    """Inputs of one forward pass, and which of its positions are real."""

    inputs: dict[str, Any]
    real: Tensor | None = None  # (batch, token), bool, of an encoder-decoder: of the encoder; None = all, or not texts
    target_real: Tensor | None = None  # as real, of the decoder

    def real_rows(self, name: str) -> Tensor | None:
        """Return which rows are no padding, (batch, token), of hidden states or of a kind of attention; None = all."""
        of_target = self.target_real is not None and name.startswith(("hidden", "decoder", "cross"))
        return self.target_real if of_target else self.real


def examples(model: PreTrainedModel) -> tuple[Example, Example]:
    """Two random inputs of different length padded together, and the second of them alone."""
    config = model.config
    name = input_name(model)
    generator = torch.Generator().manual_seed(0)
    if name not in {"input_ids", "decoder_input_ids"} and not accepts(model, "input_ids"):
        shape = _sample_shape(config, name)
        both = torch.randn(2, *shape, generator=generator).to(input_device(model), model.dtype)
        padded, alone = (Example({name: x, **_beside(model, x)}) for x in (both, both[1:]))
        if max(getattr(config, "max_source_positions", 0), _n_patches(config, shape)) > _MANY_POSITIONS:
            # Whisper reads half a minute whatever is said in it: maps of 1500 x 1500, once is enough.
            padded = Example({name: both[1:]})
    else:
        padded, alone = _text_examples(model, "", LENGTHS, generator)
    if config.is_encoder_decoder:
        if not accepts(model, "decoder_input_ids"):
            raise AttnscopeError(
                f"{config.model_type} has a decoder that reads no text, which is not supported", OWN_INPUTS
            )
        target_padded, target_alone = _text_examples(model, "decoder_", TARGET_LENGTHS, generator)
        if len(next(iter(padded.inputs.values()))) == 1:
            target_padded = target_alone
        padded = Example({**padded.inputs, **target_padded.inputs}, padded.real, target_padded.real)
        alone = Example({**alone.inputs, **target_alone.inputs}, alone.real, target_alone.real)
    for example in (padded, alone):
        example.inputs.update(standing_arguments(model))
    return padded, alone


def long_example(model: PreTrainedModel, n_tokens: int) -> Example | None:
    """One random text of about so many tokens; None for models that read none."""
    inputs = examples(model)[1].inputs
    prefixes = [prefix for prefix in ("", "decoder_") if f"{prefix}input_ids" in inputs]
    if not prefixes:
        return None
    real: dict[str, Tensor | None] = {}
    for prefix, length in zip(prefixes, (n_tokens, max(1, n_tokens - 5)), strict=False):
        _, text = _text_examples(model, prefix, (length, length), torch.Generator().manual_seed(n_tokens))
        inputs |= text.inputs
        real[prefix] = text.real
    return Example(inputs, real.get(""), real.get("decoder_"))


def _text_examples(
    model: PreTrainedModel, prefix: str, lengths: tuple[int, int], generator: torch.Generator
) -> tuple[Example, Example]:
    size = vocab_size(model)
    config = model.config.get_text_config()
    named = [*vars(config).items(), *vars(model.config).items()]
    special = {v for name, v in named if name.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    plain = [number for number in range(min(size, 1000)) if number not in special] or [0]
    choices = torch.randint(len(plain), (2, lengths[0]), generator=generator)
    ids = torch.tensor(plain)[choices]
    real = torch.arange(lengths[0])[None] < torch.tensor(lengths)[:, None]
    ids[~real] = pad_id(model)
    ids = ids.to(input_device(model))
    real = real.to(input_device(model))
    names = (f"{prefix}input_ids", f"{prefix}attention_mask")
    padded = Example({**dict(zip(names, (ids, real.long()), strict=True)), **causal_types(model, ids)}, real)
    alone = ids[1:, : lengths[1]]
    return padded, Example({names[0]: alone, **causal_types(model, alone)}, real[1:, : lengths[1]])


def is_paligemma(model: PreTrainedModel) -> bool:
    """Return whether it is PaliGemma, whose prompt is photos and a text without a template, and sees all of itself."""
    return model.config.model_type == "paligemma"


def causal_types(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return what makes PaliGemma read a text as what it writes, each token with those before it alone.

    Without it, its masks say one thing to eager attention and another to sdpa. Its prompts are all of the other type.
    """
    return {"token_type_ids": torch.ones_like(ids)} if is_paligemma(model) else {}


def patch_order(model: PreTrainedModel, pixels: Tensor) -> dict[str, Tensor]:
    """Return what makes an autoencoder (ViT-MAE) read its patches in order, not shuffled; nothing for other models."""
    size = getattr(model.config, "patch_size", None)
    if not accepts(model, "noise") or not isinstance(size, int):
        return {}
    n = (pixels.shape[-2] // size) * (pixels.shape[-1] // size)
    return {"noise": torch.arange(n, device=pixels.device).expand(len(pixels), -1)}


def input_name(model: PreTrainedModel) -> str:
    """Return what a model reads; of towers for pictures that name their language model's input, pixel_values."""
    name = main_input(model)
    return "pixel_values" if not accepts(model, name) and accepts(model, "pixel_values") else name


def main_input(model: PreTrainedModel) -> str:
    """Return what a model's own code calls its main input; the first of several (OneFormer)."""
    name: Any = model.main_input_name
    return str(name if isinstance(name, str) else name[0])


def _beside(model: PreTrainedModel, values: Tensor) -> dict[str, Tensor]:
    """Return what a model must be given beside its main input, (batch, ...); nothing is padded in it."""
    if accepts(model, "noise"):
        return patch_order(model, values)
    whole = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
    if accepts(model, "spatial_shapes"):  # SigLIP 2, whose patches come cut already
        shape = torch.tensor([_GRID], device=values.device).expand(len(values), -1)
        return {"pixel_attention_mask": whole, "spatial_shapes": shape}
    if accepts(model, "past_values_padding"):  # TimesFM; 0 = no padding, and a frequency of 0 = days or finer
        padding = torch.zeros_like(whole)
        return {"past_values_padding": padding} | ({"freq": padding[:, :1]} if accepts(model, "freq") else {})
    if accepts(model, "returns_to_go"):  # Decision Transformer: what it did, what that brought, and when
        times = torch.arange(values.shape[1], device=values.device).expand(len(values), -1)
        actions = values[..., :1].expand(-1, -1, model.config.act_dim)
        return {
            "actions": actions,
            "rewards": values[..., :1],
            "returns_to_go": values[..., 1:2],
            "timesteps": times,
            "attention_mask": whole,
        }
    return {"input_features_mask": whole} if accepts(model, "input_features_mask") else {}


_GRID = (2, 3)

_STEPS = 24
"""Steps of time series, and of what a decision transformer did."""

_FRAMES = 96
"""Hundredths of a second in a spectrogram: more than eight, which encoders of speech make one token of."""


def _sample_shape(config: Any, name: str) -> tuple[int, ...]:
    if name == "pixel_values" and hasattr(config, "num_patches"):
        return _GRID[0] * _GRID[1], getattr(config, "num_channels", 3) * config.patch_size**2
    if name in ("pixel_values", "pixel_values_videos"):
        return _picture_shape(config)
    if name == "past_values":
        channels = (config.num_input_channels,) if hasattr(config, "num_input_channels") else ()
        return min(config.context_length, _MANY_POSITIONS), *channels
    if name == "states":
        return _STEPS, config.state_dim
    if name == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    if name == "input_features" and hasattr(config, "feature_projection_input_dim"):
        return 12, config.feature_projection_input_dim  # w2v-BERT: frames of a spectrogram, two by two
    if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "frequency_stride"):
        return config.max_length, config.num_mel_bins  # AST: a whole spectrogram
    if name == "input_values":
        return (4000,)
    inner = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    bands = getattr(inner, "num_mel_bins", None) or getattr(inner, "input_feat_per_channel", None)
    if name == "input_features" and bands and inner.model_type in _BANDS_FIRST:
        return bands, 2 * inner.max_position_embeddings
    if name == "input_features" and bands:
        return _FRAMES, bands * getattr(inner, "input_channels", 1)
    raise AttnscopeError(
        f"{config.model_type} reads {name}, which attnscope cannot make up for its self-check", OWN_INPUTS
    )


_BANDS_FIRST = ("glmasr_encoder", "voxtral_realtime_encoder")


def _picture_shape(config: Any) -> tuple[int, ...]:
    """(colour, height, width) of a picture, of a video (frame, colour, height, width)."""
    inner = config if hasattr(config, "image_size") else getattr(config, "vision_config", config)
    size = getattr(inner, "image_size", None) or getattr(inner, "crop_size", 32)
    if ratios := getattr(inner, "scaled_images_ratios", None):  # Depth Pro: its smallest copy of a picture is one patch
        size = round(inner.patch_size / min(ratios))
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    frames = getattr(inner, "num_frames", None) or getattr(inner, "frames_per_clip", None)
    colours: Any = getattr(inner, "num_channels", None) or getattr(inner, "in_chans", 3)
    return (colours, height, width) if frames is None else (frames, colours, height, width)


def _n_patches(config: Any, shape: tuple[int, ...]) -> int:
    size = getattr(config, "patch_size", None)
    return (shape[-1] // size) * (shape[-2] // size) if isinstance(size, int) and len(shape) == 3 else 0


def standing_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Return what every forward pass gets: no storing of keys and values for a next token, and outputs by name."""
    return {name: value for name, value in (("use_cache", False), ("return_dict", True)) if accepts(model, name)}


def vocab_size(model: PreTrainedModel) -> int:
    """Return how many token numbers a model has."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        table: Any = model.get_input_embeddings()
        return int(table.weight.shape[0])
    with contextlib.suppress(AttributeError):
        return int(model.config.get_text_config().vocab_size)
    return 0x110000  # CANINE hashes characters: any will do


def pad_id(model: PreTrainedModel) -> int:
    """Return what stands at places that are no token; 0 where the configuration names none."""
    number = getattr(model.config.get_text_config(), "pad_token_id", None)
    return number if isinstance(number, int) and 0 <= number < vocab_size(model) else 0


def setting(config: Any, name: str) -> Any:
    """Return what a configuration says of a name; None where it says nothing, or another thing of each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to give one answer where layers differ
        layers = getattr(config, "per_layer_config", None) or {}
        values = {getattr(layer, name, None) for layer in (layers.values() if isinstance(layers, dict) else layers)}
        return next(iter(values)) if len(values) == 1 else None


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Return whether a model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def position_table(model: nn.Module) -> nn.Embedding | None:
    """Return the table of learned positions, None if positions are not looked up."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe") and "relative" not in last:
            return module
    return None


def max_tokens(model: PreTrainedModel) -> int | None:
    """Return the longest text a model takes, in tokens; None where there is no limit."""
    config = model.config.get_text_config()
    table = position_table(model)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    limits = (getattr(config, name, None) for name in names)
    limit = next((number for number in limits if isinstance(number, int)), None)
    if limit is None or limit < 1:
        return None
    if table is None and any("relative" in name for name, _ in model.named_modules()):
        return None
    # RoBERTa's positions start behind the number of the padding token.
    if table is not None and table.padding_idx is not None and table.num_embeddings == limit:
        return limit - table.padding_idx - 1
    return limit


def ask_for_hidden_states(*inputs: Example) -> None:
    """Have a model give out its hidden states on these inputs."""
    for example in inputs:
        example.inputs["output_hidden_states"] = True


def extras_of(example: Example) -> dict[str, Any]:
    """Return what the forward must be given besides the inputs."""
    return {name: example.inputs[name] for name in ("output_hidden_states",) if name in example.inputs}
