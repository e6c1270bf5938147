"""How every head's attention over a picture changes: from one photo to another, or from one question to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.questions.distance import Measure, row_divergences
from attnscope.models.model import Model, viewer_of
from attnscope.records.compare.pairs import PicturePair
from attnscope.records.maps.pictures import Picture
from attnscope.records.maps.tokens import Tokens
from attnscope.senses.photos import read_photo
from attnscope.studies.compare.options import MEASURES, require_measures
from attnscope.studies.compare.study import require_one_kind
from attnscope.studies.compare.texts import align, find_pairs
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import View, read
from attnscope.studies.maps.study import outline, run_model


@with_plain_torch
def compare_pictures(
    model: Model, images: Sequence[Any], texts: Sequence[str], *, query: str | None = None, measure: str = "hellinger"
) -> PicturePair:
    """Ranks all heads by how much what words give to a picture changes: with the photo, or with the question.

    Of models whose words, or learned queries, see the picture by cross-attention, it is that attention. Words are
    those of the question, without marks that the chat template adds; those also where `query` names them. They are
    aligned as `compare_texts` aligns tokens. Each word's row is compared over the
    cells of one grid over [0, 1] x [0, 1] of what the model saw, and over all that is elsewhere as one key. The grid
    has the fewer rows and the fewer columns of the two; what a patch gets is spread evenly over its area. Of several
    pictures of a photo the one of most patches is compared.

    How much a head changes is the root of the mean divergence over the words that are equal in both, or at those that
    `query` names.

    Args:
        model: A loaded model that reads pictures among words.
        images: One photo, or two: as `picture_heatmap` takes them.
        texts: One question, or two.
        query: The words that heads are ranked at: a token, a word, or a place such as `@3` after the first picture.
        measure: "hellinger" or "jensen_shannon".

    Raises:
        AttnscopeError: A photo cannot be read; the model reads no pictures among words; the query names no word.
    """
    require_measures((measure,))
    model = viewer_of(model)
    photos = [read_photo(image) for image in images]
    views = [View((photos[0],), texts[0]), View((photos[-1],), texts[-1])]
    readings = [read(model, view) for view in views]
    if not readings[0].axes:
        require_one_kind(model)
    everything = Choice().within(model.info)
    outlines = [outline(model.info, reading, everything) for reading in readings]
    first, second = (
        run_model(model, replace(record, maps=record.maps[:1]), reading)
        for record, reading in zip(outlines, readings, strict=True)
    )
    maps = first.maps[0], second.maps[0]
    heads = tuple((layer, head) for layer in maps[0].layers for head in maps[0].heads if maps[0].exists(layer, head))
    tokens = maps[0].queries, maps[1].queries
    aligned, equal, _ = align(*tokens)
    named = () if query is None else find_pairs(query, tokens, aligned)
    own = [_of_question(side, text) for side, text in zip(tokens, (texts[0], texts[-1]), strict=True)]
    keep = own[0][aligned[:, 0]] & own[1][aligned[:, 1]]
    if not (equal & keep).any():  # questions that share no word: all that the prompts share
        keep[:] = True
    equal &= keep
    keep[list(named)] = True
    aligned, equal = aligned[keep], equal[keep]
    largest = [max(record.pictures, key=lambda picture: math.prod(picture.grid)) for record in (first, second)]
    grid = min(largest[0].grid[0], largest[1].grid[0]), min(largest[0].grid[1], largest[1].grid[1])
    weights = []
    for side, (attention, picture) in enumerate(zip(maps, largest, strict=True)):
        cells = [[picture.over(row) for row in attention.of(*head)[aligned[:, side]]] for head in heads]
        weights.append(spread(np.nan_to_num(np.array(cells)), grid).astype(np.float32))
    flat = [w.reshape(*w.shape[:2], -1) for w in weights]
    first_picture, second_picture = (_on_grid(picture, grid) for picture in largest)
    return PicturePair(
        run=run_of(model.info, [note for reading in readings for note in reading.notes]),
        texts=(first.text, second.text),
        words=tuple((tokens[0].labels[a], tokens[1].labels[b]) for a, b in aligned.tolist()),
        pictures=(first_picture, second_picture),
        kind=maps[0].kind,
        heads=heads,
        weights=weights[0],
        other_weights=weights[1],
        equal=equal,
        divergences={name: row_divergences(cast("Measure", name), *flat) for name in MEASURES},
        measure=measure,
        query=query,
        queries=tuple((np.cumsum(keep)[list(named)] - 1).tolist()),
    )


def _of_question(tokens: Tokens, text: str) -> NDArray[np.bool_]:
    """Which tokens are the question's own, (token,): no special ones, none of the chat template."""
    own = ~tokens.special
    question = text.strip()
    start = tokens.text.rfind(question)
    if question and start >= 0:
        own &= (tokens.offsets[:, 0] < start + len(question)) & (tokens.offsets[:, 1] > start)
    return own if own.any() else np.ones_like(own)


def spread(weights: NDArray[np.float64], grid: tuple[int, int]) -> NDArray[np.float64]:
    """Weights on the cells of a grid, (..., row, column), as those on the cells of another one over the same area.

    Each cell's weight is spread evenly over it: sums stay what they are.
    """
    down, across = (_overlaps(n, to) for n, to in zip(weights.shape[-2:], grid, strict=True))
    moved: NDArray[np.float64] = down @ weights @ across.T
    return moved


def _overlaps(n: int, to: int) -> NDArray[np.float64]:
    """How much of each of n equal parts of a line lies in each of `to` others, (to, n); columns sum to 1."""
    old, new = np.linspace(0, 1, n + 1), np.linspace(0, 1, to + 1)
    shared = np.minimum(old[1:], new[1:, None]) - np.maximum(old[:-1], new[:-1, None])
    part: NDArray[np.float64] = np.maximum(shared, 0.0) * n
    return part


def _on_grid(picture: Picture, grid: tuple[int, int]) -> Picture:
    """The same picture with the cells of another grid, which are whole pixels: the nearest pixel of each place."""
    sizes = [n * max(1, have // n) for n, have in zip(grid, picture.pixels.shape[:2], strict=True)]
    rows, columns = (
        ((np.arange(size) + 0.5) * have / size).astype(int)
        for size, have in zip(sizes, picture.pixels.shape[:2], strict=True)
    )
    return replace(picture, pixels=np.ascontiguousarray(picture.pixels[rows][:, columns]), grid=grid, cells=None)
