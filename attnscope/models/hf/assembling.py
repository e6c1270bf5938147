"""Make Models of transformers models: choose the part that is shown, its tokenizer, and check its attention.

A transformers model comes from memory (`wrap`), or from files (`hf.loading`). Some have two *towers*, transformers side
by side: one reads text, the other sees pictures.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError
from attnscope.models.hf.check import survey_attention
from attnscope.models.hf.model import HuggingFaceModel, RawModel
from attnscope.models.hf.parts import (
    base_of,
    make_wordless_tokenizer,
    mute_transformers,
    notes_on_quantisation,
    picture_tower,
    reads_or_writes_text,
    reads_pictures_in_text,
    sees_pictures_only,
    takes_audio,
    text_tower,
    translate_errors,
    unwrap_peft,
)
from attnscope.models.hf.senses.cross_readers import choose_cross_reader, has_standalone_part
from attnscope.models.hf.senses.media_readers import is_masked_autoencoder
from attnscope.models.hf.survey import AttentionSurvey, SurveyCache
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer
from attnscope.models.locks import share_lock


def wrap(
    hf_model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", check: bool = True
) -> HuggingFaceModel:
    """Make a Model of a transformers model that is in memory, or of a PeftModel; neither is changed.

    Args:
        hf_model: The model.
        tokenizer: Its tokenizer or processor; of a vision model its image processor. Without one, texts are given as
            token numbers.
        name: What to call it; "" = as its configuration does.
        check: Whether to compare its attention with the model's own eager attention.

    Raises:
        AttnscopeError: It is no transformers model, or its attention cannot be shown truly.
    """
    hf_model, adapter = unwrap_peft(hf_model)
    if type(hf_model).__module__.startswith("sentence_transformers."):
        # A list of modules: the first one holds the transformer, and later ones pool and normalise its output.
        tokenizer = tokenizer or getattr(hf_model, "tokenizer", None)
        hf_model = next(
            (part for part in hf_model.modules() if isinstance(part, PreTrainedModel)), hf_model
        )
    # Other wrappers are refused: the user has to name the model inside.
    if not isinstance(hf_model, PreTrainedModel):
        hint = "give a PreTrainedModel: of a wrapper (torch.compile, DataParallel, a pipeline) the model inside it"
        raise AttnscopeError(f"{type(hf_model).__name__} is no transformers model", hint)
    folder_name = str(hf_model.config.name_or_path).rstrip("/").rpartition("/")[2]
    name = name or folder_name or hf_model.config.model_type
    base = base_of(hf_model)
    # What was given as `tokenizer` is one itself, or a processor that holds one.
    text_tokenizer = getattr(tokenizer, "tokenizer", None)
    if text_tokenizer is None and hasattr(tokenizer, "get_vocab"):
        text_tokenizer = tokenizer
    # A processor may also hold the image processor or the feature extractor that makes this model's input.
    processor = None if text_tokenizer is tokenizer else tokenizer
    kind = processor_kind(base)
    if kind != "processor":
        processor = getattr(tokenizer, kind, processor)
    reader: HuggingFaceTokenizer | NumbersTokenizer = NumbersTokenizer()
    if not reads_or_writes_text(base):
        reader = make_wordless_tokenizer(name, base)
    elif text_tokenizer is not None:
        reader = HuggingFaceTokenizer(text_tokenizer)
    notes = notes_on_quantisation(hf_model.config)
    raw = RawModel(hf_model, reader, name, notes=notes, processor=processor, adapter=adapter)
    return assemble(raw, check=check)


def processor_kind(base: PreTrainedModel) -> str:
    """Return what makes a model's input of pictures or sound, by the name that transformers gives it.

    It is an "image_processor" for pictures, a "feature_extractor" for sound, a "processor" for pictures and words
    together, and "" for words alone.
    """
    # A reader is what runs a model with cross-attention on a picture.
    reader = choose_cross_reader(base)
    reads_no_words = reader is not None and not reader.reads_words
    if reads_no_words or sees_pictures_only(base) or picture_tower(base) is not None:
        return "image_processor"
    if takes_audio(base):
        return "feature_extractor"
    if reader is not None or reads_pictures_in_text(base):
        return "processor"
    return ""


def assemble(raw: RawModel, *, check: bool) -> HuggingFaceModel:
    """Find the attention of a transformers model, and return its Model; of two towers that of the one that reads text.

    The Model can open another one for pictures: of the tower that sees them, or of pictures and words together.
    """
    base = base_of(raw.model)
    name = raw.name
    if is_masked_autoencoder(base):
        raise AttnscopeError(
            f"{name} hides {base.config.mask_ratio:.0%} of the patches, others each time",
            "with model.config.mask_ratio = 0.0 it sees them all",
        )
    reading_tower = text_tower(base)
    seeing_tower = picture_tower(base)
    with mute_transformers(), translate_errors(f"{name} ({base.config.model_type})", "cannot be read"):
        # Pictures and words together.
        reader = choose_cross_reader(base)
        open_image_text_model = None
        if reader is not None:
            open_image_text_model = partial(_build, raw, check, survey=reader.survey(base))
            if not has_standalone_part(base):
                return open_image_text_model()
        if seeing_tower is None:
            return _build(raw, check, open_image_text_model=open_image_text_model)
        seeing = replace(raw, model=seeing_tower, tokenizer=make_wordless_tokenizer(name, seeing_tower))
        # A vision tower before a decoder (TrOCR).
        if reading_tower is None:
            how = "its decoder is not shown"
            if reader is not None:
                how = "with a text beside --image its decoder is shown"
            note = f"This is its encoder, which sees pictures; {how}."
            return _build(
                replace(seeing, notes=(*raw.notes, note)),
                check,
                open_image_text_model=open_image_text_model,
            )
        # A vision tower beside a text tower (CLIP).
        apart = "It has a part for text and one for pictures, and neither attends to the other: this is the one for"
        seeing = replace(seeing, notes=(*raw.notes, f"{apart} pictures."))
        note = f"{apart} text. With --image the other is shown."
        reading = replace(raw, model=reading_tower, notes=(*raw.notes, note))
        return _build(reading, check, open_image_model=lambda: assemble(seeing, check=check))


def _build(
    raw: RawModel,
    check: bool,
    open_image_model: Callable[[], HuggingFaceModel] | None = None,
    open_image_text_model: Callable[[], HuggingFaceModel] | None = None,
    survey: AttentionSurvey | None = None,
) -> HuggingFaceModel:
    """Return a Model of a transformers model.

    Args:
        raw: The transformers model.
        check: Whether to compare its attention with the model's own eager attention.
        open_image_model: Makes a Model of the tower that sees pictures; None = there is none beside this one.
        open_image_text_model: Makes a Model of pictures and words together; None = this is one, or there is none.
        survey: What is known of its attention; None = find out, unless the result is remembered from an earlier load.
    """
    base = base_of(raw.model)
    share_lock([raw.model])
    # The survey of a model from files may be remembered from an earlier load.
    memory = None
    if survey is None and raw.hashes is not None:
        memory = SurveyCache(raw.model, base, raw.hashes, recheck=raw.recheck)
        survey = memory.survey(lambda: survey_attention(base, check=check))
    survey = survey or survey_attention(base, check=check)
    return HuggingFaceModel(raw, base, survey, open_image_model, open_image_text_model, memory)
