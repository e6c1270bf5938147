"""Which token of a prompt stands for which part of a picture, family by family of models that read pictures.

The places come from what a processor gives out and from the model's own code, never from a guess. What a processor
makes of a photo is put together again from its tiles; that they are put together rightly is seen from a photo of
slopes, which the same processor is given: there every pixel says where in the photo it was.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from attnscope.errors import AttnscopeError
from attnscope.models.hf.senses.seeing import tokens_before

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pane:
    """A picture that a model is given of a photo: all of it put together from tiles, or all of it made small."""

    photo: int  # which photo
    is_small: bool  # whether it is all of the photo made small, beside one with more detail
    pixels: Tensor  # as the model is given it, (3, height, width)
    # of each patch which picture token of the prompt stands for it, counted from the first, (row, column); of models
    # with cross-attention, which key
    places: Places


@dataclass(frozen=True, eq=False)
class PhotoPrompt:
    """What the processor of a transformers model made of photos and a question."""

    base: Any
    processor: Any
    inputs: Any
    images: Sequence[Image.Image]
    n_tokens: int  # picture tokens that the prompt has, or keys that cross-attention goes to

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each photo."""
        return [(image.height, image.width) for image in self.images]

    @property
    def pixels(self) -> Tensor:
        """Return the pixels as the model gets them."""
        pixels: Tensor = self.inputs["pixel_values"]
        return pixels


class Unplaced(Exception):  # noqa: N818 - who asks says it in one line
    """It is not known which token stands for which part of a picture; the message says why."""


def panes_of(output: PhotoPrompt, cut: Callable[[PhotoPrompt], list[Pane]]) -> list[Pane]:
    """Return the pictures that a model is given, each with its tokens, as its family cuts them.

    Raises `Unplaced` where the family is not known, or what its processor gives does not fit the prompt.
    """
    panes = cut(output)
    places = np.concatenate([pane.places.ravel() for pane in panes])
    places = places[places >= 0]
    if len(places) and (places.max() >= output.n_tokens or len(np.unique(places)) != len(places)):
        raise Unplaced(f"its processor gives {output.n_tokens} picture tokens, fewer than the patches that it cuts")
    return panes


# Families ---------------------------------------------------------------------------------------------------------


def one_grid(output: PhotoPrompt, high: int, wide: int, before: int = 0) -> list[Pane]:
    """One picture a photo, whose tokens are its patches, row by row, after some that stand for no place."""
    if len(output.pixels) != len(output.sizes):
        raise Unplaced(f"its processor makes {len(output.pixels)} pictures of {len(output.sizes)} photos")
    rows = output.pixels.shape[2] // high
    columns = output.pixels.shape[3] // wide
    each = rows * columns + before
    if not rows or not columns or each * len(output.pixels) != output.n_tokens:
        patches = f"{len(output.pixels)} x {rows} x {columns} patches"
        raise Unplaced(f"its processor gives {output.n_tokens} picture tokens, and {patches}")
    return [
        Pane(
            number,
            False,
            pixels[:, : rows * high, : columns * wide],
            np.arange(rows * columns).reshape(rows, columns) + number * each + before,
        )
        for number, pixels in enumerate(output.pixels)
    ]


def _llava(output: PhotoPrompt) -> list[Pane]:
    config = output.base.config
    keeps_all = config.vision_feature_select_strategy == "full"
    before = len(tokens_before(output.base.vision_tower)) if keeps_all else 0
    return one_grid(output, *_height_width(config.vision_config.patch_size), before)


def _paligemma(output: PhotoPrompt) -> list[Pane]:
    return one_grid(output, *_height_width(output.base.config.vision_config.patch_size))


def _gemma3(output: PhotoPrompt) -> list[Pane]:
    config = output.base.config
    side = round(config.mm_tokens_per_image**0.5)
    if side * side != config.mm_tokens_per_image or config.vision_config.image_size % side:
        raise Unplaced(f"{config.mm_tokens_per_image} tokens a picture are no square of patches")
    if len(output.pixels) != len(output.sizes):
        raise Unplaced("its processor cuts photos into crops (do_pan_and_scan), and does not say where they lie")
    cell = config.vision_config.image_size // side
    return one_grid(output, cell, cell)


