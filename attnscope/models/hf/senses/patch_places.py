"""Find out which token of a prompt stands for which part of a picture, for each family of vision-language models.

A processor may cut a photo into *tiles*, squares of pixels that the model reads one by one, and the model may merge
patches. The functions here join the tiles to one picture again, as the processor and the model's own code arrange them.
Such a picture, with the token of each patch, is an `ImageView`.

To test the arrangement, a photo is processed whose colours encode the position of each pixel (`make_colour_ramps`). In
the joined picture these colours must be in order (`find_covered_area`).
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
from attnscope.models.hf.senses.media_readers import list_prefix_tokens


@dataclass(frozen=True, eq=False)
class ImageView:
    """Hold one picture of a photo that the model reads: the joined tiles, or a thumbnail of the whole photo.

    Attributes:
        photo: The index of the photo.
        pixels: The normalised pixels that the model reads, (3, height, width).
        token_indices: The token that stands for each patch, counted among the picture tokens of the prompt: (row,
            column), int64; -1 = no token. If words attend to the picture by cross-attention, the prompt has no picture
            tokens. Then each number is that of the patch's key in cross-attention.
        is_thumbnail: Whether it shows the whole photo in a small size, and the same photo also comes in tiles.
    """

    photo: int
    pixels: Tensor
    token_indices: Tensor
    is_thumbnail: bool = False


@dataclass(frozen=True, eq=False)
class PhotoPrompt:
    """Hold the output of a transformers processor for photos and a question, with the model and the photos.

    Attributes:
        base: The model without the head for its task.
        processor: The model's processor.
        inputs: The output of the processor: arguments of the forward by name, and sizes of photos and tiles.
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
        """Return the pixels that the processor made. Their shape depends on the family."""
        pixels: Tensor = self.inputs["pixel_values"]
        return pixels


ViewsAndCount = tuple[list[ImageView], int]
"""(views of all photos, number of tokens or keys that stand for them in total)."""


def make_placement_error(reason: str) -> AttnscopeError:
    """Return the error for a picture whose patches cannot be assigned to tokens."""
    return AttnscopeError(
        f"the model cannot be shown on pictures: {reason}", "its text alone can be: leave out --image"
    )


# Families ---------------------------------------------------------------------------------------------------------


def make_grid_views(
    prompt: PhotoPrompt, patch: tuple[int, int], n_before: int = 0, *, is_filled: bool = False
) -> ViewsAndCount:
    """Return each photo as one grid of patches. The tokens of the patches come row by row.

    Args:
        prompt: The processed photos; pixels are (photo, 3, height, width).
        patch: Height and width of a patch, in pixels.
        n_before: The number of tokens of each photo before its patches, such as CLS.
        is_filled: Whether an incomplete patch at the edge is padded to a whole patch; else it is cut off.
    """
    pixels = prompt.pixels
    if len(pixels) != len(prompt.images):
        raise make_placement_error(
            f"its processor makes {len(pixels)} pictures of {len(prompt.images)} photos"
        )
    patch_height, patch_width = patch
    if is_filled:
        # Pad the right and the lower edge. For example, 7 pixels lack -7 % 5 = 3 pixels to whole patches of 5.
        height, width = pixels.shape[2:]
        pixels = pad(pixels, (0, -width % patch_width, 0, -height % patch_height))
    rows = pixels.shape[2] // patch_height
    columns = pixels.shape[3] // patch_width
    n_tokens_per_photo = n_before + rows * columns
    token_indices = _number_patches(rows, columns) + n_before
    covered_pixels = pixels[:, :, : rows * patch_height, : columns * patch_width]
    views = [
        ImageView(number, picture, token_indices + number * n_tokens_per_photo)
        for number, picture in enumerate(covered_pixels)
    ]
    return views, n_tokens_per_photo * len(views)


