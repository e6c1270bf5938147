"""Make texts ready for a page: tokens as JSON, attention weights in few bytes, photos as JPEG.

Every number that the page shows is within 0.0005 of the true number. A weight becomes a 16-bit code: the weight divided
by a *step*, such as 1/1112, and rounded. Codes are written column by column, all low bytes before all high bytes, and
deflated. A reader of the page may merge word pieces and hide sinks, so rounding errors must not add up:

- A key's step is divided by the number of pieces of its word. The *sum* over the pieces of a word is then as exact as
  the weight of a word of one piece.
- If the text has sinks (tokens that collect attention without meaning, such as special tokens), the code of any other
  key stands for its share of the row's attention outside sinks. Rows *renormalised* without sinks are then as exact as
  full rows.

A number is off by at most half a step, and by 0.00005 more because the page shows four decimals. Small pages can afford
finer steps. A *block* is packed data that the page's script unpacks on demand.
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
from attnscope.questions.map_changes import MIN_ROW_SUM
from attnscope.questions.places import Picture
from attnscope.report.wording import printable
from attnscope.results.storage import finite_or_none, to_plain
from attnscope.results.tokens import Tokens

MAX_WEIGHTS = 1 << 27
"""The most attention weights of a page that a browser still opens without delay."""

STEP = 1 / 1112
"""The weight of code 1 for a word of one piece. Half a step is 0.00045, and a weight of 1 is code 1112, exactly."""

FINE_STEP = 1 / 10000
"""The step of small pages: as fine as the four decimals that the page shows."""

PATCH_STEP = 1 / 58000
"""The step for keys that are patches of a picture, as fine as 16 bits allow: hundreds of patches share a row."""

MAX_FINE_WEIGHTS = 1 << 20
"""The most weights of a small page."""

ROW_SUM_STEP = 1 / 59000
"""The step of the codes of row sums: the sum of a row's weights outside sinks. 16 bits reach up to a sum of 1.1."""

THUMBNAIL_SIDE_PX = 96
"""The most rows and columns of a head's thumbnail, which the page shows before it unpacks a large map."""

_CHUNK_BYTES = 1 << 18
"""The most bytes of codes in a chunk, the heads that are packed together; a chunk has at least one head."""

MAX_PHOTO_SIDE_PX = 768
"""The most pixels of the longer side of an embedded photo, as large as the page can show it."""

_JPEG_QUALITY = 88
"""JPEG quality of embedded photos, of 100."""

_EDGE_TOLERANCE = 0.01
"""Two pictures show the same part of a photo if their edges differ by at most this fraction of its shorter side."""


@dataclass(frozen=True, eq=False)
class PageText:
    """Hold one text of a page with its attention.

    Attributes:
        record: The attention of every head on the text.
        full_width: By kind of attention, the weights that each layer would have if it had a single head as wide as all
            its heads together, (layer, query, key): the softmax of the layer's unsplit queries and keys. They are
            unknown for a layer of NaN and for a missing kind.
    """

    record: Heatmap
    full_width: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def require_room(records: Iterable[Heatmap]) -> int:
    """Return the number of weights that a page of records would hold, and refuse too many; weights are not read.

    Raises:
        AttnscopeError: There are no weights, or more than a browser opens without delay.
    """
    n_weights = 0
    for record in records:
        for attention in record.maps:
            # Each head is a pair (layer, head). An empty `picked` means that the user picked no heads: the page has
            # all.
            pairs = {*attention.pairs}
            n_heads = len(pairs.intersection(record.picked or pairs))
            # `part` says that the map has only some rows of the text. The page adds empty rows, one row for each
            # column.
            is_square = attention.part is not None and not record.pictures
            n_rows = len(attention.keys if is_square else attention.queries)
            n_weights += n_heads * n_rows * len(attention.keys)
    if not n_weights:
        raise AttnscopeError("there is no head to show")
    if n_weights > MAX_WEIGHTS:
        raise AttnscopeError(
            f"a page of {n_weights / 1e6:,.0f} million weights would be too large for a browser "
            f"(the most is {MAX_WEIGHTS / 1e6:,.0f} million)",
            "choose fewer layers and heads (-L, -H, --pick), or shorter or fewer texts",
        )
    return n_weights