def _llava_next(output: PhotoPrompt) -> list[Pane]:
    """Return the model packs numbers in place of features: what comes out where is then known, whatever it cuts off."""
    from transformers.models.llava_next import modeling_llava_next as code

    grid_shape: Any = code.get_anyres_image_grid_shape
    config = output.base.config
    model = output.base
    size = config.vision_config.image_size
    patch = config.vision_config.patch_size
    side = size // patch
    if config.vision_feature_select_strategy != "default" and tokens_before(model.vision_tower):
        raise Unplaced("it keeps the CLS token of each tile among its patches")
    panes = []
    first = 0
    for number, (pixels, photo) in enumerate(zip(output.pixels, output.inputs["image_sizes"], strict=True)):
        down, across = grid_shape(photo, config.image_grid_pinpoints, size)
        n_tiles = 1 + down * across
        numbers = torch.arange(1, n_tiles * side * side + 1, dtype=torch.float64).view(n_tiles, side * side, 1)
        packed, _ = model.pack_image_features(
            [numbers], photo[None], config.vision_feature_select_strategy, torch.zeros(1, dtype=torch.float64)
        )
        order = packed[0].view(-1).long().numpy() - 1  # -1 where a row ends
        at = np.full(n_tiles * side * side, -1, np.int64)
        at[order[order >= 0]] = np.flatnonzero(order >= 0) + first
        small = at[: side * side].reshape(side, side)
        fine = join_tiles(at[side * side :].reshape(-1, side, side), down, across)
        first += len(order)
        if not (fine >= 0).any():  # of a narrow photo it keeps what is small alone
            panes.append(Pane(number, False, pixels[0], small))
            continue
        rows = np.flatnonzero((fine >= 0).any(1))
        columns = np.flatnonzero((fine >= 0).any(0))
        top = rows[0]
        bottom = rows[-1] + 1
        left = columns[0]
        right = columns[-1] + 1
        whole = join_tiles(pixels[1:n_tiles], down, across)
        pixels_kept = whole[:, top * patch : bottom * patch, left * patch : right * patch]
        panes += [Pane(number, False, pixels_kept, fine[top:bottom, left:right]), Pane(number, True, pixels[0], small)]
    return _require_all(panes, first, output)


def _idefics3(output: PhotoPrompt) -> list[Pane]:
    config = output.base.config
    images = output.processor.image_processor
    cell = config.vision_config.patch_size * config.scale_factor
    info = images([list(output.images)], return_row_col_info=True, return_tensors="pt")
    rows = info["rows"][0]
    columns = info["cols"][0]
    return _tiles(output, output.pixels[0], cell, list(zip(rows, columns, strict=True)))


def _internvl(output: PhotoPrompt) -> list[Pane]:
    config = output.base.config
    images = output.processor.image_processor
    canvas = importlib.import_module(type(images).__module__).get_optimal_tiled_canvas
    size = (images.size["height"], images.size["width"])
    high, _ = _height_width(config.vision_config.patch_size)
    shapes = [canvas(photo, size, images.min_patches, images.max_patches)[::-1] for photo in output.sizes]
    shapes = [(0, 0) if down * across == 1 else (down, across) for down, across in shapes]
    return _tiles(output, output.pixels, round(high / config.downsample_ratio), shapes)


def _tiles(output: PhotoPrompt, tiles: Tensor, cell: int, shapes: Sequence[tuple[int, int]]) -> list[Pane]:
    """Photos cut into rows and columns of tiles, row by row, then all of it in one tile; (0, 0) = that alone."""
    high = tiles.shape[2] // cell
    wide = tiles.shape[3] // cell
    panes = []
    tile = 0
    for number, (down, across) in enumerate(shapes):
        n = down * across
        if tile + n + 1 > len(tiles):
            raise Unplaced(f"its processor makes {len(tiles)} tiles, and says that there are more")
        at = np.arange((n + 1) * high * wide).reshape(n + 1, high, wide) + tile * high * wide
        if n:
            panes.append(
                Pane(number, False, join_tiles(tiles[tile : tile + n], down, across), join_tiles(at[:n], down, across))
            )
        panes.append(Pane(number, n > 0, tiles[tile + n], at[n]))
        tile += n + 1
    if tile != len(tiles):
        raise Unplaced(f"its processor makes {len(tiles)} tiles, and says that there are {tile}")
    return _require_all(panes, tile * high * wide, output)


