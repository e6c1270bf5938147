"""Open the processors of a folder, which turn photos, recordings, and photos among words into inputs.

What of them is for videos is left out: it needs torchvision, and no video is shown.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import processing_auto

from attnscope.errors import AttnscopeError, first_line, parse_json
from attnscope.models.hf.parts import load_errors

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def holds_processor(folder: Path) -> bool:
    """Return whether a folder says how photos, or recordings, are made into what its model reads."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def open_image_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the image processor of a folder, by Pillow, so that nothing depends on what is installed."""
    if not holds_processor(folder):
        raise AttnscopeError(
            f"{folder} holds no image processor",
            "save it there as preprocessor_config.json: AutoImageProcessor.from_pretrained(…).save_pretrained(…)",
        )
    kind = str(_read_settings(folder / PROCESSOR_FILES[0]).get("image_processor_type", "")).removesuffix("Fast")
    with _loading("image processor", folder):
        if kind == "DINOv3ViTImageProcessor":
            # It is there for torchvision alone, and does what ViT's does, but that it resizes before it rounds.
            return transformers.ViTImageProcessorPil.from_pretrained(folder, **options)
        auto: Any = transformers.AutoImageProcessor
        return auto.from_pretrained(folder, backend="pil", **options)


def open_feature_extractor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the feature extractor of a folder; None where it has none."""
    if not holds_processor(folder):
        return None
    auto: Any = transformers.AutoFeatureExtractor
    with _loading("feature extractor", folder):
        return auto.from_pretrained(folder, **options)


def open_processor(folder: Path, tokenizer: Any, model_type: str, options: Mapping[str, Any]) -> Any:
    """Return the processor of a folder for pictures and words, with an image processor that needs Pillow alone.

    Where no file names its class, it is the one of the model's type.
    """
    parts = {"image_processor": open_image_processor(folder, options), "tokenizer": tokenizer}
    beside = folder / "qformer_tokenizer"
    if beside.is_dir():  # InstructBLIP's queries read the question too, with a tokenizer of their own
        with _loading("tokenizer", beside):
            parts["qformer_tokenizer"] = transformers.AutoTokenizer.from_pretrained(beside, **options)
    whole = getattr(transformers, _processor_class(folder, model_type), None)
    if not isinstance(whole, type):
        raise AttnscopeError(
            f"{folder} names no processor for pictures and words that transformers has",
            "save it there: AutoProcessor.from_pretrained(…).save_pretrained(…)",
        )
    kind: Any = without_videos(whole)
    lacking = set(kind.get_attributes()) - set(parts)
    if lacking:
        raise AttnscopeError(f"{kind.__name__} takes more than pictures and words: {min(lacking)}")
    with _loading("processor", folder):
        # The parts are handed over, so that transformers loads none that needs torchvision.
        described, _ = kind.get_processor_dict(folder, local_files_only=True)
        arguments = [parts.get(name) for name in whole.get_attributes()]  # type: ignore[attr-defined]
        return kind.from_args_and_dict(arguments, described)


def _processor_class(folder: Path, model_type: str) -> str:
    # Any of three files may name the class; else the model's type does.
    for name in (*reversed(PROCESSOR_FILES), "tokenizer_config.json"):
        named = _read_settings(folder / name).get("processor_class")
        if isinstance(named, str):
            return named
    return str(getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {}).get(model_type))


def without_videos(kind: type) -> type:
    """Return a class of processors that takes pictures and words, and is made without what is for videos."""
    attributes = [name for name in kind.get_attributes() if "video" not in name]  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(attributes))})


@contextlib.contextmanager
def _loading(what: str, folder: Path) -> Iterator[None]:
    """Within it, whatever transformers raises becomes one line; of a package that is missing, how to install it."""
    with load_errors(what, folder):
        try:
            yield
        except Exception as error:
            reason = first_line(error)
            package = "torchvision" if "torchvision" in reason else reason.partition("`")[2].partition("`")[0]
            if package != "torchvision" and not isinstance(error, ImportError):
                raise
            hint = f"pip install {package}" if package else ""
            raise AttnscopeError(f"the {what} in {folder} needs more: {reason}", hint) from error


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file; {} where it cannot be read."""
    try:
        settings = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