def _view_llava(prompt: PhotoPrompt) -> ViewsAndCount:
    config = prompt.base.config
    n_before = 0
    if config.vision_feature_select_strategy == "full":
        # With "full", the CLS token of the vision tower is one of the picture tokens.
        n_before = len(list_prefix_tokens(prompt.base.vision_tower))
    patch = config.vision_config.patch_size
    return make_grid_views(prompt, (patch, patch), n_before)


def _view_gemma3(prompt: PhotoPrompt) -> ViewsAndCount:
    config = prompt.base.config
    # The tokens form a square grid. Each token stands for a square of merged patches, whose side is `token_px`.
    token_px = config.vision_config.image_size // round(config.mm_tokens_per_image**0.5)
    return make_grid_views(prompt, (token_px, token_px))


def _view_llava_next(prompt: PhotoPrompt) -> ViewsAndCount:
    """Join tiles by the model's own `pack_image_features`, which arranges the features of patches as tokens.

    `pack_image_features` takes a vector of features per patch, drops the patches outside of the photo, and returns a
    vector per token. Here each vector holds one number, the index of the patch. So the output holds the index of the
    patch that each token stands for.
    """
    from transformers.models.llava_next import modeling_llava_next as code

    grid_shape: Any = code.get_anyres_image_grid_shape
    config = prompt.base.config
    strategy = config.vision_feature_select_strategy
    if strategy != "default" and list_prefix_tokens(prompt.base.vision_tower):
        raise make_placement_error("it keeps the CLS token of each tile among its patches")
    size = config.vision_config.image_size
    patch = config.vision_config.patch_size
    patches_per_side = size // patch
    # `pack_image_features` adds this vector, as one more token, at the end of each row. -1 is the index of no patch.
    row_end = -torch.ones(1, dtype=torch.float64)
    views = []
    n_tokens = 0
    for number, photo in enumerate(prompt.inputs["image_sizes"]):
        pixels = prompt.pixels[number]
        # The first tile is the thumbnail.
        tile_rows, tile_columns = grid_shape(photo, config.image_grid_pinpoints, size)
        n_tiles = 1 + tile_rows * tile_columns
        # Patch indices in place of features, (tile, patch, 1). Features are floats; float64 holds each index exactly.
        patch_indices = _number_patches(n_tiles, patches_per_side * patches_per_side).double()[..., None]
        packed, _ = prompt.base.pack_image_features([patch_indices], photo[None], strategy, row_end)
        # The patch that each token stands for: (token,)
        patch_of_token = packed[0].view(-1).long()
        is_patch = patch_of_token >= 0
        # Invert it, to the token of each patch; -1 = no token: (tile * row * column,) -> (tile, row, column)
        token_of_patch = torch.full((n_tiles * patches_per_side * patches_per_side,), -1)
        token_of_patch[patch_of_token[is_patch]] = is_patch.nonzero()[:, 0] + n_tokens
        token_indices = token_of_patch.view(n_tiles, patches_per_side, patches_per_side)
        n_tokens += len(patch_of_token)
        # Join the other tiles, (row, column). Only rows and columns inside of the photo have tokens; none has if the
        # photo is very narrow.
        fine_indices = join_tiles(token_indices[1:], tile_rows, tile_columns)
        rows = (fine_indices >= 0).any(1)
        columns = (fine_indices >= 0).any(0)
        has_detail = bool(rows.any())
        if has_detail:
            joined_pixels = join_tiles(pixels[1:n_tiles], tile_rows, tile_columns)
            covered_pixels = joined_pixels[:, rows.repeat_interleave(patch)][
                ..., columns.repeat_interleave(patch)
            ]
            views.append(ImageView(number, covered_pixels, fine_indices[rows][:, columns]))
        views.append(ImageView(number, pixels[0], token_indices[0], is_thumbnail=has_detail))
    return views, n_tokens


def _view_idefics3(prompt: PhotoPrompt) -> ViewsAndCount:
    config = prompt.base.config
    token_px = config.vision_config.patch_size * config.scale_factor
    # Process the photos once more with an option that returns the numbers of rows and columns of tiles.
    cut = prompt.processor.image_processor(
        [list(prompt.images)], return_row_col_info=True, return_tensors="pt"
    )
    shapes = list(zip(cut["rows"][0], cut["cols"][0], strict=True))
    return _view_tiles(prompt.pixels[0], token_px, shapes)


