"""Make texts ready for a page: tokens as JSON, attention weights as few bytes, photos as JPEG.

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
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.cells import pool_to_pixels
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.map_changes import LEAST_LEFT
from attnscope.questions.places import Picture
from attnscope.report.wording import printable
from attnscope.results.storage import finite_or_none, plain
from attnscope.results.tokens import Tokens

MOST_WEIGHTS = 1 << 27
"""The most weights of a page that a browser opens in comfort."""

STEP = 1 / 1112
"""The weight that a code of 1 stands for, in a word of one piece. Half of it is 0.00045, and it divides 1."""

FINE_STEP = 1 / 10000
"""The step of small pages, all of whose decimals are true."""

PATCH_STEP = 1 / 58000
"""The step where keys are patches of a picture, of which hundreds share a row: as fine as 16 bits reach."""

FINE_UP_TO = 1 << 20
"""The most weights of a small page."""

LEFT_UNIT = 1 / 59000
"""The sum that a code of 1 stands for, of what a row gives to keys that are not hidden; 16 bits reach to 1.1."""

THUMBNAIL_SIDE = 96
"""Pixels of the small picture of a head, which the page shows before it unpacks the weights of a large map."""

_CHUNK_BYTES = 1 << 18
"""Heads share a chunk while their codes are fewer bytes than this."""

MOST_SIDE = 768
"""Pixels of the longer side of an embedded photo, at most: what the page has room for."""

_QUALITY = 88
"""JPEG quality of embedded photos, of 100."""

_SAME = 0.01
"""Edges of two pictures that lie closer than this share of the photo's side are the same."""


@dataclass(frozen=True, eq=False)
class PageText:
    """Hold one text of a page.

    Attributes:
        record: The attention of every head on the text.
        full_width: By kind of attention, the weights of one head over the full width of each layer of the map, (layer,
            query, key): softmax of the layer's own queries and keys over all heads together. NaN or no kind = unknown.
    """

    record: Heatmap
    full_width: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def require_room(records: Iterable[Heatmap]) -> int:
    """Return the number of weights that a page of records would hold; the weights of their maps are not read.

    Raises:
        AttnscopeError: It is none, or more than a browser opens in comfort.
    """
    n_weights = 0
    for record in records:
        for attention in record.maps:
            pairs = {*attention.pairs}
            n_heads = len(pairs.intersection(record.picked or pairs))
            # A part of a map of words gets a row for each column: rows that were not kept are empty.
            is_square = attention.part is not None and not record.pictures
            n_rows = len(attention.keys if is_square else attention.queries)
            n_weights += n_heads * n_rows * len(attention.keys)
    if not n_weights:
        raise AttnscopeError("there is no head to show")
    if n_weights > MOST_WEIGHTS:
        raise AttnscopeError(
            f"a page of {n_weights / 1e6:,.0f} million weights would be too large for a browser "
            f"(the most is {MOST_WEIGHTS / 1e6:,.0f} million)",
            "choose fewer layers and heads (-L, -H, --pick), or shorter or fewer texts",
        )
    return n_weights


def describe_text(text: PageText, blocks: list[str], step: float) -> dict[str, Any]:
    """Return a text as the page's script reads it.

    Args:
        text: The text.
        blocks: The page's blocks; those of the text's weights and photos are appended.
        step: The value of a code of a weight; that of a picture alone is `PATCH_STEP`.
    """
    record = text.record
    if record.picture is not None:
        step = PATCH_STEP
    # Grids, matrices and links have a row for each column, and a photo among words is one row and one column of them.
    one_key = record.with_pictures_as_one() if record.pictures else record
    # It keeps its pictures: of a record with pictures, special tokens alone are sinks.
    square = replace(one_key.make_square(), pictures=record.pictures)
    maps = []
    for attention, original in zip(square.maps, record.maps, strict=True):
        # How many of the square's first rows the original does not have.
        n_missing = len(attention.queries) - len(original.queries) if record.pictures else 0
        full_width = text.full_width.get(attention.kind)
        maps.append(_describe_map(square, attention, full_width, blocks, step, n_missing))
    described = {
        "text": record.text,
        "title": printable(record.text, 120) or "(blank)",
        "run": plain(dict(record.run), finite_or_none),
        "changes": list(record.changes),
        "maps": maps,
    }
    if record.picture is not None or record.pictures:
        described["photos"] = pack_photos(record, blocks)
    if record.pictures:
        # The map with patches as keys, and which row of the square map its first row is.
        patches = _describe_map(record, with_ordinary_patches(record), None, blocks, PATCH_STEP)
        attention = one_key.maps[0]
        patches["first"] = attention.origin[0]
        if attention.kind == "cross":
            patches["first"] = len(square.maps[0].queries) - len(record.maps[0].queries)
        described["looking"] = patches
    return described


