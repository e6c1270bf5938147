"""Open the processors of a folder, which turn photos, recordings, and photos among words into inputs.

What of them is for videos is left out: it needs torchvision, and no video is shown.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import processing_auto

from attnscope.errors import AttnscopeError, parse_json
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
    auto: Any = transformers.AutoImageProcessor
    with load_errors("image processor", folder):
        if kind == "DINOv3ViTImageProcessor":
            # It is there for torchvision alone, and does what ViT's does, but that it resizes before it rounds.
            return transformers.ViTImageProcessorPil.from_pretrained(folder, **options)
        return auto.from_pretrained(folder, backend="pil", **options)


def open_feature_extractor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the feature extractor of a folder; None where it has none."""
    if not holds_processor(folder):
        return None
    auto: Any = transformers.AutoFeatureExtractor
    with load_errors("feature extractor", folder):
        return auto.from_pretrained(folder, **options)


def open_processor(folder: Path, tokenizer: Any, model_type: str, options: Mapping[str, Any]) -> Any:
    """Return the processor of a folder for pictures and words, with an image processor that needs Pillow alone.

    Where no file names its class, it is the one of the model's type.
    """
    parts = {"image_processor": open_image_processor(folder, options), "tokenizer": tokenizer}
    files = (*reversed(PROCESSOR_FILES), "tokenizer_config.json")
    names = [_read_settings(folder / name).get("processor_class") for name in files]
    names.append(getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {}).get(model_type))
    name = next((name for name in names if isinstance(name, str)), "")
    whole = getattr(transformers, name, None)
    if not isinstance(whole, type):
        raise AttnscopeError(
            f"{folder} names no processor for pictures and words that transformers has",
            "save it there: AutoProcessor.from_pretrained(…).save_pretrained(…)",
        )
    kind: Any = without_videos(whole)
    lacking = set(kind.get_attributes()) - set(parts)
    if lacking:
        raise AttnscopeError(f"{kind.__name__} takes more than pictures and words: {min(lacking)}")
    with load_errors("processor", folder):
        # The parts are handed over, so that transformers loads none that needs torchvision.
        described, _ = kind.get_processor_dict(folder, local_files_only=True)
        arguments = [parts.get(name) for name in whole.get_attributes()]  # type: ignore[attr-defined]
        return kind.from_args_and_dict(arguments, described)


def without_videos(kind: type) -> type:
    """Return a class of processors that takes pictures and words, and is made without what is for videos."""
    attributes = [name for name in kind.get_attributes() if "video" not in name]  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(attributes))})


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file; {} where it cannot be read."""
    try:
        settings = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
