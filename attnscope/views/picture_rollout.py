"""Attention rollout of a vision model laid over the picture that it saw: a column a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from attnscope.records import AttentionMap, Heatmap
from attnscope.records.rollouts import METHODS, Rollout
from attnscope.views.canvas import write_pages
from attnscope.views.picture_figures import PicturePage, query_of
from attnscope.views.sheets import Sheet
from attnscope.views.style import Style

_NAMES = ("attention", "rollout", "flow")
_MEANING = {
    "fixed": "share of the token's row that a patch gets",
    "figure": "share of the token's row that a patch gets (scale: largest of this figure)",
    "head": "share of the token's row that a patch gets ÷ the largest of the same picture",
}


def draw(
    rollout: Rollout, folder: Path, formats: Sequence[str], *, style: Style | None = None, query: str | None = None
) -> list[Path]:
    """Draws a rollout over its picture, each file whole or not at all.

    An overview of all layers: above what the heads attend to on average, below the rollout; and the last layer large.

    Raises:
        AttnscopeError: No such token; the folder cannot be written.
    """
    record = _as_maps(rollout)
    attention = record.maps[0]
    place, name = query_of(attention, query)
    mark = "mean" if place < 0 else name.replace(",", "-")
    sheets = (
        Sheet(f"overview-{mark}", "overview", record.chosen(attention), query=place),
        Sheet(f"last-{mark}", "single", ((1, len(rollout.rollout) - 1),), query=place),
    )
    made = partial(_RolloutPage, record, style=style or Style("figure"))
    return write_pages(((sheet.stem, made(sheet)) for sheet in sheets), folder, formats)


class _RolloutPage(PicturePage):
    names_px = 84
    meaning: Mapping[str, str] = _MEANING

    @staticmethod
    def row_name(layer: int) -> str:
        return _NAMES[layer]

    @staticmethod
    def column_name(head: int) -> str:
        return f"L{head}"

    @staticmethod
    def panel_name(pair: tuple[int, int]) -> str:
        return f"{_NAMES[pair[0]]} after layer {pair[1]}"

    @staticmethod
    def title(sheet: Sheet, attention: AttentionMap) -> str:
        label = "the mean over all patches" if sheet.query < 0 else attention.queries.labels[sheet.query]
        return f"rollout over {attention.n_heads} layers: where {label} came from"


def _as_maps(rollout: Rollout) -> Heatmap:
    """The methods in the place of layers, and the layers in the place of heads."""
    weights = np.stack([rollout.of(method) for method in METHODS]).astype(np.float32)
    n_layers = weights.shape[1]
    attention = AttentionMap(
        kind=rollout.kind,
        layers=tuple(range(len(METHODS))),
        heads=tuple(range(n_layers)),
        weights=weights,
        queries=rollout.tokens,
        keys=rollout.tokens,
        n_layers=len(METHODS),
        n_heads=n_layers,
        n_kv_heads=n_layers,
    )
    notes = [
        "attention: the mean of a layer's heads",
        f"rollout: the identity has {rollout.residual:g} of each layer, for the residual connection "
        "(Abnar & Zuidema 2020)",
        *rollout.run.get("notes", ()),
    ]
    return Heatmap(rollout.text, (attention,), {**rollout.run, "notes": notes}, picture=rollout.picture)
