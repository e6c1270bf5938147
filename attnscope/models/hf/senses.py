"""What Hugging Face models see: a photo through the model's own image processor, and its patches as tokens."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention import AttentionCall, Probe, attend
from attnscope.errors import AttnscopeError, first_line
from attnscope.models.hf.examples import accepts, in_order
from attnscope.models.model import SeenPicture
from attnscope.records import Tokens
from attnscope.records.pictures import Picture
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import patch_tokens

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_NAMED = (
    ("CLS", ("cls_token", "class_embedding", "class_token")),
    ("DIST", ("distillation_token", "dist_token")),
)
_REGISTERS = ("register_tokens", "register_token", "reg_token")


def holds_processor(folder: Path) -> bool:
    """Whether a folder says how photos, or recordings, are made into what its model reads."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def open_image_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    """The image processor of a folder, by Pillow, so that what a model sees does not depend on what is installed.

    Raises:
        AttnscopeError: There is none, or it needs something that is not installed.
    """
    if not holds_processor(folder):
        raise AttnscopeError(
            f"{folder} holds no image processor",
            "save it there as preprocessor_config.json: AutoImageProcessor.from_pretrained(…).save_pretrained(…)",
        )
    try:
        if _named(folder) == "DINOv3ViTImageProcessor":
            # It is there for torchvision alone, and does what ViT's does, but that it resizes before it rounds.
            return transformers.ViTImageProcessorPil.from_pretrained(folder, **options)
        auto: Any = transformers.AutoImageProcessor
        return auto.from_pretrained(folder, backend="pil", **options)
    except ImportError as error:
        raise AttnscopeError(f"the image processor in {folder} needs more: {first_line(error)}") from error
    except Exception as error:  # transformers raises what it likes on files that it does not understand
        if "torchvision" in str(error):
            raise AttnscopeError(
                f"the image processor in {folder}, {_named(folder)}, needs torchvision", "pip install torchvision"
            ) from error
        raise AttnscopeError(
            f"cannot load the image processor in {folder}: {first_line(error)}", "get its files again"
        ) from error


def _named(folder: Path) -> str:
    """What preprocessor_config.json calls the image processor; "" where it does not say."""
    try:
        settings = json.loads((folder / PROCESSOR_FILES[0]).read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    return str(settings.get("image_processor_type", "")).removesuffix("Fast") if isinstance(settings, dict) else ""


class WordlessTokenizer:
    """Stands in where a model reads no text.

    Args:
        model: What the model is called.
        what: What it reads instead, such as "sees pictures".
        option: How it is given that on the command line.
    """

    name = "none: it reads no text"
    note = ""
    type_ids: dict[int, int] = {}  # noqa: RUF012
    prefix_ids: tuple[int, ...] = ()

    def __init__(self, model: str, what: str, option: str) -> None:
        self._message = f"{model} {what}, and reads no text", option

    def _refuse(self) -> NoReturn:
        raise AttnscopeError(*self._message)

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Refuses."""
        self._refuse()

    def chat(self, text: str) -> Tokens:
        """Refuses."""
        self._refuse()

    def encode_target(self, text: str, start: int) -> Tokens:
        """Refuses."""
        self._refuse()

    def encode_ids(self, ids: Any) -> Tokens:
        """Refuses."""
        self._refuse()

    def extend(self, tokens: Tokens, written: Any) -> Tokens:
        """Refuses."""
        self._refuse()


def seen_by(base: PreTrainedModel, processor: Any, name: str, photo: Photo) -> SeenPicture:
    """A photo as a model sees it: through its own processor, cut into its patches.

    Args:
        base: The model.
        processor: Its image processor.
        name: What the model is called.
        photo: The photo.

    Raises:
        AttnscopeError: The processor fails, or the model does not cut pictures into one grid of patches.
    """
    try:
        made = processor(images=photo.image, return_tensors="pt")
    except Exception as error:
        raise AttnscopeError(f"the image processor of {name} fails on {photo.source}: {first_line(error)}") from error
    pixels, shapes = made.get("pixel_values"), made.get("spatial_shapes")
    if isinstance(pixels, Tensor) and shapes is not None:
        return _seen_patches(base, processor, pixels, shapes, name, photo)
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.shape[:2] != (1, 3):
        shape = tuple(pixels.shape) if isinstance(pixels, Tensor) else "none"
        raise AttnscopeError(
            f"the image processor of {name} gives no picture of three colours, but {shape}",
            "models that see one picture as one grid of patches are supported",
        )
    high, wide = _patch_size(base, name)
    rows, columns = pixels.shape[2] // high, pixels.shape[3] // wide
    if not rows or not columns:
        raise AttnscopeError(f"{name} sees {photo.source} smaller than one of its patches", "give another photo")
    shown = _without_normalisation(processor, pixels)[: rows * high, : columns * wide]
    notes = [*photo.notes]
    if (rows * high, columns * wide) != tuple(pixels.shape[2:]):
        notes.append("the patches do not reach the right and lower edge of what the model is given: that is cut off")
    picture = Picture(np.ascontiguousarray(shown), (rows, columns), photo.source, photo.image.size)
    tokens = patch_tokens(picture.grid, tokens_before(base), photo.source)
    inputs = {"pixel_values": pixels.to(base.dtype), **in_order(base, pixels)}
    return SeenPicture(inputs, tokens, picture, tuple(notes))


