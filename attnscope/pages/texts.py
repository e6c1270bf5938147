"""Texts on a page: tokens as JSON, attention weights as few bytes, photos as JPEG.

Every number that the page shows is within 0.0005 of the weight. Each head is quantised to 16-bit codes, written column
by column in two planes of bytes, and deflated. What a code is worth is chosen for what a reader may do in the page:

- A key's step is divided by the number of pieces of its word, so that weights *summed* over the pieces of a word
  (words merged) are off by no more than a single one.
- Where the text has special tokens, or another sink to hide, weights on the other keys are stored as shares of what the
  row gives to those keys together, so that rows *divided* by what is left (sinks hidden) are off by no more either.

The page shows four decimals, which adds 0.00005 to half a step. Small pages have finer steps: there it costs nothing.
"""

import base64
import io
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.cells import fit
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.map_changes import LEAST_LEFT
from attnscope.questions.places import Picture
from attnscope.report.wording import printable
from attnscope.results.storage import finite, plain
from attnscope.results.tokens import Tokens

MOST_WEIGHTS = 1 << 27
"""A page of more would be beyond what a browser opens in comfort."""

STEP = 1 / 1112
"""The value of a code for a word of one piece. Half of it is 0.00045, and 1 is a whole number of steps."""

FINE_STEP = 1 / 10000
"""The same in small pages, all of whose decimals are true."""

PATCH_STEP = 1 / 58000
"""The same where keys are patches of a picture, of which hundreds share a row: as fine as 16 bits reach."""

FINE_UP_TO = 1 << 20
"""How many weights a page may have to be a small one."""

LEFT_UNIT = 1 / 59000
"""The value of a code of a row's scale; 16 bits reach to 1.1, beyond any rounding of a softmax in 16 bits."""

THUMBNAIL_SIDE = 96
"""Pixels of the small picture of a head, which the page shows before it unpacks the weights of a large map."""

_CHUNK_BYTES = 1 << 18


MOST_SIDE = 768
"""Pixels of the longer side of an embedded photo, at most: what the page has room for."""

_QUALITY = 88
_SAME = 0.01  # of a photo's side: edges that lie closer are the same


@dataclass(frozen=True, eq=False)
class PageText:
    """One text of a page.

    Attributes:
        record: The attention of every head on it.
        full_width: By kind, for each layer of the map, the attention of one head over the full width of that layer,
            (layer, query, key): softmax of the layer's own queries and keys over all heads together. NaN, or no such
            kind: not known.
    """

    record: Heatmap
    full_width: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def require_room(records: Iterable[Heatmap]) -> int:
    """Return the number of weights that a page of records would hold; their maps may be empty outlines.

    Raises:
        AttnscopeError: It is none, or more than a browser opens in comfort.
    """
    # Rows of tokens that a part lacks count as well.
    n = sum(_n_weights(record, attention) for record in records for attention in record.maps)
    if not n:
        raise AttnscopeError("there is no head to show")
    if n > MOST_WEIGHTS:
        raise AttnscopeError(
            f"a page of {n / 1e6:,.0f} million weights would be too large for a browser "
            f"(the most is {MOST_WEIGHTS / 1e6:,.0f} million)",
            "choose fewer layers and heads (-L, -H, --pick), or shorter or fewer texts",
        )
    return n


def _n_weights(record: Heatmap, attention: AttentionMap) -> int:
    """Return how many weights of a map a page holds."""
    every_head = itertools.product(attention.layers, attention.heads)
    n_heads = sum(
        layer in attention.layers and head in attention.heads
        for layer, head in record.picked or every_head
    )
    # A part of a map of words has a row for each column, of which the others are empty.
    is_square = attention.part is not None and not record.pictures
    n_rows = len(attention.keys if is_square else attention.queries)
    return n_heads * n_rows * len(attention.keys)