def describe_text(text: PageText, blocks: list[str], step: float) -> dict[str, Any]:
    """Return a text as JSON values that the page's script reads.

    Args:
        text: The text.
        blocks: The page's blocks, base64 each. This function appends blocks with the text's weights and photos.
        step: The weight that a code of 1 stands for. Patches have `PATCH_STEP` instead.
    """
    record = text.record
    # `picture` is set if the whole input is one picture; `pictures` has the pictures among words.
    if record.picture is not None:
        step = PATCH_STEP
    # The page draws square maps, with a row for each column. A picture among words becomes one row and one column.
    # Keep `pictures`: `record.sinks`, called by `_describe_map`, takes only special tokens for sinks if there are any.
    square_record = replace(record.make_square(), pictures=record.pictures)
    maps = []
    for attention, original in zip(square_record.maps, record.maps, strict=True):
        # The number of empty rows that `make_square` added on top of a map with pictures.
        n_missing = len(attention.queries) - len(original.queries) if record.pictures else 0
        full_width = text.full_width.get(attention.kind)
        maps.append(_describe_map(square_record, attention, full_width, blocks, step, n_missing))
    entry = {
        "text": record.text,
        "title": printable(record.text, 120) or "(blank)",
        "run": to_plain(dict(record.run), finite_or_none),
        "changes": list(record.changes),
        "maps": maps,
    }
    if record.picture is not None or record.pictures:
        entry["photos"] = pack_photos(record, blocks)
    if record.pictures:
        # Beside the square maps, the page has a map from words (queries) to patches (keys).
        patch_map = _describe_map(record, _with_ordinary_patches(record), None, blocks, PATCH_STEP)
        # Row 0 of this map is row `first` of the square map.
        attention = record.with_pictures_as_one().maps[0]
        if attention.kind == "cross":
            patch_map["first"] = len(square_record.maps[0].queries) - len(record.maps[0].queries)
        else:
            patch_map["first"] = attention.origin[0]
        entry["looking"] = patch_map
    return entry


def _describe_map(
    record: Heatmap,
    attention: AttentionMap,
    full_width: NDArray[np.float32] | None,
    blocks: list[str],
    step: float,
    n_missing: int = 0,
) -> dict[str, Any]:
    """Return a map as JSON values that the page's script reads, and append its weights to the page's blocks.

    Args:
        record: The record of the map. It knows which heads are shown, and which tokens are sinks.
        attention: The map.
        full_width: The entry of `PageText.full_width` for this map's kind of attention; None = unknown.
        blocks: The page's blocks.
        step: The weight that a code of 1 stands for.
        n_missing: The number of empty rows on top of the map. They stand for rows that were not kept; no view shows
            them.
    """
    heads = record.chosen(attention)
    # The weights of each head, (query, key).
    weights = [attention.of(*head) for head in heads]
    known_full_width = {}
    if full_width is not None:
        for layer, layer_weights in zip(attention.layers, full_width, strict=True):
            if not np.isnan(layer_weights).any():
                known_full_width[layer] = layer_weights
    hidden_queries, hidden_keys = record.sinks(attention)
    # One entry per chunk: the number of its block, and the indices of its heads in `all_weights`.
    chunks = []
    all_weights = [*weights, *known_full_width.values()]
    for head_indices, data in pack_heads(all_weights, attention.keys, hidden_keys, step):
        chunks.append([len(blocks), list(head_indices)])
        blocks.append(data)
    # The page sorts heads by focus: the largest weight of a row, averaged over rows.
    kept_rows = [head_weights[n_missing:] for head_weights in weights]
    focus = []
    largest = []
    for rows in kept_rows:
        focus.append(round(float(rows.max(-1).mean()), 4))
        largest.append(round(float(rows.max(initial=0.0)), 6))
    # Only large maps have thumbnails.
    thumbnails = None
    if kept_rows and max(kept_rows[0].shape) > THUMBNAIL_SIDE_PX:
        thumbnails = len(blocks)
        blocks.append(pack_thumbnails(kept_rows))
    entry: dict[str, Any] = {
        "kind": attention.kind,
        "heads": list(map(list, heads)),
        "full": list(known_full_width),
        "focus": focus,
        "largest": largest,
        "thumbnails": thumbnails,
        "queries": _describe_tokens(attention.queries, hidden_queries),
        "keys": None,
        "chunks": chunks,
    }
    # If "keys" is None, the page takes the queries for keys.
    has_missing_rows = attention.part is not None or n_missing > 0
    is_square = len(attention.queries) == len(attention.keys)
    if attention.kind == "cross" or has_missing_rows or not is_square:
        entry["keys"] = _describe_tokens(attention.keys, hidden_keys)
    if n_missing:
        entry["before"] = n_missing
    # If the entry has no "step", the page takes the step in its manifest.
    if step == PATCH_STEP:
        entry |= {"step": step, "mostPieces": max_pieces(step)}
    return entry


