"""Which part of a Hugging Face model is shown, and what its own code says where it fails.

Heads for tasks are left off. Of models that put two together, such as CLIP's of text and of pictures, each is a model
for itself: neither attends to the other.
"""

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from attnscope.errors import AttnscopeError, catch_panics, first_line, is_out_of_memory
from attnscope.models.hf.examples import accepts, input_name, main_input
from attnscope.models.hf.tokenizer import WordlessTokenizer


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without what it has on top for its task."""
    inner = model.base_model
    if not isinstance(inner, PreTrainedModel):
        return model
    # DINOv3's layers have the name that a base model has elsewhere: they do not take what the model does.
    is_part = accepts(model, main_input(model)) and not accepts(inner, main_input(inner))
    base = model if is_part else inner
    if base.config.is_encoder_decoder and reads_text(base) and not accepts(base, "decoder_input_ids"):
        # UMT5EncoderModel keeps the configuration of the whole; its encoder has one of its own.
        encoder = getattr(base, "encoder", None)
        return encoder if isinstance(encoder, PreTrainedModel) else base
    return base


def reads_text(base: PreTrainedModel) -> bool:
    """Return whether a model takes token numbers."""
    return accepts(base, "input_ids")


def sees_pictures(base: PreTrainedModel) -> bool:
    """Return whether a model reads pictures and no text."""
    return input_name(base) == "pixel_values" and not reads_text(base) and not base.config.is_encoder_decoder


def reads_pictures(base: PreTrainedModel) -> bool:
    """Return whether a model's language model reads pictures among the tokens of its text, as LLaVA's does."""
    is_decoder = reads_text(base) and not base.config.is_encoder_decoder
    return is_decoder and accepts(base, "pixel_values") and picture_tower(base) is None


def hears(base: PreTrainedModel) -> bool:
    """Return whether a model listens as Whisper does.

    To a window of fixed length, by an encoder that a decoder reads.
    """
    encoder = getattr(base, "encoder", None)
    convolves = hasattr(encoder, "conv1") and hasattr(encoder, "conv2")
    return base.main_input_name == "input_features" and bool(base.config.is_encoder_decoder) and convolves


def listens(base: PreTrainedModel) -> bool:
    """Return whether a model is an encoder of sound whose tokens are frames in time.

    Wav2vec 2.0, HuBERT, WavLM, w2v-BERT.
    """
    takes = "input_values" if hasattr(base.config, "conv_stride") else "input_features"
    frames = hasattr(base.config, "conv_stride") or hasattr(base.config, "feature_projection_input_dim")
    return frames and base.main_input_name == takes and not base.config.is_encoder_decoder


def sees_sound(base: PreTrainedModel) -> bool:
    """Return whether a model cuts the spectrogram of a recording into patches, as AST does."""
    strides = hasattr(base.config, "frequency_stride") and hasattr(base.config, "time_stride")
    return base.main_input_name == "input_values" and strides


def takes_recordings(base: PreTrainedModel) -> bool:
    """Return whether a model takes recordings in any of these ways."""
    return hears(base) or listens(base) or sees_sound(base)


def wordless(name: str, base: PreTrainedModel) -> WordlessTokenizer:
    """Return what stands for the tokenizer of a model that reads no text."""
    if sees_pictures(base) or (base.main_input_name == "pixel_values" and not accepts(base, "decoder_input_ids")):
        return WordlessTokenizer(name, "sees pictures, and reads no text", "attnscope heatmap --image photo.png")
    if takes_recordings(base):
        return WordlessTokenizer(name, "hears recordings, and reads no text", "attnscope heatmap --audio speech.wav")
    return WordlessTokenizer(
        name, f"reads {main_input(base)}, and no text", "models of text, pictures and sound can be shown"
    )


def text_tower(base: PreTrainedModel) -> PreTrainedModel | None:
    """Return what reads the text where another part sees pictures and neither attends to the other (CLIP).

    Else None.
    """
    tower = getattr(base, "text_model", None)
    if not isinstance(tower, PreTrainedModel) or picture_tower(base) is None:
        return None
    return base_of(tower) if reads_text(base_of(tower)) else None


def picture_tower(base: PreTrainedModel) -> PreTrainedModel | None:
    """Return what sees pictures: beside a text tower, or before a decoder that writes of them (TrOCR).

    None = there is none.

    Models whose language model reads pictures among its tokens (LLaVA) are no such.
    """
    # SmolVLM's parts have the names of CLIP's, but its text has tokens that stand for a picture.
    is_beside = hasattr(base, "text_model") and getattr(base.config, "image_token_id", None) is None
    tower: Any = getattr(base, "vision_model", None) if is_beside else None
    if tower is None and base.config.is_encoder_decoder and base.main_input_name == "pixel_values":
        tower = getattr(base, "encoder", None)
    return base_of(tower) if isinstance(tower, PreTrainedModel) and sees_pictures(base_of(tower)) else None


def quantisation(config: Any) -> str:
    """Return how weights are quantised, such as "quantised (gptq, 4 bits)"; "" if they are not."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    bits = settings.get("bits") or settings.get("w_bit") or 4 * bool(settings.get("load_in_4bit"))
    bits = bits or 8 * bool(settings.get("load_in_8bit"))
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method")) or "by a method not named"
    return f"quantised ({method}{f', {bits} bits' if bits else ''})"


def notes_on_quantisation(config: Any) -> tuple[str, ...]:
    """Return the note on a model whose configuration says that its weights are quantised."""
    how = quantisation(config)
    return (f"Its configuration says that its weights are {how}: the maps show the weights as loaded.",) if how else ()


@contextlib.contextmanager
def in_one_line(name: str, what: str = "does not run", hint: str = "") -> Iterator[None]:
    """Within it, whatever a model's own code raises becomes one line; what our own raises stays what it is."""
    try:
        yield
    except AttnscopeError:
        raise
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error) or _is_ours(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(f"{name} {what}: its own code says {reason}", hint) from error


@contextlib.contextmanager
def as_failure(what: str, where: str = "") -> Iterator[None]:
    """Within it, whatever a template or a processor raises becomes one line: that it fails."""
    try:
        yield
    except Exception as error:
        raise AttnscopeError(f"{what} fails{where}: {first_line(error)}") from error


@contextlib.contextmanager
def load_errors(what: str, folder: Path) -> Iterator[None]:
    """Within it, whatever transformers raises on files that it does not understand becomes one line."""
    try:
        with catch_panics():
            yield
    except AttnscopeError:
        raise
    except Exception as error:
        raise AttnscopeError(
            f"cannot load the {what} in {folder}: {first_line(error)}", "get its files again"
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Return whether it was raised in a probe or elsewhere outside of transformers.

    Then it is not the model's own code.

    What torch raises is of who called it; that a model was called with what it does not take is of the model.
    """
    name = ""
    function = ""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != "torch":
            name = module
            function = trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return not name.startswith("transformers") and (name.partition(".")[0] != "attnscope" or function not in _CALLERS)


_CALLERS = {"_forward", "run_eager", "run_for_weights"}
"""Functions of ours whose last step is to call a model."""


_loading = threading.RLock()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep transformers from writing to the terminal. Its switches are global, so one load at a time."""
    with _loading, warnings.catch_warnings():
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
