"""Make Models of transformers models: which part of one is shown, with which tokenizer, and what is known of it.

A model comes from memory (`wrap`) or from files (`hf.loading`).
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
    in_one_line,
    notes_on_quantisation,
    picture_tower,
    reads_or_writes_text,
    reads_pictures_in_text,
    sees_pictures_only,
    silence,
    takes_recordings,
    text_tower,
    unwrap,
    wordless,
)
from attnscope.models.hf.senses.cross_readers import cross_reader, stands_alone
from attnscope.models.hf.senses.eyes_and_ears import hides_patches
from attnscope.models.hf.survey import Memory, Survey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer
from attnscope.models.turns import share_lock


def wrap(
    hf_model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", check: bool = True
) -> HuggingFaceModel:
    """Make a Model of a transformers model that is in memory already, or of a PeftModel. It is left as it is.

    Args:
        hf_model: The model.
        tokenizer: Its tokenizer or processor; of a vision model its image processor. Without one, texts are given as
            token numbers.
        name: What to call it; "" = as its configuration does.
        check: Whether to compare what is shown with the model's own eager attention.
    """
    hf_model, adapter = unwrap(hf_model)
    if type(hf_model).__module__.startswith("sentence_transformers."):
        # It is a list of modules: the first one holds the transformer, later ones pool and normalise its output.
        tokenizer = tokenizer or getattr(hf_model, "tokenizer", None)
        hf_model = next(
            (part for part in hf_model.modules() if isinstance(part, PreTrainedModel)), hf_model
        )
    if not isinstance(hf_model, PreTrainedModel):
        hint = "give a PreTrainedModel: of a wrapper (torch.compile, DataParallel, a pipeline) the model inside it"
        raise AttnscopeError(f"{type(hf_model).__name__} is no transformers model", hint)
    folder_name = str(hf_model.config.name_or_path).rstrip("/").rpartition("/")[2]
    name = name or folder_name or hf_model.config.model_type
    base = base_of(hf_model)
    # A processor for two senses holds a tokenizer and an image processor or a feature extractor.
    backend = getattr(tokenizer, "tokenizer", None)
    if backend is None and hasattr(tokenizer, "get_vocab"):
        backend = tokenizer
    processor = None if backend is tokenizer else tokenizer
    kind = processor_kind(base)
    if kind != "processor":
        processor = getattr(tokenizer, kind, processor)
    reader: HuggingFaceTokenizer | NumbersTokenizer = NumbersTokenizer()
    if not reads_or_writes_text(base):
        reader = wordless(name, base)
    elif backend is not None:
        reader = HuggingFaceTokenizer(backend)
    notes = notes_on_quantisation(hf_model.config)
    raw = RawModel(hf_model, reader, name, notes=notes, processor=processor, adapter=adapter)
    return assemble(raw, check=check)


def processor_kind(base: PreTrainedModel) -> str:
    """Return what makes a model's input beside words: "image_processor", "feature_extractor", "processor" or "".

    A processor makes pictures and words into one input. The others are the names of its parts.
    """
    reader = cross_reader(base)
    reads_no_words = reader is not None and not reader.reads_words
    if reads_no_words or sees_pictures_only(base) or picture_tower(base) is not None:
        return "image_processor"
    if takes_recordings(base):
        return "feature_extractor"
    return "processor" if reader is not None or reads_pictures_in_text(base) else ""


def assemble(raw: RawModel, *, check: bool) -> HuggingFaceModel:
    """Return a Model of a transformers model, once its attention has been surveyed.

    Of two towers it is the one that reads text. Where another part sees pictures, the Model can open that one too.
    """
    base = base_of(raw.model)
    name = raw.name
    if hides_patches(base):
        raise AttnscopeError(
            f"{name} hides {base.config.mask_ratio:.0%} of the patches, others each time",
            "with model.config.mask_ratio = 0.0 it sees them all",
        )
    words = text_tower(base)
    eyes = picture_tower(base)
    with silence(), in_one_line(f"{name} ({base.config.model_type})", "cannot be read"):
        # Pictures and words together.
        reader = cross_reader(base)
        open_viewer = None
        if reader is not None:
            open_viewer = partial(_build, raw, check, survey=reader.survey(base))
            if not stands_alone(base):
                return open_viewer()
        if eyes is None:
            return _build(raw, check, open_viewer=open_viewer)
        # A vision tower: before a decoder (TrOCR), or beside a text tower (CLIP).
        seeing = replace(raw, model=eyes, tokenizer=wordless(name, eyes))
        if words is None:
            how = "its decoder is not shown"
            if reader is not None:
                how = "with a text beside --image its decoder is shown"
            note = f"This is its encoder, which sees pictures; {how}."
            return _build(replace(seeing, notes=(*raw.notes, note)), check, open_viewer=open_viewer)
        apart = "It has a part for text and one for pictures, and neither attends to the other: this is the one for"
        seeing = replace(seeing, notes=(*raw.notes, f"{apart} pictures."))
        note = f"{apart} text. With --image the other is shown."
        reading = replace(raw, model=words, notes=(*raw.notes, note))
        return _build(reading, check, lambda: assemble(seeing, check=check))


def _build(
    raw: RawModel,
    check: bool,
    open_eyes: Callable[[], HuggingFaceModel] | None = None,
    open_viewer: Callable[[], HuggingFaceModel] | None = None,
    survey: Survey | None = None,
) -> HuggingFaceModel:
    """Return a Model; without a survey its attention is surveyed, or the remembered verdict stands for that.

    `open_eyes` and `open_viewer` make Models of what else sees pictures; see `HuggingFaceModel`.
    """
    base = base_of(raw.model)
    share_lock([raw.model])
    memory = None
    if survey is None and raw.hashes is not None:
        memory = Memory(raw.model, base, raw.hashes, again=raw.again)
        survey = memory.survey(lambda: survey_attention(base, check=check))
    survey = survey or survey_attention(base, check=check)
    return HuggingFaceModel(raw, base, survey, open_eyes, open_viewer, memory)