def _describe_tokens(tokens: Tokens, is_hidden: NDArray[np.bool_]) -> dict[str, Any]:
    """Return tokens as JSON values that the page's script reads.

    Args:
        tokens: The tokens.
        is_hidden: Whether a token disappears when a reader hides sinks, (token,).
    """
    entry: dict[str, Any] = {
        "labels": _printable_labels(tokens.labels),
        "offsets": tokens.offsets.ravel().tolist(),
        "special": np.flatnonzero(tokens.special).tolist(),
        "segments": None,
        "groups": None,
        "words": None,
        "text": tokens.text,
        "pair": tokens.pair,
        "given": tokens.n_given,
    }
    if not np.array_equal(is_hidden, tokens.special):
        entry["hidden"] = np.flatnonzero(is_hidden).tolist()
    if tokens.segments.any():
        entry["segments"] = tokens.segments.tolist()
    if tokens.words is not None:
        # The indices of the tokens of each word.
        groups = tokens.word_groups()
        entry["groups"] = list(map(len, groups))
        entry["words"] = _printable_labels(tokens.merge(groups).labels)
    return entry


def _printable_labels(labels: Iterable[str]) -> list[str]:
    """Return labels without unprintable characters, at most 80 characters each; an empty label becomes U+FFFD."""
    return [printable(label, 80) or "\ufffd" for label in labels]


# Weights


def max_pieces(step: float) -> int:
    """Return the largest number of pieces by which a step is divided: 52 for STEP, 5 for FINE_STEP.

    With a larger divisor, the code of the largest weight would need more than 16 bits. The sum over a word of more
    pieces is therefore off by up to (pieces / divisor) times half a step.
    """
    # 1.12 is just above the largest weight, which `questions.heatmap.MAX_ROW_SUM` limits to 1.1.
    return int(0xFFFF * step / 1.12)


def count_pieces(tokens: Tokens, max_count: int) -> NDArray[np.int64]:
    """Return the number of pieces of each token's word, (token,), at most `max_count`; 1 if words are unknown."""
    counts = np.ones(len(tokens), np.int64)
    if tokens.words is not None:
        for group in tokens.word_groups():
            counts[group] = min(len(group), max_count)
    return counts


