"""What Hugging Face models see: a photo through the model's own image processor, and its patches as tokens.

And the processors of models that read pictures among words. What of them is for videos is left out: it needs
torchvision, and no video is shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import processing_auto

from attnscope.errors import AttnscopeError, first_line, parse_json
from attnscope.models.hf.examples import accepts, patch_order
from attnscope.models.hf.parts import as_failure, load_errors
from attnscope.models.model import SensoryInput
from attnscope.questions.places import Picture
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import patch_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel

OTHER_MODELS = "preprocessor_config.json and config.json belong to different models"
"""What to think of where what a processor makes does not fit the model."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_NAMED = (("CLS", ("cls_token", "class_embedding", "class_token")), ("DIST", ("distillation_token", "dist_token")))
_REGISTERS = ("register_tokens", "register_token", "reg_token")


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
    with load_errors("image processor", folder):
        try:
            if kind == "DINOv3ViTImageProcessor":
                # It is there for torchvision alone, and does what ViT's does, but that it resizes before it rounds.
                return transformers.ViTImageProcessorPil.from_pretrained(folder, **options)
            auto: Any = transformers.AutoImageProcessor
            return auto.from_pretrained(folder, backend="pil", **options)
        except ImportError as error:
            raise AttnscopeError(f"the image processor in {folder} needs more: {first_line(error)}") from error
        except Exception as error:
            if "torchvision" not in str(error):
                raise
            message = f"the image processor in {folder}, {kind}, needs torchvision"
            raise AttnscopeError(message, "pip install torchvision") from error


def open_feature_extractor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the feature extractor of a folder; None where it has none."""
    if not holds_processor(folder):
        return None
    auto: Any = transformers.AutoFeatureExtractor
    with load_errors("feature extractor", folder):
        return auto.from_pretrained(folder, **options)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return what a file of settings says; nothing where it cannot be read."""
    try:
        settings = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


@dataclass(frozen=True)
class WholeView:
    """What a forward pass on a picture or a sound must be like: each layer sees all tokens, and no others."""

    n_tokens: int
    where: str  # where there are so many, and what the model does instead
    hint: str  # which models can be shown
    failure: tuple[str, str] = ("does not run on this input", "")  # what to say, and to advise, where it does not run


class HuggingFaceEyes:
    """What of a model sees pictures; see models.model.Eyes. It may lack its image processor."""

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        self.model = model
        self._base = model.base
        self._name = model.info.name
        self._processor = processor

    def see(self, photo: Photo) -> SensoryInput:
        """Return a photo as the model sees it: through its own image processor, cut into its patches.

        Models must cut pictures into one grid of patches, and see all of them in each layer.
        """
        if self._processor is None:
            raise AttnscopeError(
                f"{self._name} came without its image processor", "hand it over: attnscope.load(model, image_processor)"
            )
        with as_failure(f"the image processor of {self._name}", f" on {photo.source}"):
            features = self._processor(images=photo.image, return_tensors="pt")
        pixels = features.get("pixel_values")
        shapes = features.get("spatial_shapes")
        if isinstance(pixels, Tensor) and shapes is not None:
            seen = self._see_patches(pixels, shapes, photo)
        else:
            seen = self._see_whole(pixels, photo)
        assert seen.picture is not None
        height, width = seen.picture.pixels.shape[:2]
        failure = f"does not take what its image processor makes of {photo.source}, {width} × {height}"
        self.model.expect(seen.inputs, whole_grid(len(seen.tokens), (failure, OTHER_MODELS)))
        return seen

    def _see_whole(self, pixels: Any, photo: Photo) -> SensoryInput:
        """Return what a processor gives that leaves the cutting to the model."""
        if isinstance(pixels, Tensor) and pixels.ndim == 5:
            raise AttnscopeError(
                f"{self._name} sees videos: frames, {tuple(pixels.shape)}, cannot be drawn as one picture",
                "read its weights in Python: model.run_inputs({...}, Weights())",
            )
        shape = tuple(pixels.shape) if isinstance(pixels, Tensor) else "none"
        if not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.shape[:2] != (1, 3):
            raise AttnscopeError(
                f"the image processor of {self._name} gives no picture of three colours, but {shape}",
                "models that see one picture as one grid of patches are supported",
            )
        high, wide = patch_size(self._base, self._name)
        rows = pixels.shape[2] // high
        columns = pixels.shape[3] // wide
        if not rows or not columns:
            message = f"{self._name} sees {photo.source} smaller than one of its patches"
            raise AttnscopeError(message, "give another photo")
        colours = undo_normalisation(self._processor, pixels)[: rows * high, : columns * wide]
        notes = [*photo.notes]
        if (rows * high, columns * wide) != tuple(pixels.shape[2:]):
            notes.append(
                "the patches do not reach the right and lower edge of what the model is given: that is cut off"
            )
        inputs = {"pixel_values": pixels.to(self._base.dtype), **patch_order(self._base, pixels)}
        return self._sensory_input(inputs, colours, (rows, columns), photo, notes)

    def _see_patches(self, pixels: Tensor, shapes: Any, photo: Photo) -> SensoryInput:
        """Return what a processor gives that cuts pictures itself, (1, patch, pixels of it), and fills up (SigLIP 2).

        What it fills up with is left out: the model hides it from the patches.
        """
        rows, columns = (int(n) for n in np.asarray(shapes).reshape(-1)[:2])
        high, wide = patch_size(self._base, self._name)
        patches = pixels[:, : rows * columns]
        if patches.shape != (1, rows * columns, high * wide * 3):
            raise AttnscopeError(
                f"the image processor of {self._name} gives {tuple(pixels.shape)}, not {rows} x {columns} patches of "
                f"{high} x {wide}",
                OTHER_MODELS,
            )
        whole = patches.reshape(rows, columns, high, wide, 3).permute(4, 0, 2, 1, 3)
        colours = undo_normalisation(self._processor, whole.reshape(1, 3, rows * high, columns * wide))
        inputs = {
            "pixel_values": patches.to(self._base.dtype),
            "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[rows, columns]]),
        }
        return self._sensory_input(inputs, colours, (rows, columns), photo, photo.notes)

    def _sensory_input(
        self,
        inputs: dict[str, Tensor],
        colours: NDArray[np.uint8],
        grid: tuple[int, int],
        photo: Photo,
        notes: Sequence[str],
    ) -> SensoryInput:
        picture = Picture(np.ascontiguousarray(colours), grid, photo.source, photo.image.size)
        tokens = patch_tokens(grid, tokens_before(self._base), photo.source)
        return SensoryInput(inputs, tokens, picture, notes=tuple(notes))


