"""Turn a photo into inputs of a vision model by its own image processor, with its patches as tokens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import accepts, as_failure, patch_order
from attnscope.models.model import SensoryInput
from attnscope.questions.places import Picture
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import patch_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel

_NAMED = (("CLS", ("cls_token", "class_embedding", "class_token")), ("DIST", ("distillation_token", "dist_token")))
_INTERPOLATE = "interpolate_pos_encoding"
_REGISTERS = ("register_tokens", "register_token", "reg_token")


class HuggingFaceEyes:
    """The part of a model that sees pictures, its Eyes. It may lack its image processor."""

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
        # The processor's picture, (1, 3, y, x)
        sizes = self._resize(photo.size)
        with as_failure(f"the image processor of {self._name} fails on {photo.source}"):
            features = self._processor(images=photo.image, return_tensors="pt", **sizes)
        high, wide = patch_size(self._base, self._name)
        inputs, whole = self._take_pixels(features)
        # The grid of patches; pixels beyond whole patches are cut off.
        rows = whole.shape[2] // high
        columns = whole.shape[3] // wide
        if not rows or not columns:
            raise AttnscopeError(
                f"{self._name} sees {photo.source} smaller than one of its patches", "give another photo"
            )
        notes: tuple[str, ...] = ()
        if (rows * high, columns * wide) != tuple(whole.shape[2:]):
            notes = ("the patches do not reach the right and lower edge of what the model is given: that is cut off",)
        colours = np.ascontiguousarray(undo_normalisation(self._processor, whole)[: rows * high, : columns * wide])
        if photo.size and accepts(self._base, _INTERPOLATE):
            inputs[_INTERPOLATE] = True  # type: ignore[assignment]  # the one argument that is no tensor
        # Tokens before the patches (CLS, registers), then the patches row by row.
        tokens = patch_tokens((rows, columns), tokens_before(self._base), photo.source)
        self.model.expect(inputs, len(tokens))
        picture = Picture(colours, (rows, columns), photo.source, photo.image.size)
        return SensoryInput(inputs, tokens, picture, notes=notes)

    def _resize(self, size: int | None) -> dict[str, Any]:
        """Return the processor's options for a square of `size` pixels; it crops the same share as by default."""
        if size is None:
            return {}
        high, wide = patch_size(self._base, self._name)
        # Only models that interpolate their positions take other sizes, of whole patches.
        usual, crop = (_sides(getattr(self._processor, name, None)) for name in ("size", "crop_size"))
        can = accepts(self._base, _INTERPOLATE) or self._base.config.model_type.startswith("dinov2")
        if not can or not {"height", "shortest_edge"} & {*usual}:
            raise AttnscopeError(f"{self._name} takes pictures of one size", "leave out --size; DINOv2 and ViT have it")
        if size % high or size % wide:
            raise AttnscopeError(f"{size} pixels are no whole patches of {high}", f"--size {size // high * high} is")
        square = {"height": size, "width": size}
        if "shortest_edge" not in usual:
            return {"size": square}
        edge = round(usual["shortest_edge"] * size / crop.get("height", usual["shortest_edge"]))
        return {"size": {"shortest_edge": edge}, "crop_size": square}

    def _take_pixels(self, features: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the forward's arguments for a picture that the model cuts itself, and the picture, (1, 3, y, x)."""
        pixels = features.get("pixel_values")
        shape = tuple(pixels.shape) if isinstance(pixels, Tensor) else "none"
        if not isinstance(pixels, Tensor) or len(shape) != 4 or shape[:2] != (1, 3):
            raise AttnscopeError(
                f"the image processor of {self._name} gives no picture of three colours, but {shape}",
                "models that see one picture as one grid of patches are supported, videos are not",
            )
        return {"pixel_values": pixels.to(self._base.dtype), **patch_order(self._base, pixels)}, pixels


def _sides(size: Any) -> dict[str, int]:
    """Return the sides of a processor's size, in pixels by name."""
    names = ("height", "width", "shortest_edge")
    return {name: int(side) for name in names if isinstance(side := getattr(size, name, None), int)}


def hides_patches(base: PreTrainedModel) -> bool:
    """Return whether an autoencoder hides patches by chance.

    Hiera has the setting too, and its plain model hides none.
    """
    own = any(hasattr(module, "is_mae") for module in base.modules())
    return bool(getattr(base.config, "mask_ratio", 0)) and accepts(base, "noise") and not own


def patch_size(base: PreTrainedModel, name: str) -> tuple[int, int]:
    """Return the height and width of the patches that a model cuts pictures into, in pixels.

    Where stages merge patches, two by two (Swin), those of the last stage.
    """
    size = getattr(base.config, "patch_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise AttnscopeError(
            f"{name} does not cut pictures into patches of one size", "vision transformers are supported"
        )
    # Each stage after the first merges two by two patches.
    times = 2 ** (len(base.config.depths) - 1) if merges_patches(base) else 1
    return int(sides[0]) * times, int(sides[1]) * times


def merges_patches(base: PreTrainedModel) -> bool:
    """Return whether what sees pictures attends within windows, and merges patches from stage to stage (Swin)."""
    return hasattr(base.config, "depths") and hasattr(base.config, "window_size")


def tokens_before(base: PreTrainedModel) -> tuple[str, ...]:
    """Return the tokens that stand before the patches, by the parameters that they come from."""
    parameters = {key.rpartition(".")[2]: parameter for key, parameter in base.named_parameters()}
    labels = [label for label, names in _NAMED if any(name in parameters for name in names)]
    registers = next((parameters[name].shape[-2] for name in _REGISTERS if name in parameters), 0)
    return (*labels, *(f"REG{number}" for number in range(registers)))


def undo_normalisation(processor: Any, pixels: Tensor) -> NDArray[np.uint8]:
    """Return a processor's picture of a photo as colours from 0 to 255, (height, width, 3)."""
    values = pixels[0].double().cpu().numpy().transpose(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        values = values * np.asarray(processor.image_std, np.float64) + np.asarray(processor.image_mean, np.float64)
    if getattr(processor, "do_rescale", False):
        values = values / float(processor.rescale_factor)
    colours: NDArray[np.uint8] = np.rint(values.clip(0, 255)).astype(np.uint8)
    return colours