def describe_text(text: PageText, blocks: list[str], step: float) -> dict[str, Any]:
    """Return a text as the page's script reads it.

    Args:
        text: The text.
        blocks: The page's blocks, to which its weights and photos are added.
        step: What a code of a weight is worth.
    """
    record = text.record
    # Its grids, matrices and links have a row for each column, and a photo among words is one of these.
    flat = record.with_pictures_as_one() if record.pictures else record
    # Of pictures, only special tokens are hidden.
    squared = replace(flat.make_square(), pictures=record.pictures)
    packed = {
        "text": record.text,
        "title": printable(record.text, 120) or "(blank)",
        "run": plain(dict(record.run), finite),
        "changes": list(record.changes),
        "maps": [
            _describe_map(
                squared,
                attention,
                text.full_width.get(attention.kind),
                blocks,
                step if record.picture is None else PATCH_STEP,
                before=len(attention.queries) - len(whole.queries) if record.pictures else 0,
            )
            for attention, whole in zip(squared.maps, record.maps, strict=True)
        ],
    }
    if record.picture is not None or record.pictures:
        packed["photos"] = pack_photos(record, blocks)
    if record.pictures:
        # Which of the rows above its first row is: a word is then the same one in all views.
        first = 0 if flat.maps[0].part is None else flat.maps[0].part[0]
        if flat.maps[0].kind == "cross":
            first = len(squared.maps[0].queries) - len(record.maps[0].queries)
        packed["looking"] = {
            **_describe_map(record, with_ordinary_patches(record), None, blocks, PATCH_STEP),
            "first": first,
        }
    return packed


def _describe_map(
    record: Heatmap,
    attention: AttentionMap,
    full: NDArray[np.float32] | None,
    blocks: list[str],
    step: float,
    before: int = 0,
) -> dict[str, Any]:
    heads = record.chosen(attention)
    maps = [attention.of(*head) for head in heads]
    by_layer = zip(attention.layers, () if full is None else full, strict=full is not None)
    full_maps = {layer: weights for layer, weights in by_layer if not np.isnan(weights).any()}
    chunks = []
    hidden_queries, hidden_keys = record.sinks(attention)
    for chunk in pack([*maps, *full_maps.values()], attention.keys, hidden_keys, step):
        chunks.append([len(blocks), list(chunk.heads)])
        blocks.append(chunk.data)
    rows_shown = [weights[before:] for weights in maps]
    thumbnails = None
    if maps and max(rows_shown[0].shape) > THUMBNAIL_SIDE:
        thumbnails = len(blocks)
        blocks.append(pack_thumbnails(rows_shown))
    has_own_keys = attention.kind == "cross" or attention.part is not None or before > 0
    has_own_keys |= len(attention.queries) != len(attention.keys)
    return {
        "kind": attention.kind,
        "heads": [list(head) for head in heads],
        "full": list(full_maps),
        # How much of its attention a head gives to one key, over queries: the grid can be sorted by it.
        "focus": [round(float(weights.max(-1).mean()), 4) for weights in rows_shown],
        "largest": [round(float(weights.max(initial=0.0)), 6) for weights in rows_shown],
        "thumbnails": thumbnails,
        "queries": _describe_tokens(attention.queries, hidden_queries),
        "keys": _describe_tokens(attention.keys, hidden_keys) if has_own_keys else None,
        "chunks": chunks,
        **({"before": before} if before else {}),  # rows that are not kept, and that no view shows
        **({"step": step, "mostPieces": most_pieces(step)} if step == PATCH_STEP else {}),
    }


def _describe_tokens(tokens: Tokens, hidden: NDArray[np.bool_]) -> dict[str, Any]:
    groups = None if tokens.words is None else tokens.word_groups()
    return {
        "labels": [printable(text, 80) or "\ufffd" for text in tokens.labels],
        "offsets": tokens.offsets.ravel().tolist(),
        "special": np.flatnonzero(tokens.special).tolist(),
        # Tokens that go where special tokens are hidden, if it is not these alone.
        **(
            {} if np.array_equal(hidden, tokens.special) else {"hidden": np.flatnonzero(hidden).tolist()}
        ),
        "segments": tokens.segments.tolist() if tokens.segments.any() else None,
        "groups": None if groups is None else [len(group) for group in groups],
        "words": None
        if groups is None
        else [printable(text, 80) or "\ufffd" for text in tokens.merge(groups).labels],
        "text": tokens.text,
        "pair": tokens.pair,
        "given": tokens.n_given,
    }