def _seen_patches(
    base: PreTrainedModel, processor: Any, pixels: Tensor, shapes: Any, name: str, photo: Photo
) -> SeenPicture:
    """What a processor gives that cuts pictures into patches itself, (1, patch, pixels of it), and fills up (SigLIP 2).

    What it fills up with is left out: the model hides it from the patches.
    """
    rows, columns = (int(n) for n in np.asarray(shapes).reshape(-1)[:2])
    high, wide = _patch_size(base, name)
    patches = pixels[:, : rows * columns]
    if patches.shape != (1, rows * columns, high * wide * 3):
        raise AttnscopeError(
            f"the image processor of {name} gives {tuple(pixels.shape)}, not {rows} x {columns} patches of "
            f"{high} x {wide}",
            "preprocessor_config.json and config.json belong to different models",
        )
    whole = patches.reshape(rows, columns, high, wide, 3).permute(4, 0, 2, 1, 3)
    shown = _without_normalisation(processor, whole.reshape(1, 3, rows * high, columns * wide))
    inputs = {
        "pixel_values": patches.to(base.dtype),
        "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[rows, columns]]),
    }
    picture = Picture(np.ascontiguousarray(shown), (rows, columns), photo.source, photo.image.size)
    return SeenPicture(inputs, patch_tokens(picture.grid, tokens_before(base), photo.source), picture, photo.notes)


def show_all_patches(base: PreTrainedModel) -> list[str]:
    """Switches off the masking of an autoencoder (ViT-MAE), which hides most patches by chance; says so in a note."""
    if not getattr(base.config, "mask_ratio", 0) or not accepts(base, "noise"):
        return []
    hidden, base.config.mask_ratio = base.config.mask_ratio, 0.0
    return [f"In training it sees {1 - hidden:.0%} of the patches, drawn by lot; here it sees all, in order."]


def require_whole_grid(sizes: set[tuple[int, int]], n_tokens: int, name: str) -> None:
    """Refuses models whose layers do not each see all patches.

    Args:
        sizes: Queries and keys of the attentions that the model computes on a picture.
        n_tokens: Patches of the picture, and tokens before them.
        name: What the model is called.

    Raises:
        AttnscopeError: They are not all of all tokens.
    """
    strange = sorted(sizes - {(n_tokens, n_tokens)})
    if strange:
        queries, keys = strange[0]
        raise AttnscopeError(
            f"{name} has attention of {queries} queries on {keys} keys where the picture has {n_tokens} tokens: "
            "it looks through windows, or merges patches, which is not supported",
            "models whose layers all see all patches are, such as ViT, DeiT and DINOv2",
        )


def _patch_size(base: PreTrainedModel, name: str) -> tuple[int, int]:
    given = getattr(base.config, "patch_size", None)
    sizes = tuple(given) if isinstance(given, list | tuple) else (given, given)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise AttnscopeError(
            f"{name} does not cut pictures into patches of one size", "vision transformers are supported"
        )
    return int(sizes[0]), int(sizes[1])


def tokens_before(base: PreTrainedModel) -> tuple[str, ...]:
    """The tokens that stand before the patches, by the parameters that they come from."""
    held = {key.rpartition(".")[2]: parameter for key, parameter in base.named_parameters()}
    labels = [label for label, names in _NAMED if any(name in held for name in names)]
    registers = next((held[name] for name in _REGISTERS if name in held), None)
    if registers is not None:
        labels += [f"REG{number}" for number in range(registers.shape[-2])]
    return tuple(labels)


def _without_normalisation(processor: Any, pixels: Tensor) -> NDArray[np.uint8]:
    """What a processor made of a photo as colours from 0 to 255, (height, width, 3)."""
    values = pixels[0].double().cpu().numpy().transpose(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        values = values * np.asarray(processor.image_std, np.float64) + np.asarray(processor.image_mean, np.float64)
    if getattr(processor, "do_rescale", False):
        values = values / float(processor.rescale_factor)
    shown: NDArray[np.uint8] = np.rint(values.clip(0, 255)).astype(np.uint8)
    return shown


@contextlib.contextmanager
def taking(name: str, picture: Picture) -> Iterator[None]:
    """Within it, what a model says of a picture that it cannot take becomes one line."""
    try:
        yield
    except AttnscopeError:
        raise
    except (ValueError, RuntimeError, TypeError) as error:
        height, width = picture.pixels.shape[:2]
        raise AttnscopeError(
            f"{name} does not take what its image processor makes of {picture.source}, {width} × {height}: "
            f"{first_line(error)}",
            "preprocessor_config.json and config.json belong to different models",
        ) from error


def sizes_seen(run: Callable[[Probe], Any]) -> set[tuple[int, int]]:
    """Queries and keys of the attentions that come in a run.

    Args:
        run: Runs the model with the probe that it is given.
    """
    sizes: set[tuple[int, int]] = set()

    def observed(call: AttentionCall) -> Tensor:
        sizes.add((call.query.shape[2], call.key.shape[2]))
        return attend(call)

    with torch.no_grad():
        run(observed)
    return sizes
