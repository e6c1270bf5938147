"""Which token of a prompt stands for which part of a picture, family by family of models that read pictures.

The places come from what a processor gives out and from the model's own code, never from a guess. What a processor
makes of a photo is put together again from its tiles. A photo of slopes shows whether they fit: there every pixel says
where in the photo it was.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from attnscope.errors import AttnscopeError
from attnscope.models.hf.senses.eyes_and_ears import tokens_before


@dataclass(frozen=True, eq=False)
class Pane:
    """A picture that a model is given of a photo: all of it put together from tiles, or all of it made small.

    Attributes:
        photo: The number of the photo.
        pixels: As the model is given it, (3, height, width).
        cells: Which picture token stands for each patch, counted from the first, or which key of cross-attention;
            (row, column), int64, -1 = none.
        is_small: Whether it is all of the photo made small, beside one with more detail.
    """

    photo: int
    pixels: Tensor
    cells: Tensor
    is_small: bool = False


@dataclass(frozen=True, eq=False)
class PhotoPrompt:
    """The output of a transformers processor for photos and a question, with the model and the photos.

    Attributes:
        base: The model, without a head.
        processor: Its processor.
        inputs: What the processor returned: arguments of the forward, and more that it says of the photos.
        images: The photos.
    """

    base: Any
    processor: Any
    inputs: Any
    images: Sequence[Image.Image]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return the height and width of each photo."""
        return [(image.height, image.width) for image in self.images]

    @property
    def pixels(self) -> Tensor:
        """Return the pixels as the model gets them."""
        pixels: Tensor = self.inputs["pixel_values"]
        return pixels


Cut = tuple[list[Pane], int]
"""The pictures that a model is given, and how many tokens or keys stand for them in all."""


def unplaced(reason: str) -> AttnscopeError:
    """Return the error that it is not known which token stands for which part of a picture."""
    return AttnscopeError(
        f"the model cannot be shown on pictures: {reason}", "its text alone can be: leave out --image"
    )


# Families ---------------------------------------------------------------------------------------------------------


def one_grid(
    prompt: PhotoPrompt, patch: tuple[int, int], n_before: int = 0, *, is_filled: bool = False
) -> Cut:
    """Cut each photo into one grid of patches, row by row.

    Args:
        prompt: What the processor made of the photos.
        patch: Height and width of a patch, in pixels.
        n_before: How many tokens of each photo stand for no place, before its patches.
        is_filled: Whether what is beyond whole patches is filled up to one; else it is cut off.
    """
    pixels = prompt.pixels
    if len(pixels) != len(prompt.images):
        raise unplaced(f"its processor makes {len(pixels)} pictures of {len(prompt.images)} photos")
    patch_height, patch_width = patch
    if is_filled:
        # At the right and the lower edge: -7 % 5 = 3 pixels are missing to whole patches.
        height, width = pixels.shape[2:]
        pixels = pad(pixels, (0, -width % patch_width, 0, -height % patch_height))
    rows = pixels.shape[2] // patch_height
    columns = pixels.shape[3] // patch_width
    n_each = n_before + rows * columns
    cells = _count(rows, columns) + n_before
    covered = pixels[:, :, : rows * patch_height, : columns * patch_width]
    panes = []
    for number, picture in enumerate(covered):
        panes.append(Pane(number, picture, cells + number * n_each))
    return panes, n_each * len(panes)