def whole_grid(n_tokens: int, *failure: tuple[str, str]) -> WholeView:
    """Return what is expected of models that see a picture in so many tokens; of `failure` see there."""
    return WholeView(
        n_tokens,
        f"the picture has {n_tokens} tokens (patches and those before them): the model adds tokens, merges patches, or "
        "attends within windows, which is not supported",
        "choose a model whose layers all see the same patches, such as ViT, DeiT or DINOv2",
        *failure,
    )


def hides_patches(base: PreTrainedModel) -> bool:
    """Return whether an autoencoder hides patches by chance.

    Hiera has the setting too, and its plain model hides none.
    """
    own = any(hasattr(module, "is_mae") for module in base.modules())
    return bool(getattr(base.config, "mask_ratio", 0)) and accepts(base, "noise") and not own


def show_all_patches(base: PreTrainedModel) -> list[str]:
    """Switch off the masking of an autoencoder (ViT-MAE), which hides most patches by chance; says so in a note."""
    if not hides_patches(base):
        return []
    hidden = base.config.mask_ratio
    base.config.mask_ratio = 0.0
    return [f"In training it sees {1 - hidden:.0%} of the patches, drawn at random; here it sees all, in order."]


def patch_size(base: PreTrainedModel, name: str) -> tuple[int, int]:
    """Height and width of the patches that a model cuts pictures into, in pixels."""
    size = getattr(base.config, "patch_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise AttnscopeError(
            f"{name} does not cut pictures into patches of one size", "vision transformers are supported"
        )
    return int(sides[0]), int(sides[1])


def tokens_before(base: PreTrainedModel) -> tuple[str, ...]:
    """Return the tokens that stand before the patches, by the parameters that they come from."""
    parameters = {key.rpartition(".")[2]: parameter for key, parameter in base.named_parameters()}
    labels = [label for label, names in _NAMED if any(name in parameters for name in names)]
    registers = next((parameters[name].shape[-2] for name in _REGISTERS if name in parameters), 0)
    return (*labels, *(f"REG{number}" for number in range(registers)))


def undo_normalisation(processor: Any, pixels: Tensor) -> NDArray[np.uint8]:
    """Return what a processor made of a photo as colours from 0 to 255, (height, width, 3)."""
    values = pixels[0].double().cpu().numpy().transpose(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        values = values * np.asarray(processor.image_std, np.float64) + np.asarray(processor.image_mean, np.float64)
    if getattr(processor, "do_rescale", False):
        values = values / float(processor.rescale_factor)
    colours: NDArray[np.uint8] = np.rint(values.clip(0, 255)).astype(np.uint8)
    return colours


def open_processor(folder: Path, tokenizer: Any, model_type: str, options: Mapping[str, Any]) -> Any:
    """Return the processor of a folder for pictures and words, with an image processor that needs Pillow alone.

    Where no file names its class, it is the one of the model's type.
    """
    images = open_image_processor(folder, options)
    files = (folder / name for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"))
    names = (_read_settings(file).get("processor_class") for file in files)
    by_type = getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {}).get(model_type) or ""
    class_name = next((name for name in names if isinstance(name, str)), str(by_type))
    named_class = getattr(transformers, class_name, None)
    if not isinstance(named_class, type):
        raise AttnscopeError(
            f"{folder} names no processor for pictures and words that transformers has",
            "save it there: AutoProcessor.from_pretrained(…).save_pretrained(…)",
        )
    parts = {"image_processor": images, "tokenizer": tokenizer}
    beside = folder / "qformer_tokenizer"
    if beside.is_dir():  # InstructBLIP's queries read the question too, with a tokenizer of their own
        with load_errors("tokenizer", beside):
            parts["qformer_tokenizer"] = transformers.AutoTokenizer.from_pretrained(beside, **options)
    kind: Any = without_videos(named_class)
    named_parts = named_class.get_attributes()  # type: ignore[attr-defined]
    lacking = [name for name in kind.get_attributes() if name not in parts]
    if lacking:
        raise AttnscopeError(f"{class_name} takes more than pictures and words: {lacking[0]}", "it cannot be shown yet")
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
    """Return a class of processors that takes pictures and words, and is made without what is for videos."""
    attributes = [name for name in kind.get_attributes() if "video" not in name]  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(attributes))})
