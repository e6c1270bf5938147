"""Find out about a transformers model from its code and configuration: its inputs, sizes, parts and adapters.

attnscope shows the *base* model, without the task head, such as the layers that predict tokens. A *tower* is a complete
transformer within a model. CLIP has a text tower and a vision tower, which do not attend to each other: here they are
two models. `translate_errors` turns errors of a model's own code into one line.
"""

import contextlib
import importlib.util
import inspect
import logging
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from attnscope.errors import AttnscopeError, as_failure, first_line, is_out_of_memory
from attnscope.models.files import file_sha256
from attnscope.models.hf.tokenizer import WordlessTokenizer

# Forward passes -------------------------------------------------------------------------------------------------


def forward_accepts(model: PreTrainedModel, name: str) -> bool:
    """Return whether a model's forward has an argument with this name."""
    return name in inspect.signature(model.forward).parameters


def fixed_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments that every forward pass gets: no KV cache, and outputs by name instead of in a tuple."""
    arguments = {"use_cache": False, "return_dict": True}
    return {name: value for name, value in arguments.items() if forward_accepts(model, name)}


def count_tokens(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens of the longest text among a forward's arguments; 0 without a text."""
    return max(
        (inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs),
        default=0,
    )


def main_input(model: PreTrainedModel) -> str:
    """Return the name of a model's main input, such as "input_ids"; for several (OneFormer) the first one."""
    name: Any = model.main_input_name
    return str(name if isinstance(name, str) else name[0])


def input_name(model: PreTrainedModel) -> str:
    """Return the name of the main input that a model's forward really takes.

    Some vision towers (CLIP's) declare "input_ids", the main input of the whole model. They take "pixel_values".
    """
    name = main_input(model)
    if forward_accepts(model, name) or not forward_accepts(model, "pixel_values"):
        return name
    return "pixel_values"


def causal_token_types(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return the argument that gives PaliGemma causal attention on a text, (batch, token); {} for other models.

    PaliGemma's tokens of type 1 attend causally. Without token types, its masks for eager attention differ from its
    masks for sdpa. Beside a picture, the tokens of a prompt have type 0: they attend to later tokens too.
    """
    if model.config.model_type != "paligemma":
        return {}
    return {"token_type_ids": torch.ones_like(ids)}


def patch_order_noise(model: PreTrainedModel, pixels: Tensor) -> dict[str, Tensor]:
    """Return the argument `noise`, (batch, patch), that keeps the patches of ViT-MAE in order; {} for other models.

    ViT-MAE sorts patches by this noise, by default random, and masks the last ones. `pixels` are (batch, channel,
    height, width).
    """
    size_px = getattr(model.config, "patch_size", None)
    if not (forward_accepts(model, "noise") and isinstance(size_px, int)):
        return {}
    n_patches = (pixels.shape[-2] // size_px) * (pixels.shape[-1] // size_px)
    return {"noise": torch.arange(n_patches, device=pixels.device).expand(len(pixels), -1)}


def hidden_states(output: Any) -> Tensor | None:
    """Return the last hidden states in a model's output, (batch, token, d_model); None if there are none.

    For an encoder-decoder, return the hidden states of the decoder.
    """
    for name in ("last_hidden_state", "decoder_hidden_states", "hidden_states"):
        # A tensor, or a tuple with one tensor per layer
        states = getattr(output, name, None)
        if states is not None and len(states):
            return states if isinstance(states, Tensor) else states[-1]
    return None


# Sizes ----------------------------------------------------------------------------------------------------------


def first_setting(config: Any, *names: str) -> Any:
    """Return the value of the first of these settings that is not missing, 0 or empty; None if all are.

    A setting that differs between layers counts as missing.
    """
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            # transformers raises this if the setting may differ between layers (Gemma 4). Compare the layers' values.
            layers = getattr(config, "per_layer_config", None) or ()
            values = {getattr(layer, name, None) for layer in layers}
            value = values.pop() if len(values) == 1 else None
        if value:
            return value
    return None


def as_list(value: Any) -> list[Any]:
    """Return the values of a setting that may be a list or a single value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def vocab_size(model: PreTrainedModel) -> int:
    """Return the size of a model's vocabulary, in tokens."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        table: Any = model.get_input_embeddings()
        return int(table.weight.shape[0])
    # CANINE has no vocabulary: it hashes characters, of which Unicode has 0x110000.
    return getattr(model.config.get_text_config(), "vocab_size", 0x110000)


def pad_token_id(model: PreTrainedModel) -> int:
    """Return the id of the padding token; 0 where the configuration names none, or one outside the vocabulary."""
    token_id = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(token_id, int) and 0 <= token_id < vocab_size(model):
        return token_id
    return 0


def position_table(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding of absolute positions; None if a model has none, as with rotary or relative positions."""
    for name, module in model.named_modules():
        # "embeddings.position_embeddings" -> "position_embeddings"; GPT-2 calls it "wpe".
        own_name = name.rpartition(".")[2]
        is_absolute = ("position" in own_name and "relative" not in own_name) or own_name == "wpe"
        if is_absolute and isinstance(module, nn.Embedding):
            return module
    return None


def max_tokens(model: PreTrainedModel) -> int | None:
    """Return the length of the longest text that a model takes, in tokens; None = no limit."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    limit = first_setting(model.config.get_text_config(), *names)
    # Relative positions have no limit, whatever the configuration says.
    table = position_table(model)
    is_relative = table is None and any("relative" in name for name, _ in model.named_modules())
    if not isinstance(limit, int) or limit < 1 or is_relative:
        return None
    # RoBERTa numbers positions from padding_idx + 1 on, so the first padding_idx + 1 rows of its table are unused.
    if table is not None and table.padding_idx is not None and table.num_embeddings == limit:
        return limit - table.padding_idx - 1
    return limit


# Parts ----------------------------------------------------------------------------------------------------------


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without the head for its task."""
    inner = model.base_model
    if not isinstance(inner, PreTrainedModel):
        return model
    # DINOv3 declares its stack of layers as the base model, but the stack takes no pictures.
    inner_is_stack = forward_accepts(model, main_input(model)) and not forward_accepts(
        inner, main_input(inner)
    )
    base = model if inner_is_stack else inner
    # UMT5EncoderModel has the configuration of an encoder-decoder, though it has no decoder. Its encoder has its own.
    if (
        base.config.is_encoder_decoder
        and reads_text(base)
        and not forward_accepts(base, "decoder_input_ids")
    ):
        encoder = getattr(base, "encoder", None)
        return encoder if isinstance(encoder, PreTrainedModel) else base
    return base


def reads_text(base: PreTrainedModel) -> bool:
    """Return whether a model takes token ids."""
    return forward_accepts(base, "input_ids")


def reads_or_writes_text(base: PreTrainedModel) -> bool:
    """Return whether a model or its decoder takes token ids."""
    return reads_text(base) or forward_accepts(base, "decoder_input_ids")


def sees_pictures_only(base: PreTrainedModel) -> bool:
    """Return whether a model reads pictures and no text."""
    return (
        input_name(base) == "pixel_values"
        and not reads_text(base)
        and not base.config.is_encoder_decoder
    )


def reads_pictures_in_text(base: PreTrainedModel) -> bool:
    """Return whether a model's language model reads pictures among the tokens of its text, as LLaVA's does."""
    is_decoder = reads_text(base) and not base.config.is_encoder_decoder
    return is_decoder and forward_accepts(base, "pixel_values") and picture_tower(base) is None


def has_audio_window(base: PreTrainedModel) -> bool:
    """Return whether a model reads audio like Whisper: in a fixed window, by two convolutions before the encoder."""
    encoder = getattr(base, "encoder", None)
    has_convolutions = hasattr(encoder, "conv2")
    is_encoder_decoder = bool(base.config.is_encoder_decoder)
    return base.main_input_name == "input_features" and is_encoder_decoder and has_convolutions


def takes_audio(base: PreTrainedModel) -> bool:
    """Return whether a model takes recordings: in a fixed window (Whisper), or of any length (wav2vec 2.0, HuBERT)."""
    # Audio samples go through strided convolutions. Spectrogram models such as AST have no conv_stride.
    takes_samples = base.main_input_name == "input_values" and hasattr(base.config, "conv_stride")
    return has_audio_window(base) or (takes_samples and not base.config.is_encoder_decoder)


def make_wordless_tokenizer(name: str, base: PreTrainedModel) -> WordlessTokenizer:
    """Return a placeholder for the tokenizer of a model that reads no text: it raises an error on any text.

    `name` is the model's name in the error.
    """
    if input_name(base) == "pixel_values" and not reads_or_writes_text(base):
        reason = "sees pictures, and reads no text"
        hint = "attnscope heatmap --image photo.png"
    elif takes_audio(base):
        reason = "hears recordings, and reads no text"
        hint = "attnscope heatmap --audio speech.wav"
    else:
        reason = f"reads {main_input(base)}, and no text"
        hint = "models of text, pictures and sound can be shown"
    return WordlessTokenizer(f"{name} {reason}", hint)


def text_tower(base: PreTrainedModel) -> PreTrainedModel | None:
    """Return the text tower of a model that has a vision tower too (CLIP); None for other models."""
    tower = getattr(base, "text_model", None)
    if not isinstance(tower, PreTrainedModel) or picture_tower(base) is None:
        return None
    tower = base_of(tower)
    return tower if reads_text(tower) else None


def picture_tower(base: PreTrainedModel) -> PreTrainedModel | None:
    """Return a vision tower that can be shown alone; None for other models.

    The model has a text tower too (CLIP), or a decoder that writes about pictures (TrOCR). Models that read pictures
    among the tokens of a text (LLaVA) are not split.
    """
    tower: Any = None
    # Next to a text tower. SmolVLM names its parts like CLIP, but it reads pictures among the tokens, like LLaVA.
    if hasattr(base, "text_model") and getattr(base.config, "image_token_id", None) is None:
        tower = getattr(base, "vision_model", None)
    # Before a decoder.
    if tower is None and base.config.is_encoder_decoder and base.main_input_name == "pixel_values":
        tower = getattr(base, "encoder", None)
    if not isinstance(tower, PreTrainedModel):
        return None
    tower = base_of(tower)
    return tower if sees_pictures_only(tower) else None


def collect_configs(*configs: Any) -> list[Any]:
    """Return configurations and the nested configurations of parts of the model, such as its vision tower, each once.

    Configurations that name no attention implementation are left out.
    """
    config_by_id: dict[int, Any] = {}
    pending = list(configs)
    while pending:
        config = pending.pop()
        # The configuration of a part that the model lacks is None, and fails the second test.
        if id(config) in config_by_id or not hasattr(config, "_attn_implementation_internal"):
            continue
        config_by_id[id(config)] = config
        pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(config_by_id.values())


def describe_quantisation(config: Any) -> str:
    """Return how the weights are quantised, by the configuration, such as "quantised (gptq)"; "" if they are not."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = settings.get("quant_method") or "by a method not named"
    # The method is a string, or an enum of strings.
    return f"quantised ({getattr(method, 'value', method)})"


def notes_on_quantisation(config: Any) -> tuple[str, ...]:
    """Return a note for the user if a configuration says that weights are quantised; () otherwise."""
    finding = describe_quantisation(config)
    if not finding:
        return ()
    return (
        f"Its configuration says that its weights are {finding}: the maps show the weights as loaded.",
    )


# Adapters -------------------------------------------------------------------------------------------------------

_ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
"""The prefix of the names of all weights in a peft file."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of peft, such as LoRA, that is part of a model.

    An adapter from files is merged into the model's weights. An adapter that is active in a model in memory is not.

    Attributes:
        name: The name of its folder, or its name in peft; "" = there is no adapter.
        sha256: The hash of its weights; "" = it is not from files.
        note: A sentence for the user on how it was applied.
    """

    name: str = ""
    sha256: str = ""
    note: str = ""


def require_loadable_adapter(folder: Path) -> None:
    """Refuse an adapter if peft or its weights are missing. Without the adapter, another model would be shown."""
    if not importlib.util.find_spec("peft"):
        raise AttnscopeError(
            f"{folder} holds an adapter, which needs the package peft",
            'install the extra: pip install "attnscope[peft]", or move adapter_config.json away to see the base alone',
        )
    if not (folder / _ADAPTER_WEIGHTS_FILE).is_file():
        raise AttnscopeError(
            f"{folder} holds no {_ADAPTER_WEIGHTS_FILE}",
            "save the adapter there with peft, as safetensors",
        )


def merge_adapter(model: PreTrainedModel, folder: Path) -> Adapter:
    """Merge the adapter in a folder into a model's weights, and return facts about it.

    If the adapter was trained on a model with a task head that is not loaded here, it is merged into the base model
    without its weights for the head.

    Raises:
        AttnscopeError: The adapter does not fit the model, or changes more than weights.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    path = folder / _ADAPTER_WEIGHTS_FILE
    dropped_parts: set[str] = set()
    with as_failure(f"the adapter in {folder} does not fit the model", "name the model it was made for"):
        weights = load_file(path)
        config: Any = PeftConfig.from_pretrained(str(folder))
        _require_no_virtual_tokens(config, folder.name)

        # Names of weights are base_model.model.MODULE…, or, of a model with a head, base_model.model.BASE.MODULE….
        target: Any = model
        top_modules = {name.removeprefix(_PEFT_PREFIX).partition(".")[0] for name in weights}
        if not top_modules <= model._modules.keys():
            target = model.base_model
            prefix = f"{_PEFT_PREFIX}{target.base_model_prefix}."
            base_weights = {
                _PEFT_PREFIX + name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            if base_weights:
                dropped_parts = top_modules - {target.base_model_prefix}
                weights = base_weights

        # Let peft adapt this target, without the parts of a head that is not loaded.
        config.task_type = None
        config.inference_mode = True
        module_names = {name.rpartition(".")[2] for name, _ in target.named_modules()}
        saved_names = config.modules_to_save or ()
        config.modules_to_save = [name for name in saved_names if name in module_names] or None
        peft_model = PeftModel(target, config, autocast_adapter_dtype=False)
        # Names of weights must agree both ways: peft ignores unknown ones, and keeps initial values of missing ones.
        unmatched = sorted(get_peft_model_state_dict(peft_model).keys() ^ weights.keys())
        if unmatched:
            raise ValueError(
                f"{len(unmatched)} of its weights have no counterpart, such as {unmatched[0]}"
            )
        set_peft_model_state_dict(peft_model, weights)
        peft_model.merge_and_unload(safe_merge=True)
    sha256 = file_sha256(path)
    note = f"Adapter {folder.name} (sha256 {sha256[:12]}) is merged in"
    if dropped_parts:
        note += (
            f"; its {', '.join(sorted(dropped_parts))} is left out, for attention does not depend on it"
        )
    return Adapter(folder.name, sha256, f"{note}.")


def unwrap_peft(model: Any) -> tuple[Any, Adapter]:
    """Return a model in memory without peft's wrapper, if it has one, and facts about its active adapters."""
    # Find peft's wrapper, or a subclass of it, without importing peft.
    if any(parent.__module__.partition(".")[0] == "peft" for parent in type(model).__mro__):
        for name in model.active_adapters:
            _require_no_virtual_tokens(model.peft_config[name], name)
        model = model.get_base_model()
    modules = model.modules() if isinstance(model, nn.Module) else ()
    # peft's layers have this attribute.
    adapted_modules: list[Any] = [module for module in modules if hasattr(module, "merged_adapters")]
    if not adapted_modules:
        return model, Adapter()
    # A merged adapter is part of the weights. Any other adapter counts only if it is switched on.
    names: set[str] = set()
    for module in adapted_modules:
        names.update(module.merged_adapters)
        if not module.disable_adapters:
            names.update(module.active_adapters)
    name = "+".join(sorted(names))
    note = "The model's adapters are switched off: this is the base."
    if name:
        note = f"Adapter {name} is active."
    return model, Adapter(name, note=note)


def _require_no_virtual_tokens(config: Any, name: str) -> None:
    """Refuse an adapter that adds virtual tokens (prompt tuning, prefix tuning) instead of changing weights."""
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise AttnscopeError(
            f"adapter {name} adds tokens that are no text, so that no map of a text holds all its attention",
            "adapters that change weights, such as LoRA, can be shown",
        )


# Failures -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def translate_errors(name: str, failure: str = "does not run", hint: str = "") -> Iterator[None]:
    """Turn errors of a model's own code within the context into an AttnscopeError, one line. Other errors pass through.

    Args:
        name: The model's name in the message.
        failure: What fails, as a predicate, such as "cannot be read".
        hint: What the user can do about it.
    """
    try:
        yield
    except AttnscopeError:
        raise
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error) or _is_attnscope_error(error):
            raise
        raise AttnscopeError(
            f"{name} {failure}: its own code says {type(error).__name__}: {first_line(error)}", hint
        ) from error


def _is_attnscope_error(error: BaseException) -> bool:
    """Return whether attnscope's code (or a probe) raised an error, and not the code of the model.

    An error in torch belongs to the function that called torch. An error in attnscope's call of the model's forward,
    such as for an argument that the model does not take, belongs to the model.
    """
    # Find the innermost frame outside of torch.
    module = ""
    function = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        frame_module = str(frame.f_globals.get("__name__", ""))
        if frame_module.partition(".")[0] != "torch":
            module = frame_module
            function = frame.f_code.co_name
    # These three functions, of `hf.seam` and `hf.eager`, call a model's forward.
    calls_the_model = module.startswith("attnscope.") and function in (
        "_forward",
        "run_eager",
        "run_for_weights",
    )
    return not (module.startswith("transformers") or calls_the_model)


_silence_lock = threading.RLock()


@contextlib.contextmanager
def mute_transformers() -> Iterator[None]:
    """Keep transformers from writing to the terminal. Its switches are global, so one thread at a time may do this."""
    with _silence_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity = transformers_logging.get_verbosity()
        has_progress_bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.CRITICAL + 1)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if has_progress_bars:
                transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