def _describe_map(
    record: Heatmap,
    attention: AttentionMap,
    full_width: NDArray[np.float32] | None,
    blocks: list[str],
    step: float,
    n_missing: int = 0,
) -> dict[str, Any]:
    """Return a map of a record as the page's script reads it; its weights are appended to the page's blocks.

    Args:
        record: Says which heads are shown, and which tokens are sinks.
        attention: The map.
        full_width: As in `PageText`, of this map's kind.
        blocks: The page's blocks.
        step: The value of a code of a weight.
        n_missing: How many of its first rows are empty, as they were not kept; no view shows them.
    """
    heads = record.chosen(attention)
    weights = [attention.of(*head) for head in heads]
    # The layers whose full-width weights are known.
    known = {}
    if full_width is not None:
        for layer, layer_weights in zip(attention.layers, full_width, strict=True):
            if not np.isnan(layer_weights).any():
                known[layer] = layer_weights
    hidden_queries, hidden_keys = record.sinks(attention)
    chunks = []
    for members, data in pack([*weights, *known.values()], attention.keys, hidden_keys, step):
        chunks.append([len(blocks), list(members)])
        blocks.append(data)
    # The page sorts heads by focus: how much each query gives to one key, on average.
    shown = [head_weights[n_missing:] for head_weights in weights]
    focus = []
    largest = []
    for rows in shown:
        focus.append(round(float(rows.max(-1).mean()), 4))
        largest.append(round(float(rows.max(initial=0.0)), 6))
    # Large maps have small pictures.
    thumbnails = None
    if shown and max(shown[0].shape) > THUMBNAIL_SIDE:
        thumbnails = len(blocks)
        blocks.append(pack_thumbnails(shown))
    described: dict[str, Any] = {
        "kind": attention.kind,
        "heads": list(map(list, heads)),
        "full": list(known),
        "focus": focus,
        "largest": largest,
        "thumbnails": thumbnails,
        "queries": _describe_tokens(attention.queries, hidden_queries),
        "keys": None,
        "chunks": chunks,
    }
    # Keys are described where they are other tokens than the queries.
    is_part = attention.part is not None or n_missing > 0
    are_as_many = len(attention.queries) == len(attention.keys)
    if attention.kind == "cross" or is_part or not are_as_many:
        described["keys"] = _describe_tokens(attention.keys, hidden_keys)
    if n_missing:
        described["before"] = n_missing
    if step == PATCH_STEP:
        described |= {"step": step, "mostPieces": most_pieces(step)}
    return described


def _describe_tokens(tokens: Tokens, hidden: NDArray[np.bool_]) -> dict[str, Any]:
    """Return tokens as the page's script reads them; `hidden` go where special tokens are hidden, (token,)."""
    described: dict[str, Any] = {
        "labels": _printable(tokens.labels),
        "offsets": tokens.offsets.ravel().tolist(),
        "special": np.flatnonzero(tokens.special).tolist(),
        "segments": None,
        "groups": None,
        "words": None,
        "text": tokens.text,
        "pair": tokens.pair,
        "given": tokens.n_given,
    }
    if not np.array_equal(hidden, tokens.special):
        described["hidden"] = np.flatnonzero(hidden).tolist()
    if tokens.segments.any():
        described["segments"] = tokens.segments.tolist()
    if tokens.words is not None:
        groups = tokens.word_groups()
        described["groups"] = list(map(len, groups))
        described["words"] = _printable(tokens.merge(groups).labels)
    return described


