"""Find out which token of a prompt stands for which part of a picture, for each family of vision-language models.

A processor may cut a photo into tiles of pixels, and the model may merge patches. The functions here join the tiles
again, by what the processor and the model's own code say. To test that, a photo is processed whose colours tell where
each pixel was (`slopes`): joined, its tiles must show them in order (`area_of`).
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
from attnscope.models.hf.senses.media_readers import tokens_before


@dataclass(frozen=True, eq=False)
class ImageView:
    """A picture that a model is given of a photo: joined from tiles, or the whole photo in a small size.

    Attributes:
        photo: The index of the photo.
        pixels: The normalised pixels that the model gets, (3, height, width).
        cells: Index of the token that stands for each patch, among all tokens of pictures; or of the key, if words
            attend to the picture by cross-attention. (row, column), int64; -1 = none.
        is_small: Whether it is the whole photo in a small size, where the same photo also comes in tiles.
    """

    photo: int
    pixels: Tensor
    cells: Tensor
    is_small: bool = False


@dataclass(frozen=True, eq=False)
class PhotoPrompt:
    """The output of a transformers processor for photos and a question, with the model and the photos.

    Attributes:
        base: The model without the head for its task.
        processor: Its processor.
        inputs: What the processor returned: arguments of the forward by name, and sizes of photos and tiles.
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
        """Return the pixels that the processor made; their shape depends on the family."""
        pixels: Tensor = self.inputs["pixel_values"]
        return pixels


Cut = tuple[list[ImageView], int]
"""The pictures that a model is given of all photos, and how many tokens or keys stand for them in all."""


def unplaced(reason: str) -> AttnscopeError:
    """Return the error for a picture of which it is not known which token stands for which part."""
    return AttnscopeError(
        f"the model cannot be shown on pictures: {reason}", "its text alone can be: leave out --image"
    )


# Families ---------------------------------------------------------------------------------------------------------


