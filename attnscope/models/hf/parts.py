"""Read transformers' models by their code and configuration: the part to show, its inputs, and its longest text.

Heads for tasks are left off. Two towers of which neither attends to the other, such as CLIP's of text and of pictures,
are two models here. What fails in a model's own code becomes one line.
"""

import contextlib
import importlib.util
import inspect
import logging
import threading
import traceback
import warnings
from collections.abc import Iterator
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


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Return whether a model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def standing_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments of every forward pass: no cache of keys and values, and outputs by name."""
    wanted = {"use_cache": False, "return_dict": True}
    return {name: value for name, value in wanted.items() if accepts(model, name)}


def main_input(model: PreTrainedModel) -> str:
    """Return the name of a model's main input, the first of several (OneFormer)."""
    name: Any = model.main_input_name
    return str(name if isinstance(name, str) else name[0])


def input_name(model: PreTrainedModel) -> str:
    """Return the name of the input that a model takes.

    That is pixel_values for vision towers whose main input is said to be their language model's.
    """
    name = main_input(model)
    if accepts(model, name) or not accepts(model, "pixel_values"):
        return name
    return "pixel_values"


def causal_types(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return the token types with which PaliGemma reads a text causally, (batch, token); {} for other models.

    Without them, its masks say one thing to eager attention and another to sdpa. Its prompts beside pictures are all of
    the other type.
    """
    return {"token_type_ids": torch.ones_like(ids)} if is_paligemma(model) else {}


def is_paligemma(model: PreTrainedModel) -> bool:
    """Return whether a model is PaliGemma: its prompts have no template, and their tokens all see each other."""
    return model.config.model_type == "paligemma"


def patch_order(model: PreTrainedModel, pixels: Tensor) -> dict[str, Tensor]:
    """Return the noise that keeps an autoencoder's (ViT-MAE) patches in order, (batch, patch); {} for other models."""
    size = getattr(model.config, "patch_size", None)
    if not (accepts(model, "noise") and isinstance(size, int)):
        return {}
    # An autoencoder sorts patches by this noise, and hides the last ones.
    n_patches = (pixels.shape[-2] // size) * (pixels.shape[-1] // size)
    return {"noise": torch.arange(n_patches, device=pixels.device).expand(len(pixels), -1)}


def hidden_states(output: Any) -> Tensor | None:
    """Return the last hidden states of an output, of an encoder-decoder the decoder's; None if it carries none."""
    for name in ("last_hidden_state", "decoder_hidden_states", "hidden_states"):
        # One tensor, or a tuple of those of all layers.
        states = getattr(output, name, None)
        if states is not None and len(states):
            return states if isinstance(states, Tensor) else states[-1]
    return None


# Sizes ----------------------------------------------------------------------------------------------------------


def setting(config: Any, *names: str) -> Any:
    """Return the first of these settings that a configuration has and that is not 0 or empty; None where none is.

    One that differs between layers counts as none.
    """
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers refuses to give one answer where layers differ
            layers = getattr(config, "per_layer_config", None) or ()
            values = {getattr(layer, name, None) for layer in layers}
            value = values.pop() if len(values) == 1 else None
        if value:
            return value
    return None


def as_list(value: Any) -> list[Any]:
    """Return the values of a setting that may be one or several."""
    return list(value) if isinstance(value, list | tuple) else [value]


def vocab_size(model: PreTrainedModel) -> int:
    """Return the size of a model's vocabulary, in tokens."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        table: Any = model.get_input_embeddings()
        return int(table.weight.shape[0])
    # CANINE hashes characters: any will do.
    return getattr(model.config.get_text_config(), "vocab_size", 0x110000)


def pad_id(model: PreTrainedModel) -> int:
    """Return the number of the padding token; 0 where the configuration names none."""
    number = getattr(model.config.get_text_config(), "pad_token_id", None)
    return number if isinstance(number, int) and 0 <= number < vocab_size(model) else 0


def position_table(model: nn.Module) -> nn.Embedding | None:
    """Return the table of learned positions; None if positions are not looked up."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_of_positions = ("position" in last and "relative" not in last) or last == "wpe"
        if is_of_positions and isinstance(module, nn.Embedding):
            return module
    return None


def max_tokens(model: PreTrainedModel) -> int | None:
    """Return the longest text a model takes, in tokens; None where there is no limit."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    limit = setting(model.config.get_text_config(), *names)
    # Relative positions have no limit, whatever the configuration says.
    table = position_table(model)
    is_relative = table is None and any("relative" in name for name, _ in model.named_modules())
    if not isinstance(limit, int) or limit < 1 or is_relative:
        return None
    # RoBERTa's positions start behind the number of the padding token.
    if table is not None and table.padding_idx is not None and table.num_embeddings == limit:
        return limit - table.padding_idx - 1
    return limit


# Parts ----------------------------------------------------------------------------------------------------------


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without the head for its task."""
    inner = model.base_model
    if not isinstance(inner, PreTrainedModel):
        return model
    # DINOv3's stack of layers has the name that a base model has elsewhere, but takes no pictures.
    is_stack = accepts(model, main_input(model)) and not accepts(inner, main_input(inner))
    base = model if is_stack else inner
    if base.config.is_encoder_decoder and reads_text(base) and not accepts(base, "decoder_input_ids"):
        # UMT5EncoderModel keeps the configuration of the whole; its encoder has one of its own.
        encoder = getattr(base, "encoder", None)
        return encoder if isinstance(encoder, PreTrainedModel) else base
    return base


def reads_text(base: PreTrainedModel) -> bool:
    """Return whether a model takes token numbers."""
    return accepts(base, "input_ids")


def reads_or_writes_text(base: PreTrainedModel) -> bool:
    """Return whether a model takes token numbers, if only in its decoder."""
    return reads_text(base) or accepts(base, "decoder_input_ids")


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
    return is_decoder and accepts(base, "pixel_values") and picture_tower(base) is None


def hears_windows(base: PreTrainedModel) -> bool:
    """Return whether a model listens as Whisper does.

    Its encoder hears a window of fixed length, and a decoder reads the encoder.
    """
    encoder = getattr(base, "encoder", None)
    convolves = hasattr(encoder, "conv1") and hasattr(encoder, "conv2")
    return (
        base.main_input_name == "input_features" and bool(base.config.is_encoder_decoder) and convolves
    )


def hears_frames(base: PreTrainedModel) -> bool:
    """Return whether a model is an encoder of sound whose tokens are frames in time: wav2vec 2.0, HuBERT, WavLM."""
    hears_samples = base.main_input_name == "input_values" and hasattr(base.config, "conv_stride")
    return hears_samples and not base.config.is_encoder_decoder


def takes_recordings(base: PreTrainedModel) -> bool:
    """Return whether a model takes recordings, as Whisper or as wav2vec 2.0 does."""
    return hears_windows(base) or hears_frames(base)


def wordless(name: str, base: PreTrainedModel) -> WordlessTokenizer:
    """Return a stand-in for the tokenizer of a model that reads no text; it refuses texts and says why."""
    writes_no_text = not accepts(base, "decoder_input_ids")
    if sees_pictures_only(base) or (base.main_input_name == "pixel_values" and writes_no_text):
        reason = "sees pictures, and reads no text"
        hint = "attnscope heatmap --image photo.png"
    elif takes_recordings(base):
        reason = "hears recordings, and reads no text"
        hint = "attnscope heatmap --audio speech.wav"
    else:
        reason = f"reads {main_input(base)}, and no text"
        hint = "models of text, pictures and sound can be shown"
    return WordlessTokenizer(f"{name} {reason}", hint)


def text_tower(base: PreTrainedModel) -> PreTrainedModel | None:
    """Return the text tower of a model whose other tower sees pictures, where neither attends to the other (CLIP).

    None where there are no two such towers.
    """
    tower = getattr(base, "text_model", None)
    if not isinstance(tower, PreTrainedModel) or picture_tower(base) is None:
        return None
    tower = base_of(tower)
    return tower if reads_text(tower) else None


def picture_tower(base: PreTrainedModel) -> PreTrainedModel | None:
    """Return the vision tower beside a text tower (CLIP), or before a decoder that writes of pictures (TrOCR).

    None where there is none. A language model that reads pictures among its tokens (LLaVA) has no such tower.
    """
    tower: Any = None
    # SmolVLM's parts have the names of CLIP's, but its text has tokens that stand for a picture.
    if hasattr(base, "text_model") and getattr(base.config, "image_token_id", None) is None:
        tower = getattr(base, "vision_model", None)
    if tower is None and base.config.is_encoder_decoder and base.main_input_name == "pixel_values":
        tower = getattr(base, "encoder", None)
    if not isinstance(tower, PreTrainedModel):
        return None
    tower = base_of(tower)
    return tower if sees_pictures_only(tower) else None


def quantisation(config: Any) -> str:
    """Return how weights are quantised, such as "quantised (gptq)"; "" if they are not."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = settings.get("quant_method") or "by a method not named"
    return f"quantised ({getattr(method, 'value', method)})"


def notes_on_quantisation(config: Any) -> tuple[str, ...]:
    """Return the note on a model whose configuration says that its weights are quantised; () on others."""
    how = quantisation(config)
    if not how:
        return ()
    return (f"Its configuration says that its weights are {how}: the maps show the weights as loaded.",)


# Adapters -------------------------------------------------------------------------------------------------------

_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft writes before the name of a module."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of peft (LoRA and its kin) that is part of a model.

    One from files is merged into the weights, so that nothing of what is shown depends on how peft computes it.

    Attributes:
        name: Of its folder, or as peft calls it; "" = there is none.
        sha256: Of its weights; "" where it is not from files.
        note: What a user must know of it.
    """

    name: str = ""
    sha256: str = ""
    note: str = ""


def require_peft(folder: Path) -> None:
    """Refuse an adapter that cannot be applied: without it, another model would be shown."""
    if not importlib.util.find_spec("peft"):
        raise AttnscopeError(
            f"{folder} holds an adapter, which needs the package peft",
            'install the extra: pip install "attnscope[peft]", or move adapter_config.json away to see the base alone',
        )
    if not (folder / _WEIGHTS_FILE).is_file():
        raise AttnscopeError(
            f"{folder} holds no {_WEIGHTS_FILE}", "save the adapter there with peft, as safetensors"
        )


def merge(model: PreTrainedModel, folder: Path) -> Adapter:
    """Merge the adapter in a folder into a model with its head, if it has one; return what was merged.

    Raises:
        AttnscopeError: It does not fit the model, or changes more than weights.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    path = folder / _WEIGHTS_FILE
    try:
        weights = load_file(path)
        config: Any = PeftConfig.from_pretrained(str(folder))
        _require_merging(config, folder.name)

        # An adapter of a model with a head is fitted to the base alone where the head is not loaded.
        target: PreTrainedModel = model
        heads: set[str] = set()
        top_modules = {name.removeprefix(_PREFIX).partition(".")[0] for name in weights}
        if not top_modules <= {*model._modules}:
            target = model.base_model  # type: ignore[assignment]
            prefix = f"{_PREFIX}{target.base_model_prefix}."
            of_base = {}
            for name, weight in weights.items():
                if name.startswith(prefix):
                    of_base[_PREFIX + name.removeprefix(prefix)] = weight
            if of_base:
                # base_model.model.HEAD…
                heads = {name.split(".")[2] for name in weights if not name.startswith(prefix)}
                weights = of_base

        # peft is to leave no weights beside those of the target.
        config.task_type = None
        config.inference_mode = True
        parts = {name.rpartition(".")[2] for name, _ in target.named_modules()}
        saved = config.modules_to_save or ()
        config.modules_to_save = [name for name in saved if name in parts] or None
        adapted = PeftModel(target, config, autocast_adapter_dtype=False)
        # Every weight of the adapter must have its place, and every place its weight.
        odd = sorted(set(get_peft_model_state_dict(adapted)) ^ set(weights))
        if odd:
            raise ValueError(f"{len(odd)} of its weights have no counterpart, such as {odd[0]}")
        set_peft_model_state_dict(adapted, weights)
        adapted.merge_and_unload(safe_merge=True)
    except AttnscopeError:
        raise
    except Exception as error:  # peft and torch raise what they like on adapters of other models
        raise AttnscopeError(
            f"the adapter in {folder} does not fit the model: {first_line(error)}",
            "name the model it was made for",
        ) from error
    sha256 = file_sha256(path)
    note = f"Adapter {folder.name} (sha256 {sha256[:12]}) is merged in"
    if heads:
        note += f"; its {', '.join(sorted(heads))} is left out, for attention does not depend on it"
    return Adapter(folder.name, sha256, f"{note}.")


def unwrap(model: Any) -> tuple[Any, Adapter]:
    """Return a model in memory without peft's wrapping, and what is active in it; any other model as it is."""
    if any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__):
        for name in model.active_adapters:
            _require_merging(model.peft_config[name], name)
        model = model.get_base_model()
    modules = model.modules() if isinstance(model, nn.Module) else ()
    parts: list[Any] = [part for part in modules if hasattr(part, "merged_adapters")]
    if not parts:
        return model, Adapter()
    # Merged adapters stay part of the weights; others count only while they are switched on.
    names = {name for part in parts for name in part.merged_adapters}
    names |= {name for part in parts if not part.disable_adapters for name in part.active_adapters}
    name = "+".join(sorted(names))
    note = "The model's adapters are switched off: this is the base."
    if name:
        note = f"Adapter {name} is active."
    return model, Adapter(name, note=note)


def _require_merging(config: Any, name: str) -> None:
    """Refuse an adapter that adds tokens that are no text."""
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise AttnscopeError(
            f"adapter {name} adds tokens that are no text, so that no map of a text holds all its attention",
            "adapters that change weights, such as LoRA, can be shown",
        )


# Failures -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_one_line(name: str, failure: str = "does not run", hint: str = "") -> Iterator[None]:
    """Within it, whatever a model's own code raises becomes one line; what our own raises stays what it is.

    Args:
        name: The model.
        failure: What it does not do, such as "cannot be read".
        hint: What to do about it.
    """
    try:
        yield
    except AttnscopeError:
        raise
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error) or _is_ours(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(f"{name} {failure}: its own code says {reason}", hint) from error


def load_errors(part: str, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Within it, whatever transformers raises on the files of a part, such as "tokenizer", becomes one line."""
    return as_failure(
        f"cannot load the {part} in {folder}", "get its files again, or install what it needs"
    )


def _is_ours(error: BaseException) -> bool:
    """Return whether code outside of transformers raised an error: a probe, say, which is not the model's own code.

    An error that torch raises counts as its caller's. One that calling the model raises, on arguments that it does not
    take, counts as the model's.
    """
    # The last frame outside of torch is the one whose call failed.
    caller = ("", "")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != "torch":
            caller = (module, frame.f_code.co_name)
    module, function = caller
    # These three, of `hf.seam` and `hf.eager`, call a model.
    calls_the_model = module.startswith("attnscope.") and function in (
        "_forward",
        "run_eager",
        "run_for_weights",
    )
    return not (module.startswith("transformers") or calls_the_model)


_silence_lock = threading.RLock()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep transformers from writing to the terminal. Its switches are global, so one load at a time."""
    with _silence_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.CRITICAL + 1)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