def _printable(labels: Iterable[str]) -> list[str]:
    """Return labels that can be printed; one without such characters becomes U+FFFD."""
    return [printable(label, 80) or "\ufffd" for label in labels]


# Weights


def most_pieces(step: float) -> int:
    """Return the largest divisor of a step with which codes fit into 16 bits: 52 for STEP, 5 for FINE_STEP.

    The sum over a word of more pieces, n, is off by up to n / (that divisor) times half a step.
    """
    # Just above the largest weight, MOST_ROW_SUM = 1.1.
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
) -> Iterator[tuple[Sequence[int], str]]:
    """Pack the heads of a map into chunks, in their order; small heads share one.

    Args:
        weights: The weights of each head, (query, key), 0 to 1.1.
        keys: The tokens that are attended to.
        hidden: Which keys go where special tokens are hidden, (key,).
        step: The value of a code of a weight.

    Yields:
        The indices of a chunk's heads in `weights`, and base64 of what zlib makes (with its checksum, so that damage is
        noticed) of: low bytes of all codes (head, key in the head's order, query), high bytes; then 16-bit numbers, low
        bytes before high bytes: each head's order of keys (head, key), and, where keys are hidden, the rows' scales
        (head, query).
    """
    if not weights:
        return
    # A code has two bytes.
    heads = range(len(weights))
    n_per_chunk = max(1, _CHUNK_BYTES // (2 * weights[0].size))
    chunks = [heads[start : start + n_per_chunk] for start in heads[::n_per_chunk]]
    # The code of a weight of 1, (key,).
    unit = (pieces_of(keys, most_pieces(step)) / step).astype(np.float32)

    def pack_chunk(chunk: range) -> str:
        return _deflate(np.stack(weights[chunk.start : chunk.stop]), hidden, unit)

    # NumPy and zlib let go of the interpreter's lock on arrays of this size.
    with ThreadPoolExecutor(2) as pool:
        yield from zip(chunks, pool.map(pack_chunk, chunks), strict=True)


def pack_thumbnails(weights: Sequence[NDArray[np.float32]]) -> str:
    """Return small pictures of heads, (query, key) each, as base64 of what zlib makes.

    A picture has at most `THUMBNAIL_SIDE` rows and columns. A pixel is the largest weight of its cells as a share of
    the head's largest weight, times 255: bytes by (head, row, column).
    """
    pictures = []
    for head in weights:
        pooled = pool_to_pixels(head, (THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        # A head without attention stays 0, without a division by 0.
        scale = 255 / max(float(pooled.max()), 1e-9)
        pictures.append(np.rint(pooled * scale).astype(np.uint8))
    return base64.b64encode(zlib.compress(np.stack(pictures).tobytes(), 1)).decode("ascii")


def _deflate(block: NDArray[np.float32], hidden: NDArray[np.bool_], unit: NDArray[np.float32]) -> str:
    """Return the data of a chunk, see `pack`.

    Args:
        block: The weights of its heads, (head, query, key).
        hidden: Which keys go where special tokens are hidden, (key,).
        unit: The code of a weight of 1, (key,).
    """
    scales = b""
    if hidden.any():
        # What each row gives to the keys that stay, (head, query).
        left = block[:, :, ~hidden].sum(-1, dtype=np.float64)
        is_enough = left >= LEAST_LEFT
        # Rows with next to nothing left are empty when special tokens are hidden; the code 0 says so.
        least_code = np.ceil(LEAST_LEFT / LEFT_UNIT)
        scale_codes = np.where(is_enough, np.maximum(np.rint(left / LEFT_UNIT), least_code), 0)
        scales = _split_bytes(np.minimum(scale_codes, 0xFFFF).astype(np.uint16))
        # Divided by what is truly left, not by its code: rounding that costs 1e-5 of a weight, and nothing of a share.
        divisor = np.where(is_enough, left, LEAST_LEFT).astype(np.float32)
        block = np.where(hidden, block, block / divisor[:, :, None])
    codes = np.minimum(np.rint(block * unit), 0xFFFF).astype(np.uint16)
    # Keys of like weight beside each other, (head, key), make longer runs and better Huffman codes: 6% smaller.
    order = np.argsort(-codes.mean(1, dtype=np.float64), axis=1, kind="stable").astype(np.uint16)
    # (head, key in that order, query)
    columns = np.take_along_axis(codes.transpose(0, 2, 1), order[:, :, None].astype(np.int64), 1)
    # Runs and Huffman codes alone: these are numbers, not phrases. Smaller than level 6, and six times as fast.
    compressor = zlib.compressobj(1, zlib.DEFLATED, wbits=15, memLevel=7, strategy=zlib.Z_RLE)
    packed = compressor.compress(_split_bytes(columns) + _split_bytes(order) + scales)
    return base64.b64encode(packed + compressor.flush()).decode("ascii")


def _split_bytes(numbers: NDArray[np.uint16]) -> bytes:
    """Return the low bytes of all numbers, then the high bytes."""
    return np.stack([numbers & 0xFF, numbers >> 8]).astype(np.uint8).tobytes()


# Photos


def pack_photos(record: Heatmap, blocks: list[str]) -> list[dict[str, Any]]:
    """Return each picture of a record as the page's script reads it.

    A model may see a photo both in tiles and whole: the photo is embedded once.

    Args:
        record: A record with a picture, or with pictures among its words.
        blocks: The page's blocks; JPEGs in base64 are appended.

    Returns:
        One entry a picture: `source`, `facts`, `grid` (rows, columns), `cells` (the key of each patch, row by row;
        -1 = none), `size` (width and height as embedded) and `block`.
    """
    # Each picture with the key of each patch, row by row.
    pictures: list[tuple[Picture, Sequence[int]]] = []
    if record.picture is not None:
        pictures = [(record.picture, np.flatnonzero(~record.maps[0].keys.special).tolist())]
    for picture in record.pictures:
        assert picture.cells is not None
        pictures.append((picture, picture.cells.ravel().tolist()))
    described: list[dict[str, Any]] = []
    embedded: list[tuple[Picture, dict[str, Any]]] = []
    for picture, cells in pictures:
        pixels = _embed(picture, embedded, blocks)
        width, height = pixels["size"]
        described.append(
            {
                "source": printable(picture.source, 80),
                "facts": f"{printable(picture.facts, 300)}; embedded as {width} × {height}",
                "grid": list(picture.grid),
                "cells": cells,
                **pixels,
            }
        )
    return described


def _embed(
    picture: Picture, embedded: list[tuple[Picture, dict[str, Any]]], blocks: list[str]
) -> dict[str, Any]:
    """Return the `size` and the `block` of a picture's pixels, and append both to `embedded`.

    Args:
        picture: The picture.
        embedded: The pictures before it, with what this function returned for them.
        blocks: The page's blocks; the JPEG is appended, unless one of these pictures shows the same photo.
    """
    from PIL import Image

    for other, pixels in embedded:
        if _is_same_photo(picture, other):
            return pixels
    image = Image.fromarray(picture.pixels)
    image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=_QUALITY)
    jpeg = base64.b64encode(content.getvalue()).decode("ascii")
    # Several texts of a page may ask about one photo.
    if jpeg not in blocks:
        blocks.append(jpeg)
    pixels = {"size": list(image.size), "block": blocks.index(jpeg)}
    embedded.append((picture, pixels))
    return pixels


def with_ordinary_patches(record: Heatmap) -> AttentionMap:
    """Return a record's first map with patches as ordinary keys, which stay where special tokens are hidden."""
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
