"""Attention rollout as figures: beside what the heads of each layer attend to on average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.style import Scale, Style, meanings
from attnscope.errors import amount
from attnscope.records import AttentionMap, Heatmap
from attnscope.records.maps.pictures import MEAN
from attnscope.records.maps.rollouts import METHODS, Rollout
from attnscope.report.wording import run_notes
from attnscope.views.maps.figures import BarCanvas, Header, MapCanvas, Painter
from attnscope.views.maps.picture_figures import PicturePage, query_of
from attnscope.views.maps.sheets import Sheet

_NAMES = ("mean attention", "rollout")
_SHORT_NAMES = ("attention", "rollout")
_MEANING = meanings(
    "share of a row that a column gets", "share of a row that a column gets ÷ the largest of the same map"
)
_PICTURE_MEANING = meanings(
    "share of the token's row that a patch gets",
    "share of the token's row that a patch gets ÷ the largest of the same picture",
)


def pages(rollout: Rollout, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Drawing]]:
    """The figures one after the other, each with its file name without the ending.

    An overview of all layers, a figure a layer with its tokens named, and with a query bars of its row. Of a picture:
    an overview of all layers, and the last one large.
    """
    style = style or Style("figure")
    if rollout.picture is None:
        yield from _RolloutPainter(rollout, style).pages(_as_maps(rollout), sheets_of(rollout, query))
        return
    record = _over_picture(rollout)
    for sheet in picture_sheets(rollout, query):
        yield sheet.stem, _PicturePage(record, sheet, style)


def require_query(rollout: Rollout, query: str) -> None:
    """Refuses a query that means no token."""
    if rollout.picture is None or query.casefold() != MEAN:
        rollout.require(query)


def sheets_of(rollout: Rollout, query: str | None = None) -> list[Sheet]:
    """The figures that a rollout is drawn as, in the order of their files."""
    n_layers = len(rollout.mean)
    layers = [tuple((layer, method) for method in range(len(METHODS))) for layer in range(n_layers)]
    every = tuple(pair for heads in layers for pair in heads)
    title = f"rollout over {amount(n_layers, 'layer')}"
    sheets = [Sheet("overview", "overview", every, title=title)]
    sheets += [
        Sheet(f"L{layer:02d}", "grid", heads, title=f"layer {layer}: attention, and where it came from")
        for layer, heads in enumerate(layers)
    ]
    for token in rollout.require(query) if query is not None else ():
        title = f"where “{rollout.tokens.labels[token]}” (token {token}) came from"
        sheets.append(Sheet(f"query-{token:03d}", "bars", every, 0, token, title))
    return sheets


class _RolloutCanvas(MapCanvas):
    meaning = _MEANING
    layers_across = True  # two methods would leave a page of columns empty

    @staticmethod
    def name_head(head: int) -> str:
        return _NAMES[head]


class _RolloutBars(BarCanvas):
    meaning = "bars: the share of the token's row that each input token gets; a full panel is 1"


class _RolloutPainter(Painter):
    """Draws a rollout as if its methods were the heads of its layers."""

    map_canvas, bar_canvas = _RolloutCanvas, _RolloutBars

    def __init__(self, rollout: Rollout, style: Style) -> None:
        super().__init__(style)
        text = " ".join(rollout.text.split())
        notes = [
            "rows: tokens after a layer · columns: of mean attention the layer's keys, else input tokens",
            f"rollout: the identity has {rollout.residual:g} of each layer, for the residual connection "
            "(Abnar & Zuidema 2020)",
            *run_notes(rollout.run),
        ]
        self._header = Header(str(rollout.run.get("model", "model")), f"“{text}”", tuple(notes))

    def describe(self, record: Heatmap, sheet: Sheet) -> tuple[Header, tuple[str, ...]]:
        prefix = "L{} " if sheet.form == "bars" else ""
        return self._header, tuple(prefix.format(layer) + _NAMES[method] for layer, method in sheet.heads)


def _as_maps(rollout: Rollout) -> Heatmap:
    """The methods in the place of heads."""
    weights = np.stack([rollout.of(method) for method in METHODS], 1).astype(np.float32)
    return Heatmap(rollout.text, (_map(rollout, weights),), rollout.run)


def _map(rollout: Rollout, weights: NDArray[np.float32]) -> AttentionMap:
    """Weights, (layer, head, query, key), whatever stands in the place of layers and heads."""
    n_layers, n_heads = weights.shape[:2]
    return AttentionMap(
        kind=rollout.kind,
        layers=tuple(range(n_layers)),
        heads=tuple(range(n_heads)),
        weights=weights,
        queries=rollout.tokens,
        keys=rollout.tokens,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
    )


# Over a picture -----------------------------------------------------------------------------------------------------


def picture_sheets(rollout: Rollout, query: str | None = None) -> list[Sheet]:
    """An overview of all layers, above what heads attend to on average, below the rollout; and the last layer large."""
    record = _over_picture(rollout)
    token, name = query_of(record.maps[0], query)
    mark = MEAN if token < 0 else name.replace(",", "-")
    heads = record.chosen(record.maps[0])
    last = ((1, len(rollout.rollout) - 1),)
    return [
        Sheet(f"overview-{mark}", "overview", heads, query=token),
        Sheet(f"last-{mark}", "single", last, query=token),
    ]


class _PicturePage(PicturePage):
    names_px = 84
    meaning: Mapping[Scale, str] = _PICTURE_MEANING

    def names(self) -> list[tuple[str, str]]:
        return [(_SHORT_NAMES[method], f"L{layer}") for method, layer in self.sheet.heads]

    def name_panel(self, pair: tuple[int, int]) -> str:
        return f"{_SHORT_NAMES[pair[0]]} after layer {pair[1]}"

    def title(self) -> str:
        query = self.sheet.query
        label = "the mean over all patches" if query < 0 else self.attention.queries.labels[query]
        return f"rollout over {amount(self.attention.n_heads, 'layer')}: where {label} came from"


def _over_picture(rollout: Rollout) -> Heatmap:
    """The methods in the place of layers, and the layers in the place of heads."""
    weights = np.stack([rollout.of(method) for method in METHODS]).astype(np.float32)
    notes = [
        "attention: the mean of a layer's heads",
        f"rollout: the identity has {rollout.residual:g} of each layer, for the residual connection "
        "(Abnar & Zuidema 2020)",
        *rollout.run.get("notes", ()),
    ]
    run = {**rollout.run, "notes": notes}
    return Heatmap(rollout.text, (_map(rollout, weights),), run, picture=rollout.picture)