def _qwen(output: PhotoPrompt) -> list[Pane]:
    """Patches come in order of the blocks that are merged; their numbers are put back into rows."""
    images = output.processor.image_processor
    merge = images.merge_size
    patch = images.patch_size
    frames = images.temporal_patch_size
    panes = []
    row = 0
    first = 0
    for number, grid in enumerate(output.inputs["image_grid_thw"]):
        time, rows, columns = (int(n) for n in grid)
        if time != 1:
            raise Unplaced(f"its processor makes {time} frames of a photo")
        patches = output.pixels[row : row + rows * columns]
        blocks = patches.view(rows // merge, columns // merge, merge, merge, 3, frames, patch, patch)[..., 0, :, :]
        whole = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        down = rows // merge
        across = columns // merge
        panes.append(Pane(number, False, whole, np.arange(down * across).reshape(down, across) + first))
        row = row + rows * columns
        first = first + down * across
    return _require_all(panes, first, output)


def _require_all(panes: list[Pane], n: int, output: PhotoPrompt) -> list[Pane]:
    if n != output.n_tokens:
        raise Unplaced(f"its processor gives {output.n_tokens} picture tokens where its grid says {n}")
    return panes


def _height_width(size: Any) -> tuple[int, int]:
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    return int(high), int(wide)


def join_tiles(tiles: Any, down: int, across: int) -> Any:
    """Tiles (tile, ..., height, width), row by row, as one (..., down * height, across * width)."""
    stack = torch.as_tensor(tiles)
    rows = [torch.cat(list(stack[row * across : (row + 1) * across]), -1) for row in range(down)]
    whole = torch.cat(rows, -2)
    return whole if isinstance(tiles, Tensor) else whole.numpy()


FAMILIES: dict[str, Callable[[PhotoPrompt], list[Pane]]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen,
    "smolvlm": _idefics3,
    "vipllava": _llava,
}
"""Of models that read pictures among words, by the type of their configuration."""


# Where in the photo -----------------------------------------------------------------------------------------------

_LEAST_SIDE = 16
"""Pixels of a photo below which slopes are too coarse to tell places by."""


def slopes(height: int, width: int) -> NDArray[np.uint8]:
    """Return a photo whose red says how far right a pixel is, whose green how far down, and whose blue is full."""
    y, x = np.mgrid[:height, :width]
    shades = (255 * x / max(1, width - 1), 255 * y / max(1, height - 1), np.full_like(x, 255))
    picture: NDArray[np.uint8] = np.rint(np.stack(shades, -1)).astype(np.uint8)
    return picture


def area_of(picture: NDArray[np.uint8], height: int, width: int) -> tuple[float, float, float, float] | None:
    """Return what of a photo a picture covers, from what became of its slopes.

    Left, top, right and lower edge, in pixels.

    `shown` are the slopes of the photo's size, as the processor made them and they were put together again. None for
    photos of a few pixels. A picture that is not the photo in one piece is refused: it would be shaded in wrong places.
    """
    if min(height, width) < _LEAST_SIDE:
        return None
    edges = []
    for channel, size in ((0, width), (1, height)):
        colours = picture.swapaxes(0, channel)  # what is asked for goes along the second axis
        values, real = colours[:, :, channel].astype(np.float64), colours[:, :, 2] > 250  # what fills up is darker
        at = np.broadcast_to(np.arange(values.shape[1]) + 0.5, values.shape)[real]
        there = values[real] / 255 * (size - 1) + 0.5
        if len(np.unique(at)) < 2:
            return None
        slope, start = np.polyfit(at, there, 1)
        # Filters bend the slope at its ends by a pixel of the photo or of the picture; a shade is 1/255 of a side.
        allowed = 2 * size / 255 + 3 * max(1.0, abs(slope))
        if np.abs(there - (slope * at + start)).max() > allowed:
            raise AttnscopeError(
                "the pictures that the processor makes of this photo do not fit together to the photo",
                "it is not known where its patches lie, so that none is shown",
            )
        edges.append((float(start), float(start + slope * values.shape[1])))
    (left, right), (top, bottom) = edges
    return round(left, 2), round(top, 2), round(right, 2), round(bottom, 2)
