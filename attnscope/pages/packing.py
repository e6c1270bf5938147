"""Attention weights as few bytes, every number that the page shows within 0.0005 of the weight.

Each head is quantised to 16-bit codes, written column by column in two planes of bytes, and deflated. What a code is
worth is chosen for what a reader may do with the weights in the page:

- A key's step is divided by the number of pieces of its word, so that weights *summed* over the pieces of a word
  (words merged) are off by no more than a single one.
- Where the text has special tokens, or another sink to hide, weights on the other keys are stored as shares of what the
  row gives to those keys together, so that rows *divided* by what is left (sinks hidden) are off by no more either.

The page shows four decimals, which adds 0.00005 to half a step. Small pages have finer steps: there it costs nothing.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.records import Tokens
from attnscope.records.maps.heatmap import LEAST_LEFT

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
    """The largest divisor of a step with which codes fit into 16 bits: 52 for STEP, 5 for FINE_STEP.

    The sum over a word of n pieces, more than that many, is off by up to n / that many times half a step.
    """
    return int(0xFFFF * step / 1.12)


def pieces_of(tokens: Tokens, most: int) -> NDArray[np.int64]:
    """How many pieces the word of each token has, (token,), at most `most`; 1 where words are not known."""
    counts = np.ones(len(tokens), np.int64)
    if tokens.words is not None:
        for group in tokens.word_groups():
            counts[group] = min(len(group), most)
    return counts


def pack(
    weights: Sequence[NDArray[np.float32]], keys: Tokens, hidden: NDArray[np.bool_], step: float = STEP
) -> Iterator[Chunk]:
    """Packs the heads of a map, (query, key) each, 0 to 1.1, into chunks in their order; small heads share one.

    Keys that are `hidden` go where special tokens are hidden; `step` is the value of a code.
    """
    if not weights:
        return
    n_queries, n_keys = weights[0].shape
    size = max(1, _CHUNK_BYTES // (2 * n_queries * n_keys))  # heads per chunk
    unit = (pieces_of(keys, most_pieces(step)) / step).astype(np.float32)
    parts = [tuple(range(start, min(start + size, len(weights)))) for start in range(0, len(weights), size)]

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
    pictures = []
    for head in weights:
        starts = [np.arange(side) * n // side for n in head.shape if (side := min(n, THUMBNAIL_SIDE))]
        pooled = np.maximum.reduceat(np.maximum.reduceat(head, starts[0], axis=0), starts[1], axis=1)
        pictures.append(np.rint(pooled * (255 / max(float(pooled.max()), 1e-9))).astype(np.uint8))
    return base64.b64encode(zlib.compress(np.stack(pictures).tobytes(), 1)).decode("ascii")


def _deflate(block: NDArray[np.float32], hidden: NDArray[np.bool_], unit: NDArray[np.float32]) -> str:
    """Some heads, (head, query, key), as the page reads them; `unit` is how many codes 1 is for each key."""
    scales = None
    if hidden.any():
        left = block[:, :, ~hidden].sum(-1, dtype=np.float64)
        enough = left >= LEAST_LEFT
        # Rows with next to nothing left are empty when special tokens are hidden; the code 0 says so.
        scale_codes = np.where(enough, np.maximum(np.rint(left / LEFT_UNIT), np.ceil(LEAST_LEFT / LEFT_UNIT)), 0)
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