def one_grid(
    prompt: PhotoPrompt, patch: tuple[int, int], n_before: int = 0, *, is_filled: bool = False
) -> Cut:
    """Return each photo as one grid of patches, whose tokens come row by row.

    Args:
        prompt: The processed photos; pixels are (photo, 3, height, width).
        patch: Height and width of a patch, in pixels.
        n_before: How many tokens of each photo come before its patches, such as CLS.
        is_filled: Whether pixels beyond the last whole patch are padded to a patch; else they are cut off.
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
    panes = [
        ImageView(number, picture, cells + number * n_each) for number, picture in enumerate(covered)
    ]
    return panes, n_each * len(panes)


def _llava(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    n_before = 0
    if config.vision_feature_select_strategy == "full":
        # "full" keeps the CLS token of the tower among the picture tokens.
        n_before = len(tokens_before(prompt.base.vision_tower))
    patch = config.vision_config.patch_size
    return one_grid(prompt, (patch, patch), n_before)


def _gemma3(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    # Tokens are a square grid, each of some merged patches: the side of what one token stands for, in pixels
    cell = config.vision_config.image_size // round(config.mm_tokens_per_image**0.5)
    return one_grid(prompt, (cell, cell))


def _llava_next(prompt: PhotoPrompt) -> Cut:
    """Join tiles as the model does: its code arranges the features of patches as tokens, cut to the photo's shape.

    It is given the index of each patch in place of its features, so the tokens tell which patches they stand for.
    """
    from transformers.models.llava_next import modeling_llava_next as code

    grid_shape: Any = code.get_anyres_image_grid_shape
    config = prompt.base.config
    strategy = config.vision_feature_select_strategy
    if strategy != "default" and tokens_before(prompt.base.vision_tower):
        raise unplaced("it keeps the CLS token of each tile among its patches")
    size = config.vision_config.image_size
    patch = config.vision_config.patch_size
    side = size // patch
    # The model adds a token at the end of each row; -1 marks it.
    row_end = -torch.ones(1, dtype=torch.float64)
    panes = []
    n_tokens = 0
    for number, photo in enumerate(prompt.inputs["image_sizes"]):
        pixels = prompt.pixels[number]
        # The first tile is the whole photo in a small size.
        down, across = grid_shape(photo, config.image_grid_pinpoints, size)
        n_tiles = 1 + down * across
        # Indices in place of features: (tile, patch, 1)
        patch_indices = _count(n_tiles, side * side).double()[..., None]
        packed, _ = prompt.base.pack_image_features([patch_indices], photo[None], strategy, row_end)
        # The patch of each token: (token,)
        patch_of_token = packed[0].view(-1).long()
        is_patch = patch_of_token >= 0
        # The token of each patch, -1 = none: (tile * row * column,) -> (tile, row, column)
        token_of_patch = torch.full((n_tiles * side * side,), -1)
        token_of_patch[patch_of_token[is_patch]] = is_patch.nonzero()[:, 0] + n_tokens
        cells = token_of_patch.view(n_tiles, side, side)
        n_tokens += len(patch_of_token)
        # In the other tiles only rows and columns that the photo covers have tokens; if it is narrow, none has.
        fine_cells = join_tiles(cells[1:], down, across)
        rows = (fine_cells >= 0).any(1)
        columns = (fine_cells >= 0).any(0)
        has_detail = bool(rows.any())
        if has_detail:
            whole = join_tiles(pixels[1:n_tiles], down, across)
            covered = whole[:, rows.repeat_interleave(patch)][..., columns.repeat_interleave(patch)]
            panes.append(ImageView(number, covered, fine_cells[rows][:, columns]))
        panes.append(ImageView(number, pixels[0], cells[0], is_small=has_detail))
    return panes, n_tokens


def _idefics3(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    cell = config.vision_config.patch_size * config.scale_factor
    # Process the photos once more, so that the processor says how many rows and columns of tiles it makes.
    cut = prompt.processor.image_processor(
        [list(prompt.images)], return_row_col_info=True, return_tensors="pt"
    )
    shapes = list(zip(cut["rows"][0], cut["cols"][0], strict=True))
    return _tiles(prompt.pixels[0], cell, shapes)


def _internvl(prompt: PhotoPrompt) -> Cut:
    config = prompt.base.config
    image_processor = prompt.processor.image_processor
    # The module of the processor's class has the function that chooses the tiles of a photo.
    code: Any = sys.modules[type(image_processor).__module__]
    size = (image_processor.size["height"], image_processor.size["width"])
    shapes = []
    for photo_size in prompt.sizes:
        across, down = code.get_optimal_tiled_canvas(
            photo_size, size, image_processor.min_patches, image_processor.max_patches
        )
        # A photo of one tile comes only as a whole.
        shapes.append((0, 0) if down * across == 1 else (down, across))
    cell = round(config.vision_config.patch_size[0] / config.downsample_ratio)
    return _tiles(prompt.pixels, cell, shapes)


def _tiles(tiles: Tensor, cell: int, shapes: Sequence[tuple[int, int]]) -> Cut:
    """Return photos of tiles, which come row by row; the last tile of each photo is the whole photo in a small size.

    Args:
        tiles: The pixels of all tiles: (tile, 3, height, width).
        cell: The side of the square that one token stands for, in pixels.
        shapes: Rows and columns of tiles of each photo, without its last; (0, 0) = there are no others.
    """
    n_tiles = sum(down * across + 1 for down, across in shapes)
    if n_tiles != len(tiles):
        raise unplaced(f"its processor makes {len(tiles)} tiles, and says that there are {n_tiles}")
    # The token of each patch: (tile, row, column)
    rows = tiles.shape[2] // cell
    columns = tiles.shape[3] // cell
    cells = _count(len(tiles), rows * columns).view(-1, rows, columns)
    panes = []
    first = 0
    for number, (down, across) in enumerate(shapes):
        # The tiles to join, if there are any, then the whole photo.
        last = first + down * across
        if last > first:
            whole = join_tiles(tiles[first:last], down, across)
            panes.append(ImageView(number, whole, join_tiles(cells[first:last], down, across)))
        panes.append(ImageView(number, tiles[last], cells[last], is_small=last > first))
        first = last + 1
    return panes, cells.numel()


def _qwen(prompt: PhotoPrompt) -> Cut:
    """Put patches back into rows. They come block by block, and each block of merge x merge patches is one token."""
    image_processor = prompt.processor.image_processor
    merge = image_processor.merge_size
    patch = image_processor.patch_size
    panes = []
    n_patches = 0
    # A photo has one step in time, of which the processor makes two equal frames.
    for number, (_, rows, columns) in enumerate(prompt.inputs["image_grid_thw"].tolist()):
        down = rows // merge
        across = columns // merge
        patches = prompt.pixels[n_patches : n_patches + rows * columns]
        # (block row, block column, row in block, column in block, colour, y, x), of the first frame
        blocks = patches.view(down, across, merge, merge, 3, -1, patch, patch)[..., 0, :, :]
        # (colour, block row, row in block, y, block column, column in block, x) -> (3, height, width)
        whole = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        cells = _count(down, across) + n_patches // merge**2
        panes.append(ImageView(number, whole, cells))
        n_patches += rows * columns
    return panes, n_patches // merge**2


def _count(rows: int, columns: int) -> Tensor:
    """Return the indices from 0 on, row by row: (row, column)."""
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
"""`model_type` of a configuration -> function for models that read pictures among the tokens of their text."""


# Where in the photo -----------------------------------------------------------------------------------------------

_MIN_SIDE = 16
"""The shortest side of a photo, in pixels, of which slopes tell the places of pixels."""


def slopes(height: int, width: int) -> NDArray[np.uint8]:
    """Return a photo, (height, width, 3): red rises from left to right, green from top to bottom; blue is 255."""
    down = np.linspace(0, 255, height)
    across = np.linspace(0, 255, width)
    green, red = np.meshgrid(down, across, indexing="ij")
    colours = np.dstack([red, green, np.full_like(red, 255)])
    picture: NDArray[np.uint8] = np.rint(colours).astype(np.uint8)
    return picture


def area_of(
    picture: NDArray[np.uint8], height: int, width: int
) -> tuple[float, float, float, float] | None:
    """Return the area of a photo that a picture covers: left, top, right and lower edge, in pixels; None = too few.

    Args:
        picture: What the processor made of the slopes, (row, column, 3).
        height: The height of the photo, in pixels; likewise `width`.
        width: Its width.

    Raises:
        AttnscopeError: The picture does not show the slopes in order: weights would be drawn in wrong places.
    """
    if min(height, width) < _MIN_SIDE:
        return None
    # Blue is lower in what a processor adds to a photo, its padding.
    is_photo = picture[:, :, 2] > 250
    edges = []
    for axis, size in ((1, width), (0, height)):
        # For each pixel, take its place along this axis in the picture, and by its colour that in the photo: (pixel,)
        in_picture = np.nonzero(is_photo)[axis] + 0.5
        if len(np.unique(in_picture)) < 2:
            return None
        # Red, channel 0, rises along axis 1; green, channel 1, along axis 0.
        in_photo = picture[:, :, 1 - axis][is_photo] / 255 * (size - 1) + 0.5
        slope, start = np.polyfit(in_picture, in_photo, 1)
        # Resizing bends the slope at its ends, by a pixel of the photo or of the picture; a shade is 1/255 of a side.
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