# Weights


@dataclass(frozen=True)
class Chunk:
    """Some heads of a map, packed.

    Attributes:
        heads: Which, as indices into the map's list of heads.
        data: base64 of what zlib makes (with its checksum, so that damage is noticed) of: low bytes of all codes (head,
            key in the head's order, query), high bytes; then 16-bit numbers, low bytes before high bytes: each head's
            order of keys (head, key), and, of maps with keys to hide, the rows' scales (head, query).
    """

    heads: tuple[int, ...]
    data: str


def most_pieces(step: float) -> int:
    """Return the largest divisor of a step with which codes fit into 16 bits: 52 for STEP, 5 for FINE_STEP.

    The sum over a word of n pieces, more than that many, is off by up to n / that many times half a step.
    """
    return int(0xFFFF * step / 1.12)


def pieces_of(tokens: Tokens, most: int) -> NDArray[np.int64]:
    """Return how many pieces the word of each token has, (token,), at most `most`; 1 where words are not known."""
    counts = np.ones(len(tokens), np.int64)
    if tokens.words is not None:
        for group in tokens.word_groups():
            counts[group] = min(len(group), most)
    return counts


def pack(
    weights: Sequence[NDArray[np.float32]], keys: Tokens, hidden: NDArray[np.bool_], step: float = STEP
) -> Iterator[Chunk]:
    """Pack the heads of a map, (query, key) each, 0 to 1.1, into chunks in their order; small heads share one.

    Keys that are `hidden` go where special tokens are hidden; `step` is the value of a code.
    """
    if not weights:
        return
    n_queries, n_keys = weights[0].shape
    size = max(1, _CHUNK_BYTES // (2 * n_queries * n_keys))  # heads per chunk
    unit = (pieces_of(keys, most_pieces(step)) / step).astype(np.float32)
    parts = [
        tuple(range(start, min(start + size, len(weights)))) for start in range(0, len(weights), size)
    ]

    def pack_part(part: tuple[int, ...]) -> Chunk:
        return Chunk(part, _deflate(np.stack([weights[head] for head in part]), hidden, unit))

    # NumPy and zlib let go of the interpreter's lock on arrays of this size.
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(pack_part, parts)


def pack_thumbnails(weights: Sequence[NDArray[np.float32]]) -> str:
    """Return small pictures of heads, (query, key) each, as base64 of what zlib makes.

    A picture has at most `THUMBNAIL_SIDE` rows and columns. A pixel is the largest weight of its cells as a share of
    the head's largest weight, times 255: bytes by (head, row, column).
    """
    # Each map, (query, key), is pooled to at most THUMBNAIL_SIDE squared by its largest weights.
    pictures = []
    for head in weights:
        pooled = fit(head, (THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        pictures.append(np.rint(pooled * (255 / max(float(pooled.max()), 1e-9))).astype(np.uint8))
    return base64.b64encode(zlib.compress(np.stack(pictures).tobytes(), 1)).decode("ascii")


def _deflate(block: NDArray[np.float32], hidden: NDArray[np.bool_], unit: NDArray[np.float32]) -> str:
    """Return some heads, (head, query, key), as the page reads them; `unit` is the code of 1 for each key."""
    scales = None
    if hidden.any():
        left = block[:, :, ~hidden].sum(-1, dtype=np.float64)
        enough = left >= LEAST_LEFT
        # Rows with next to nothing left are empty when special tokens are hidden; the code 0 says so.
        scale_codes = np.where(
            enough, np.maximum(np.rint(left / LEFT_UNIT), np.ceil(LEAST_LEFT / LEFT_UNIT)), 0
        )
        scales = np.minimum(scale_codes, 0xFFFF).astype(np.uint16)
        # Divided by what is truly left, not by its code: rounding that costs 1e-5 of a weight, and nothing of a share.
        row = np.where(enough, left, LEAST_LEFT).astype(np.float32)
        block = np.where(hidden, block, block / row[:, :, None])
    codes = np.minimum(np.rint(block * unit), 0xFFFF).astype(np.uint16)
    # Keys of like weight beside each other make longer runs and better Huffman codes: 6% smaller.
    order = np.argsort(-codes.mean(1, dtype=np.float64), axis=1, kind="stable").astype(np.uint16)
    columns = np.take_along_axis(codes.transpose(0, 2, 1), order[:, :, None].astype(np.int64), 1)
    planes = [*_planes(columns), *_planes(order), *(_planes(scales) if scales is not None else ())]
    # Runs and Huffman codes alone: these are numbers, not phrases. Smaller than level 6, and six times as fast.
    press = zlib.compressobj(1, zlib.DEFLATED, 15, 7, zlib.Z_RLE)
    return base64.b64encode(b"".join([*map(press.compress, planes), press.flush()])).decode("ascii")


def _planes(numbers: NDArray[np.uint16]) -> tuple[bytes, bytes]:
    return (numbers & 0xFF).astype(np.uint8).tobytes(), (numbers >> 8).astype(np.uint8).tobytes()


# Photos


def pack_photos(record: Heatmap, blocks: list[str]) -> list[dict[str, Any]]:
    """Return each picture of a record as the page needs it; the pixels go into blocks.

    All of a photo made small, beside its tiles, is the same photo: it is embedded once.

    Args:
        record: With a picture, or with pictures among its words.
        blocks: The page's blocks; JPEGs in base64 are added.

    Returns:
        One entry a picture: `source`, `facts`, `grid` (rows, columns), `cells` (the key of each patch, row by row;
        -1 = none), `size` (width and height as embedded) and `block`.
    """
    # Pictures with the key of each patch, row by row.
    pictures: list[tuple[Picture, Sequence[int]]] = []
    if record.picture is not None:
        pictures = [(record.picture, np.flatnonzero(~record.maps[0].keys.special).tolist())]
    for picture in record.pictures:
        assert picture.cells is not None
        pictures.append((picture, picture.cells.ravel().tolist()))
    # A picture of the same photo shares its pixels.
    packed: list[dict[str, Any]] = []
    for number, (picture, cells) in enumerate(pictures):
        twin = next(
            (i for i, (other, _) in enumerate(pictures[:number]) if _is_same_photo(picture, other)), None
        )
        if twin is None:
            size, jpeg = _embed(picture)
            if jpeg not in blocks:  # several questions about one photo
                blocks.append(jpeg)
            photo: dict[str, Any] = {"size": size, "block": blocks.index(jpeg)}
        else:
            photo = {name: packed[twin][name] for name in ("size", "block")}
        width, height = photo["size"]
        # The caption gives the size as embedded.
        packed.append(
            {
                "source": printable(picture.source, 80),
                "facts": f"{printable(picture.facts, 300)}; embedded as {width} × {height}",
                "grid": list(picture.grid),
                "cells": cells,
                **photo,
            }
        )
    return packed


def with_ordinary_patches(record: Heatmap) -> AttentionMap:
    """Return its map with patches as ordinary keys, which stay where special tokens are hidden."""
    attention = record.maps[0]
    special = attention.keys.special.copy()
    for picture in record.pictures:
        assert picture.cells is not None
        special[picture.cells[picture.cells >= 0]] = False
    return replace(attention, keys=replace(attention.keys, special=special))


def _is_same_photo(picture: Picture, other: Picture) -> bool:
    """Return whether both show the same part of the same photo."""
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
