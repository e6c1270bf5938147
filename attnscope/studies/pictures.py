"""What does every head attend to in a picture? A vision model and a photo in, a Heatmap out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from attnscope.errors import AttnscopeError
from attnscope.models.model import Model, Sees, eyes_of
from attnscope.records import Heatmap
from attnscope.senses.photos import read_photo
from attnscope.studies.heatmap import Reading, choice_from, observed, outline, require_call


def picture_heatmap(
    model: Model,
    image: Any,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    hide_special: bool = False,
) -> Heatmap:
    """Runs a vision model on a photo and keeps the attention weights of the chosen heads.

    Tokens are the patches, "row,column" from the upper left, and what stands before them: "CLS", "REG0" …

        record = attnscope.picture_heatmap(model, "photo.png")
        record.draw("figures", scale="head", query="3,5")  # what that patch attends to, laid over the picture
        record.picture.pixels                              # what the model saw

    Args:
        model: A loaded vision model whose layers all see all patches: ViT, DeiT, DINOv2 …
        image: A path, an image of Pillow, or an array (height, width, 3) of uint8.
        layers: Numbers of the layers to keep; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head), instead of layers and heads.
        hide_special: Leaves out what is no patch, and divides each row by what is left of it.

    Returns:
        The record, with the picture as the model saw it; `weights` is (layer, head, query, key).

    Raises:
        AttnscopeError: The image is none, the model sees no pictures, a layer or head that it does not have.

    Warns:
        UserWarning: Something was done to the photo that is not plain: it was turned, or is the first of several.
    """
    require_call(model, "", pick)
    model = eyes_of(model)
    chosen = choice_from(layers, heads, pick).within(model.info)
    reading = looked_at(model, image)
    for note in reading.notes:
        warnings.warn(note, stacklevel=2)
    record = observed(model, outline(model.info, reading, chosen, reading.tokens.text), reading)
    return record.hide_special() if hide_special else record


def looked_at(model: Model, image: Any) -> Reading:
    """A photo as a model sees it.

    Raises:
        AttnscopeError: The image is none, or the model sees no pictures.
    """
    photo = read_photo(image)
    if not isinstance(model, Sees):
        raise AttnscopeError(
            f"{model.info.name} sees no pictures", "leave out --image, or name a vision transformer, such as DINOv2"
        )
    seen = model.see(photo)
    return Reading(seen.tokens, None, seen.notes, seen.inputs, seen.picture)