def _view_internvl(prompt: PhotoPrompt) -> ViewsAndCount:
    config = prompt.base.config
    image_processor = prompt.processor.image_processor
    # The Python module that defines the processor's class also defines get_optimal_tiled_canvas.
    code: Any = sys.modules[type(image_processor).__module__]
    size = (image_processor.size["height"], image_processor.size["width"])
    shapes = []
    for photo_size in prompt.sizes:
        tile_columns, tile_rows = code.get_optimal_tiled_canvas(
            photo_size, size, image_processor.min_patches, image_processor.max_patches
        )
        # A photo of a single tile has no other tiles: the thumbnail alone.
        shapes.append((0, 0) if tile_rows * tile_columns == 1 else (tile_rows, tile_columns))
    token_px = round(config.vision_config.patch_size[0] / config.downsample_ratio)
    return _view_tiles(prompt.pixels, token_px, shapes)


def _view_tiles(tiles: Tensor, token_px: int, shapes: Sequence[tuple[int, int]]) -> ViewsAndCount:
    """Return the views of photos whose tiles come row by row. The last tile of each photo is its thumbnail.

    Args:
        tiles: The pixels of all tiles of all photos: (tile, 3, height, width).
        token_px: The side of the square that one token stands for, in pixels.
        shapes: (rows, columns) of tiles of each photo, without the thumbnail; (0, 0) = the thumbnail alone.
    """
    n_tiles = sum(tile_rows * tile_columns + 1 for tile_rows, tile_columns in shapes)
    if n_tiles != len(tiles):
        raise make_placement_error(
            f"its processor makes {len(tiles)} tiles, and says that there are {n_tiles}"
        )
    # The token of each patch, numbered over all tiles: (tile, row, column)
    rows = tiles.shape[2] // token_px
    columns = tiles.shape[3] // token_px
    token_indices = _number_patches(len(tiles), rows * columns).view(-1, rows, columns)
    views = []
    first_tile = 0
    for number, (tile_rows, tile_columns) in enumerate(shapes):
        # The tiles to join, if there are any, then the thumbnail, which is `last_tile`.
        last_tile = first_tile + tile_rows * tile_columns
        if last_tile > first_tile:
            joined_pixels = join_tiles(tiles[first_tile:last_tile], tile_rows, tile_columns)
            joined_indices = join_tiles(token_indices[first_tile:last_tile], tile_rows, tile_columns)
            views.append(ImageView(number, joined_pixels, joined_indices))
        views.append(
            ImageView(
                number, tiles[last_tile], token_indices[last_tile], is_thumbnail=last_tile > first_tile
            )
        )
        first_tile = last_tile + 1
    return views, token_indices.numel()


def _view_qwen(prompt: PhotoPrompt) -> ViewsAndCount:
    """Put patches back into rows. They come block by block; one token stands for a block of merge x merge patches."""
    image_processor = prompt.processor.image_processor
    merge = image_processor.merge_size
    patch = image_processor.patch_size
    views = []
    n_patches = 0
    # The processor treats a photo as a video of two equal frames, which form one step in time.
    for number, (_, rows, columns) in enumerate(prompt.inputs["image_grid_thw"].tolist()):
        token_rows = rows // merge
        token_columns = columns // merge
        patches = prompt.pixels[n_patches : n_patches + rows * columns]
        # Keep the first frame: (block row, block column, row in block, column in block, colour, y, x)
        blocks = patches.view(token_rows, token_columns, merge, merge, 3, -1, patch, patch)[..., 0, :, :]
        # (colour, block row, row in block, y, block column, column in block, x) -> (3, height, width)
        joined_pixels = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        token_indices = _number_patches(token_rows, token_columns) + n_patches // merge**2
        views.append(ImageView(number, joined_pixels, token_indices))
        n_patches += rows * columns
    return views, n_patches // merge**2