def pack_heads(
    weights: Sequence[NDArray[np.float32]],
    keys: Tokens,
    is_hidden: NDArray[np.bool_],
    step: float = STEP,
) -> Iterator[tuple[Sequence[int], str]]:
    """Pack the heads of a map into chunks, in the order of the heads. Heads with few weights share a chunk.

    Args:
        weights: The weights of each head, (query, key), 0 to 1.1.
        keys: The tokens that are attended to.
        is_hidden: Whether a key disappears when a reader hides sinks, (key,).
        step: The weight that a code of 1 stands for.

    Yields:
        The indices of a chunk's heads in `weights`, and the chunk as base64 of zlib data (its checksum reveals damage).
        The data are three arrays of 16-bit numbers. Each is written as all its low bytes, then all its high bytes:

        - the codes, (head, key in the order of the second array, query),
        - the order of keys of each head, (head, key),
        - if keys are hidden, the codes of the rows' sums over the other keys, (head, query): multiples of
          `ROW_SUM_STEP`.
    """
    if not weights:
        return
    heads = range(len(weights))
    # The number of heads per chunk; a code has two bytes.
    n_per_chunk = max(1, _CHUNK_BYTES // (2 * weights[0].size))
    chunks = [heads[start : start + n_per_chunk] for start in heads[::n_per_chunk]]
    # The code of a weight of 1, (key,).
    code_of_one = (count_pieces(keys, max_pieces(step)) / step).astype(np.float32)

    def pack_chunk(chunk: range) -> str:
        return _deflate(np.stack(weights[chunk.start : chunk.stop]), is_hidden, code_of_one)

    # Threads save time here, as NumPy and zlib release the GIL on arrays of this size.
    with ThreadPoolExecutor(2) as pool:
        yield from zip(chunks, pool.map(pack_chunk, chunks), strict=True)


def pack_thumbnails(weights: Sequence[NDArray[np.float32]]) -> str:
    """Return thumbnails of heads as base64 of zlib data, a byte for each (head, row, column).

    A thumbnail has at most `THUMBNAIL_SIDE_PX` rows and columns. A pixel is 255 x the largest weight of its cells,
    divided by the largest weight of the head.

    Args:
        weights: The weights of each head, (query, key).
    """
    thumbnails = []
    for head in weights:
        pooled = pool_to_pixels(head, (THUMBNAIL_SIDE_PX, THUMBNAIL_SIDE_PX))
        # The floor avoids a division by 0 for a head whose weights are all 0.
        scale = 255 / max(float(pooled.max()), 1e-9)
        thumbnails.append(np.rint(pooled * scale).astype(np.uint8))
    return base64.b64encode(zlib.compress(np.stack(thumbnails).tobytes(), 1)).decode("ascii")


def _deflate(
    weights: NDArray[np.float32], is_hidden: NDArray[np.bool_], code_of_one: NDArray[np.float32]
) -> str:
    """Return a chunk as base64 of zlib data, as `pack_heads` describes it.

    Args:
        weights: The weights of its heads, (head, query, key).
        is_hidden: Whether a key disappears when a reader hides sinks, (key,).
        code_of_one: The code of a weight of 1, (key,).
    """
    sum_bytes = b""
    if is_hidden.any():
        # The sum of each row over the keys that are not hidden, (head, query).
        row_sums = weights[:, :, ~is_hidden].sum(-1, dtype=np.float64)
        is_enough = row_sums >= MIN_ROW_SUM
        # Code 0 marks a row whose sum is below MIN_ROW_SUM: the page shows it as empty when sinks are hidden. Other
        # rows must have a code that decodes to MIN_ROW_SUM or more.
        min_code = np.ceil(MIN_ROW_SUM / ROW_SUM_STEP)
        sum_codes = np.where(is_enough, np.maximum(np.rint(row_sums / ROW_SUM_STEP), min_code), 0)
        sum_bytes = _split_bytes(np.minimum(sum_codes, 0xFFFF).astype(np.uint16))
        # Divide by the exact sum, not by the decoded sum, so that shares are rounded once. The page computes a weight
        # as share x decoded sum, which is off by 1e-5 more.
        divisor = np.where(is_enough, row_sums, MIN_ROW_SUM).astype(np.float32)
        weights = np.where(is_hidden, weights, weights / divisor[:, :, None])
    codes = np.minimum(np.rint(weights * code_of_one), 0xFFFF).astype(np.uint16)
    # Sort the keys of each head by their mean code, (head, key). Runs get longer and Huffman codes better: 6% fewer
    # bytes.
    order = np.argsort(-codes.mean(1, dtype=np.float64), axis=1, kind="stable").astype(np.uint16)
    # The codes of each head column by column, (head, key in that order, query).
    columns = np.take_along_axis(codes.transpose(0, 2, 1), order[:, :, None].astype(np.int64), 1)
    # Z_RLE uses run lengths and Huffman codes alone: fewer bytes than zlib's default level 6, and six times as fast.
    compressor = zlib.compressobj(1, zlib.DEFLATED, wbits=15, memLevel=7, strategy=zlib.Z_RLE)
    packed = compressor.compress(_split_bytes(columns) + _split_bytes(order) + sum_bytes)
    return base64.b64encode(packed + compressor.flush()).decode("ascii")


def _split_bytes(numbers: NDArray[np.uint16]) -> bytes:
    """Return the low bytes of all numbers, then the high bytes."""
    return np.stack([numbers & 0xFF, numbers >> 8]).astype(np.uint8).tobytes()


# Photos


def pack_photos(record: Heatmap, blocks: list[str]) -> list[dict[str, Any]]:
    """Return each picture of a record as JSON values that the page's script reads.

    A picture is what the model sees: a photo, or a part of one such as a tile. A photo is embedded once, even if
    several pictures show the same part of it.

    Args:
        record: A record with a picture, or with pictures among its words.
        blocks: The page's blocks. This function appends JPEGs in base64.

    Returns:
        One entry per picture: `source`, `facts`, `grid` (rows, columns), `cells` (the key of each patch, row by row;
        -1 = the patch is no key), `size` (width and height as embedded) and `block` (the number of the block with its
        JPEG).
    """
    # Each picture with the keys of its patches, row by row. If the input is one picture, all ordinary keys are its
    # patches.
    pictures: list[tuple[Picture, Sequence[int]]] = []
    if record.picture is not None:
        pictures = [(record.picture, np.flatnonzero(~record.maps[0].keys.special).tolist())]
    for picture in record.pictures:
        # A picture among words always has `cells`, the key of each patch.
        assert picture.cells is not None
        pictures.append((picture, picture.cells.ravel().tolist()))
    entries: list[dict[str, Any]] = []
    # The pictures so far, each with the `size` and `block` of its JPEG.
    embedded: list[tuple[Picture, dict[str, Any]]] = []
    for picture, cells in pictures:
        same_photo = [pixels for other, pixels in embedded if _shows_same_photo(picture, other)]
        pixels = same_photo[0] if same_photo else _embed(picture, blocks)
        embedded.append((picture, pixels))
        width, height = pixels["size"]
        entries.append(
            {
                "source": printable(picture.source, 80),
                "facts": f"{printable(picture.facts, 300)}; embedded as {width} × {height}",
                "grid": list(picture.grid),
                "cells": cells,
                **pixels,
            }
        )
    return entries


def _embed(picture: Picture, blocks: list[str]) -> dict[str, Any]:
    """Append a picture as JPEG to the page's blocks, unless they have it, and return its `size` and `block`."""
    from PIL import Image

    image = Image.fromarray(picture.pixels)
    image.thumbnail((MAX_PHOTO_SIDE_PX, MAX_PHOTO_SIDE_PX), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=_JPEG_QUALITY)
    jpeg = base64.b64encode(content.getvalue()).decode("ascii")
    # Another text of the page may have appended the same JPEG.
    if jpeg not in blocks:
        blocks.append(jpeg)
    return {"size": list(image.size), "block": blocks.index(jpeg)}


def _with_ordinary_patches(record: Heatmap) -> AttentionMap:
    """Return a record's first map with patches marked as ordinary keys, which hiding special tokens leaves in place."""
    attention = record.maps[0]
    special = attention.keys.special.copy()
    for picture in record.pictures:
        assert picture.cells is not None
        special[picture.cells[picture.cells >= 0]] = False
    return replace(attention, keys=replace(attention.keys, special=special))


def _shows_same_photo(picture: Picture, other: Picture) -> bool:
    """Return whether two pictures show the same part of the same photo, such as the full photo and its only tile."""
    if picture.photo != other.photo or picture.area is None or other.area is None:
        return False
    return bool(np.allclose(picture.area, other.area, rtol=0, atol=_EDGE_TOLERANCE * min(picture.size)))
