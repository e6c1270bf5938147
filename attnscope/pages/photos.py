"""The photos of a page: each once, as a JPEG of limited size, and which key of the map each of its patches is."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.records import AttentionMap, Heatmap
from attnscope.records.maps.pictures import Picture
from attnscope.report.wording import printable

MOST_SIDE = 768
"""Pixels of the longer side of an embedded photo, at most: what the page has room for."""

_QUALITY = 88
_SAME = 0.01  # of a photo's side: edges that lie closer are the same


def pack_photos(record: Heatmap, blocks: list[str]) -> list[dict[str, Any]]:
    """Each picture of a record as the page needs it; the pixels go into blocks.

    All of a photo made small, beside its tiles, is the same photo: it is embedded once.

    Args:
        record: With a picture, or with pictures among its words.
        blocks: The page's blocks; JPEGs in base64 are added.

    Returns:
        One entry a picture: `source`, `facts`, `grid` (rows, columns), `cells` (the key of each patch, row by row;
        -1 = none), `size` (width and height as embedded) and `block`.
    """
    pictures: list[tuple[Picture, Sequence[int]]] = []
    if record.picture is not None:
        pictures = [(record.picture, np.flatnonzero(~record.maps[0].keys.special).tolist())]
    for picture in record.pictures:
        assert picture.cells is not None
        pictures.append((picture, picture.cells.ravel().tolist()))
    packed: list[dict[str, Any]] = []
    for number, (picture, cells) in enumerate(pictures):
        twin = next((i for i, (other, _) in enumerate(pictures[:number]) if _is_same_photo(picture, other)), None)
        if twin is None:
            size, jpeg = _embed(picture)
            if jpeg not in blocks:  # several questions about one photo
                blocks.append(jpeg)
            photo: dict[str, Any] = {"size": size, "block": blocks.index(jpeg)}
        else:
            photo = {name: packed[twin][name] for name in ("size", "block")}
        width, height = photo["size"]
        packed.append({
            "source": printable(picture.source, 80),
            "facts": f"{printable(picture.facts, 300)}; embedded as {width} × {height}",
            "grid": list(picture.grid),
            "cells": cells,
            **photo,
        })  # fmt: skip
    return packed


def with_ordinary_patches(record: Heatmap) -> AttentionMap:
    """Its map with patches as ordinary keys, which stay where special tokens are hidden."""
    attention = record.maps[0]
    special = attention.keys.special.copy()
    for picture in record.pictures:
        assert picture.cells is not None
        special[picture.cells[picture.cells >= 0]] = False
    return replace(attention, keys=replace(attention.keys, special=special))


def _is_same_photo(picture: Picture, other: Picture) -> bool:
    """Whether both show the same part of the same photo."""
    if picture.photo != other.photo or picture.area is None or other.area is None:
        return False
    return bool(np.allclose(picture.area, other.area, rtol=0, atol=_SAME * min(picture.size)))


def _embed(picture: Picture) -> tuple[list[int], str]:
    """Width and height of a photo as it is embedded, and its JPEG in base64."""
    from PIL import Image

    image = Image.fromarray(picture.pixels)
    image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=_QUALITY)
    return list(image.size), base64.b64encode(content.getvalue()).decode("ascii")