def _number_patches(rows: int, columns: int) -> Tensor:
    """Return the numbers 0, 1, 2, … of patches, row by row: (row, column)."""
    return torch.arange(rows * columns).view(rows, columns)


def join_tiles(tiles: Tensor, tile_rows: int, tile_columns: int) -> Tensor:
    """Join tiles (tile, ..., height, width), row by row, to one (..., tile_rows * height, tile_columns * width)."""
    rows = torch.split(tiles[: tile_rows * tile_columns], tile_columns)
    joined = [torch.cat(list(row), -1) for row in rows]
    return torch.cat(joined, -2)


FAMILIES: dict[str, Callable[[PhotoPrompt], ViewsAndCount]] = {
    "gemma3": _view_gemma3,
    "idefics3": _view_idefics3,
    "internvl": _view_internvl,
    "llava": _view_llava,
    "llava_next": _view_llava_next,
    "qwen2_5_vl": _view_qwen,
    "qwen2_vl": _view_qwen,
    "qwen3_vl": _view_qwen,
    "smolvlm": _view_idefics3,
}
"""`model_type` of a configuration -> function that returns the views of photos, with the number of their tokens.

It holds the models that read pictures as tokens among those of their text.
"""


# The area of the photo that a view covers --------------------------------------------------------------------------

_MIN_SIDE_PX = 16
"""Photos with a shorter side have too few colours for `find_covered_area`."""


def make_colour_ramps(height: int, width: int) -> NDArray[np.uint8]:
    """Return a test photo, (height, width, 3): red rises from left to right, green from top to bottom; blue is 255."""
    greens = np.linspace(0, 255, height)
    reds = np.linspace(0, 255, width)
    green, red = np.meshgrid(greens, reds, indexing="ij")
    colours = np.dstack([red, green, np.full_like(red, 255)])
    picture: NDArray[np.uint8] = np.rint(colours).astype(np.uint8)
    return picture


def find_covered_area(
    picture: NDArray[np.uint8], height: int, width: int
) -> tuple[float, float, float, float] | None:
    """Return the area of a photo that a picture covers: (left, top, right, bottom), in pixels of the photo.

    Return None if the photo or the picture has too few pixels to tell.

    Args:
        picture: The picture that the processor made of the colour ramps, (row, column, 3).
        height: The height of the photo, in pixels.
        width: The width of the photo, in pixels.

    Raises:
        AttnscopeError: The colours are not in order. Attention would be drawn in wrong places of the photo.
    """
    if min(height, width) < _MIN_SIDE_PX:
        return None
    # Blue is 255 in the photo, and lower in the padding that a processor adds.
    is_photo = picture[:, :, 2] > 250
    edges = []
    for axis, size in ((1, width), (0, height)):
        # The position of each pixel along this axis in the picture, (pixel,)
        picture_positions = np.nonzero(is_photo)[axis] + 0.5
        if len(np.unique(picture_positions)) < 2:
            return None
        # Its position in the photo, by its colour, (pixel,). Red, channel 0, rises along axis 1; green, channel 1,
        # along axis 0.
        photo_positions = picture[:, :, 1 - axis][is_photo] / 255 * (size - 1) + 0.5
        slope, start = np.polyfit(picture_positions, photo_positions, 1)
        # Resizing shifts colours at the ends of a ramp by about a pixel of the photo or of the picture. Colours are
        # rounded to 1/255 of a side.
        max_difference = 2 * size / 255 + 3 * max(1.0, abs(slope))
        if np.abs(photo_positions - (slope * picture_positions + start)).max() > max_difference:
            raise AttnscopeError(
                "the pictures that the processor makes of this photo do not fit together to the photo",
                "it is not known where its patches lie, so that none is shown",
            )
        end = start + slope * is_photo.shape[axis]
        edges.append((round(float(start), 2), round(float(end), 2)))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom
