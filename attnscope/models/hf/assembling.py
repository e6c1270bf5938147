"""Turn transformers models into attnscope's Models: choose the part to show and its tokenizer, and check its attention.

A transformers model comes from memory (`wrap`), or from files (`hf.loading`). Some consist of two *towers*, complete
transformers that do not attend to each other: one reads text, the other pictures. A *reader* turns text or media into
the inputs of a model; a *cross reader* runs a model whose text attends to a picture by cross-attention.
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
    """Make a Model from a transformers model in memory, or from a PeftModel, without changing it.

    Args:
        hf_model: The model.
        tokenizer: Its tokenizer or processor; for a vision model its image processor. Without one, texts are given as
            token ids.
        name: The name in messages and results; "" = the name in its configuration.
        check: Whether to compare its attention with the model's own eager attention.

    Raises:
        AttnscopeError: It is no transformers model, or attnscope cannot show its true attention.
    """
    hf_model, adapter = unwrap_peft(hf_model)
    if type(hf_model).__module__.startswith("sentence_transformers."):
        # A SentenceTransformer holds the transformer, and then modules that pool and normalise its output.
        tokenizer = tokenizer or getattr(hf_model, "tokenizer", None)
        hf_model = next(
            (part for part in hf_model.modules() if isinstance(part, PreTrainedModel)), hf_model
        )
    # Refuse other wrappers: the user has to pass the model inside.
    if not isinstance(hf_model, PreTrainedModel):
        raise AttnscopeError(
            f"{type(hf_model).__name__} is no transformers model",
            "give a PreTrainedModel: of a wrapper (torch.compile, DataParallel, a pipeline) the model inside it",
        )
    folder_name = str(hf_model.config.name_or_path).rstrip("/").rpartition("/")[2]
    name = name or folder_name or hf_model.config.model_type
    base = base_of(hf_model)
    # `tokenizer` may be a tokenizer, a processor that holds a tokenizer, or an image processor.
    text_tokenizer = getattr(tokenizer, "tokenizer", None)
    if text_tokenizer is None and hasattr(tokenizer, "get_vocab"):
        text_tokenizer = tokenizer
    # A processor may also hold the image processor or feature extractor for this model's inputs: then use that one.
    processor = None if text_tokenizer is tokenizer else tokenizer
    kind = processor_kind(base)
    if kind != "processor":
        processor = getattr(tokenizer, kind, processor)
    own_tokenizer: HuggingFaceTokenizer | NumbersTokenizer = NumbersTokenizer()
    if not reads_or_writes_text(base):
        own_tokenizer = make_wordless_tokenizer(name, base)
    elif text_tokenizer is not None:
        own_tokenizer = HuggingFaceTokenizer(text_tokenizer)
    notes = notes_on_quantisation(hf_model.config)
    raw = RawModel(hf_model, own_tokenizer, name, notes=notes, processor=processor, adapter=adapter)
    return assemble(raw, check=check)


def processor_kind(base: PreTrainedModel) -> str:
    """Return transformers' name of the object that turns pictures or sound into a model's inputs.

    It is "image_processor" for pictures, "feature_extractor" for sound, "processor" for pictures with words, and "" if
    the model reads only words.
    """
    # None for models without cross-attention on a picture
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
    """Find the attention of a transformers model, and return its Model; if it has two towers, the text tower's.

    That Model can open a second Model for pictures: the vision tower, or the reader of pictures with words.
    """
    base = base_of(raw.model)
    name = raw.name
    if is_masked_autoencoder(base):
        raise AttnscopeError(
            f"{name} hides {base.config.mask_ratio:.0%} of the patches, others each time",
            "with model.config.mask_ratio = 0.0 it sees them all",
        )
    language_tower = text_tower(base)
    vision_tower = picture_tower(base)
    with mute_transformers(), translate_errors(f"{name} ({base.config.model_type})", "cannot be read"):
        # Pictures with words, by cross-attention.
        reader = choose_cross_reader(base)
        open_image_text_model = None
        if reader is not None:
            open_image_text_model = partial(_build, raw, check, survey=reader.survey(base))
            if not has_standalone_part(base):
                return open_image_text_model()
        if vision_tower is None:
            return _build(raw, check, open_image_text_model=open_image_text_model)
        vision_raw = replace(
            raw, model=vision_tower, tokenizer=make_wordless_tokenizer(name, vision_tower)
        )
        # A vision tower before a decoder (TrOCR).
        if language_tower is None:
            decoder_note = "its decoder is not shown"
            if reader is not None:
                decoder_note = "with a text beside --image its decoder is shown"
            vision_raw = replace(
                vision_raw,
                notes=(*raw.notes, f"This is its encoder, which sees pictures; {decoder_note}."),
            )
            return _build(vision_raw, check, open_image_text_model=open_image_text_model)
        # A vision tower and a text tower (CLIP).
        intro = "It has a part for text and one for pictures, and neither attends to the other: this is the one for"
        vision_raw = replace(vision_raw, notes=(*raw.notes, f"{intro} pictures."))
        text_notes = (*raw.notes, f"{intro} text. With --image the other is shown.")
        text_raw = replace(raw, model=language_tower, notes=text_notes)
        return _build(text_raw, check, open_image_model=lambda: assemble(vision_raw, check=check))


def _build(
    raw: RawModel,
    check: bool,
    open_image_model: Callable[[], HuggingFaceModel] | None = None,
    open_image_text_model: Callable[[], HuggingFaceModel] | None = None,
    survey: AttentionSurvey | None = None,
) -> HuggingFaceModel:
    """Make a Model from a transformers model.

    Args:
        raw: The transformers model.
        check: Whether to compare its attention with the model's own eager attention.
        open_image_model: Makes a Model of the vision tower; None = there is no other tower than this one.
        open_image_text_model: Makes a Model of pictures with words; None = this is that Model, or there is none.
        survey: Its attention layers; None = find them on example inputs, or load the stored survey of an earlier load.
    """
    base = base_of(raw.model)
    # All Models of one transformers model take turns.
    share_lock([raw.model])
    # The surveys of models from files are stored on disk.
    survey_cache = None
    if survey is None and raw.hashes is not None:
        survey_cache = SurveyCache(raw.model, base, raw.hashes, recheck=raw.recheck)
        survey = survey_cache.survey(lambda: survey_attention(base, check=check))
    survey = survey or survey_attention(base, check=check)
    return HuggingFaceModel(raw, base, survey, open_image_model, open_image_text_model, survey_cache)