def _llava(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    n_before = 0
    if config.vision_feature_select_strategy == "full":
        # The CLS token of the tower stays among the picture tokens.
        n_before = len(tokens_before(prompt.base.vision_tower))
    patch = config.vision_config.patch_size
    return one_grid(prompt, (patch, patch), n_before)


def _gemma3(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    cell = config.vision_config.image_size // round(config.mm_tokens_per_image**0.5)
    return one_grid(prompt, (cell, cell))


def _llava_next(prompt: PhotoPrompt) -> Cut:
    """Have the model pack the numbers of patches in place of their features: they show which token is which patch."""
    from transformers.models.llava_next import modeling_llava_next as code

    grid_shape: Any = code.get_anyres_image_grid_shape
    config = prompt.base.config
    strategy = config.vision_feature_select_strategy
    if strategy != "default" and tokens_before(prompt.base.vision_tower):
        raise unplaced("it keeps the CLS token of each tile among its patches")
    size = config.vision_config.image_size
    patch = config.vision_config.patch_size
    side = size // patch
    row_end = -torch.ones(1, dtype=torch.float64)
    panes = []
    n_tokens = 0
    for number, photo in enumerate(prompt.inputs["image_sizes"]):
        pixels = prompt.pixels[number]
        # The first tile is all of the photo made small.
        down, across = grid_shape(photo, config.image_grid_pinpoints, size)
        n_tiles = 1 + down * across
        # Features of one number: (tile, patch, 1)
        patch_numbers = _count(n_tiles, side * side).double()[..., None]
        packed, _ = prompt.base.pack_image_features([patch_numbers], photo[None], strategy, row_end)
        # Which patch each token stands for, (token,), -1 = the end of a row.
        patch_of_token = packed[0].view(-1).long()
        is_patch = patch_of_token >= 0
        # Which token stands for each patch, -1 = none: (tile * row * column,) -> (tile, row, column)
        token_of_patch = torch.full((n_tiles * side * side,), -1)
        token_of_patch[patch_of_token[is_patch]] = is_patch.nonzero()[:, 0] + n_tokens
        cells = token_of_patch.view(n_tiles, side, side)
        n_tokens += len(patch_of_token)
        # Of the tiles with detail the model keeps what the photo covers; of a narrow photo nothing.
        fine_cells = join_tiles(cells[1:], down, across)
        rows = (fine_cells >= 0).any(1)
        columns = (fine_cells >= 0).any(0)
        has_detail = bool(rows.any())
        if has_detail:
            whole = join_tiles(pixels[1:n_tiles], down, across)
            covered = whole[:, rows.repeat_interleave(patch)][..., columns.repeat_interleave(patch)]
            panes.append(Pane(number, covered, fine_cells[rows][:, columns]))
        panes.append(Pane(number, pixels[0], cells[0], is_small=has_detail))
    return panes, n_tokens


def _idefics3(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    cell = config.vision_config.patch_size * config.scale_factor
    # Have the processor say how many rows and columns of tiles it makes.
    cut = prompt.processor.image_processor(
        [list(prompt.images)], return_row_col_info=True, return_tensors="pt"
    )
    shapes = list(zip(cut["rows"][0], cut["cols"][0], strict=True))
    return _tiles(prompt.pixels[0], cell, shapes)


def _internvl(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    images = prompt.processor.image_processor
    # The processor's own function says how many tiles each photo becomes.
    code: Any = sys.modules[type(images).__module__]
    size = (images.size["height"], images.size["width"])
    shapes = []
    for photo_size in prompt.sizes:
        across, down = code.get_optimal_tiled_canvas(
            photo_size, size, images.min_patches, images.max_patches
        )
        # A single tile holds all of the photo: there are none with more detail.
        if down * across == 1:
            down = across = 0
        shapes.append((down, across))
    cell = round(config.vision_config.patch_size[0] / config.downsample_ratio)
    return _tiles(prompt.pixels, cell, shapes)


def _tiles(tiles: Tensor, cell: int, shapes: Sequence[tuple[int, int]]) -> Cut:
    """Return the cut of photos into tiles, row by row, each photo followed by one tile that holds all of it.

    Args:
        tiles: Their pixels: (tile, 3, height, width).
        cell: Pixels along a side of what one token stands for.
        shapes: Rows and columns of tiles of each photo; (0, 0) = only the tile of all of it.
    """
    n_tiles = sum(down * across + 1 for down, across in shapes)
    if n_tiles != len(tiles):
        raise unplaced(f"its processor makes {len(tiles)} tiles, and says that there are {n_tiles}")
    # Which picture token stands for each patch: (tile, row, column)
    rows = tiles.shape[2] // cell
    columns = tiles.shape[3] // cell
    cells = _count(len(tiles), rows * columns).view(-1, rows, columns)
    panes = []
    first = 0
    for number, (down, across) in enumerate(shapes):
        # The tiles with detail, if there are any, then the one of all of the photo.
        last = first + down * across
        if last > first:
            whole = join_tiles(tiles[first:last], down, across)
            panes.append(Pane(number, whole, join_tiles(cells[first:last], down, across)))
        panes.append(Pane(number, tiles[last], cells[last], is_small=last > first))
        first = last + 1
    return panes, cells.numel()


def _qwen(prompt: PhotoPrompt) -> Cut:
    """Put patches back into rows: they come in the order of the blocks that are merged."""
    images = prompt.processor.image_processor
    merge = images.merge_size
    patch = images.patch_size
    panes = []
    n_patches = 0
    for number, grid in enumerate(prompt.inputs["image_grid_thw"]):
        n_frames, rows, columns = (int(n) for n in grid)
        if n_frames != 1:
            raise unplaced(f"its processor makes {n_frames} frames of a photo")
        down = rows // merge
        across = columns // merge
        patches = prompt.pixels[n_patches : n_patches + rows * columns]
        # (block row, block column, row, column, colour, frame, y, x), of which all frames are alike
        blocks = patches.view(down, across, merge, merge, 3, -1, patch, patch)[..., 0, :, :]
        whole = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        # Each block is one token.
        cells = _count(down, across) + n_patches // merge**2
        panes.append(Pane(number, whole, cells))
        n_patches += rows * columns
    return panes, n_patches // merge**2


def _count(rows: int, columns: int) -> Tensor:
    """Return the numbers from 0 on, row by row: (row, column)."""
    return torch.arange(rows * columns).view(rows, columns)


def join_tiles(tiles: Tensor, down: int, across: int) -> Tensor:
    """Join tiles (tile, ..., height, width), row by row, to one (..., down * height, across * width)."""
    rows = torch.split(tiles[: down * across], across)
    joined = [torch.cat(list(row), -1) for row in rows]
    return torch.cat(joined, -2)


FAMILIES: dict[str, Callable[[PhotoPrompt], Cut]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen,
    "smolvlm": _idefics3,
}
"""Type of a configuration -> the cut of pictures by models that read them among words."""


# Where in the photo -----------------------------------------------------------------------------------------------

_LEAST_SIDE = 16
"""Pixels of a photo below which slopes are too coarse to tell places by."""


def slopes(height: int, width: int) -> NDArray[np.uint8]:
    """Return a photo whose red says how far right a pixel is, whose green how far down, and whose blue is full."""
    down = np.linspace(0, 255, height)
    across = np.linspace(0, 255, width)
    green, red = np.meshgrid(down, across, indexing="ij")
    colours = np.dstack([red, green, np.full_like(red, 255)])
    picture: NDArray[np.uint8] = np.rint(colours).astype(np.uint8)
    return picture


def area_of(
    picture: NDArray[np.uint8], height: int, width: int
) -> tuple[float, float, float, float] | None:
    """Return the area of a photo that a picture covers: left, top, right and lower edge, in pixels.

    The picture is what became of the slopes of the photo's size. Return None for photos of a few pixels. Refuse a
    picture that is not the photo in one piece: it would be shaded in wrong places.
    """
    if min(height, width) < _LEAST_SIDE:
        return None
    is_photo = picture[:, :, 2] > 250  # what fills up is darker
    edges = []
    for axis, size in ((1, width), (0, height)):
        # Fit a line along an axis from places in the picture to places in the photo: (pixel,) each
        in_picture = np.nonzero(is_photo)[axis] + 0.5
        if len(np.unique(in_picture)) < 2:
            return None
        # Red, channel 0, tells places along axis 1; green, channel 1, along axis 0.
        in_photo = picture[:, :, 1 - axis][is_photo] / 255 * (size - 1) + 0.5
        slope, start = np.polyfit(in_picture, in_photo, 1)
        # Filters bend the slope at its ends by a pixel of the photo or of the picture; a shade is 1/255 of a side.
        allowed = 2 * size / 255 + 3 * max(1.0, abs(slope))
        if np.abs(in_photo - (slope * in_picture + start)).max() > allowed:
            raise AttnscopeError(
                "the pictures that the processor makes of this photo do not fit together to the photo",
                "it is not known where its patches lie, so that none is shown",
            )
        end = start + slope * is_photo.shape[axis]
        edges.append((round(float(start), 2), round(float(end), 2)))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom
