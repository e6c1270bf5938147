"""The processors of models that read pictures among words: an image processor, a tokenizer, and what joins them.

Whatever of them is for videos is left out: it needs torchvision, and no video is shown.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import processing_auto

from attnscope.errors import AttnscopeError, first_line, parse_json
from attnscope.models.hf.parts import load_errors
from attnscope.models.hf.senses.seeing import open_image_processor

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def open_processor(folder: Path, tokenizer: Any, model_type: str, options: Mapping[str, Any]) -> Any:
    """The processor of a folder for pictures and words, with an image processor that needs Pillow alone.

    Args:
        folder: Where its files are.
        tokenizer: Its tokenizer, as transformers has it.
        model_type: The type of the model, in case that no file names the processor.
        options: What its parts are loaded with.

    Raises:
        AttnscopeError: There is none, or it needs something that is not installed.
    """
    images = open_image_processor(folder, options)
    named = _class_name(folder, model_type)
    found = getattr(transformers, named, None)
    if not isinstance(found, type):
        raise AttnscopeError(
            f"{folder} names no processor for pictures and words that transformers has",
            "save it there: AutoProcessor.from_pretrained(…).save_pretrained(…)",
        )
    parts = {"image_processor": images, "tokenizer": tokenizer}
    beside = folder / "qformer_tokenizer"
    if beside.is_dir():  # InstructBLIP's queries read the question too, with a tokenizer of their own
        with load_errors("tokenizer", beside):
            parts["qformer_tokenizer"] = transformers.AutoTokenizer.from_pretrained(beside, **options)
    kind: Any = without_videos(found)
    named_parts = found.get_attributes()  # type: ignore[attr-defined]
    lacking = [name for name in kind.get_attributes() if name not in parts]
    if lacking:
        raise AttnscopeError(f"{named} takes more than pictures and words: {lacking[0]}", "it cannot be shown yet")
    with load_errors("processor", folder):
        try:
            described, _ = kind.get_processor_dict(folder, local_files_only=True)
            return kind.from_args_and_dict([parts.get(name) for name in named_parts], described)
        except ImportError as error:
            reason = first_line(error)
            package = reason.partition("`")[2].partition("`")[0]
            raise AttnscopeError(
                f"the processor in {folder} needs more: {reason}", f"pip install {package}" if package else ""
            ) from error


def without_videos(kind: type) -> type:
    """A class of processors that takes pictures and words, and is made without what is for videos."""
    attributes = [name for name in kind.get_attributes() if "video" not in name]  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(attributes))})


def _class_name(folder: Path, model_type: str) -> str:
    """What the files of a folder call the processor; where they do not, the one of the model's type."""
    for name in _FILES:
        try:
            settings = parse_json((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(settings, dict) and isinstance(settings.get("processor_class"), str):
            return str(settings["processor_class"])
    return str(getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {}).get(model_type) or "")
