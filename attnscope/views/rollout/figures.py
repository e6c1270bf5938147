"""Attention rollout as figures: beside what the heads of each layer attend to on average."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.style import Style
from attnscope.errors import amount
from attnscope.records import AttentionMap, Heatmap
from attnscope.records.maps.pictures import MEAN
from attnscope.records.maps.rollouts import METHODS, Rollout
from attnscope.views.maps import figures, pictures
from attnscope.views.maps.sheets import Sheet

_NAMES = ("mean attention", "rollout")


def pages(rollout: Rollout, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Drawing]]:
    """Draw the figures one after the other: an overview, a figure per layer, and of a text bars of a query's row."""
    record = as_maps(rollout)
    if rollout.picture is not None:
        yield from pictures.pages(record, style, query)
        return
    if query is not None:
        rollout.require(query)
    yield from figures.Painter(style or Style("figure")).pages(record, sheets_of(rollout, query))


def require_query(rollout: Rollout, query: str) -> None:
    """Refuse a query that means no token."""
    if rollout.picture is None or query.casefold() != MEAN:
        rollout.require(query)


def sheets_of(rollout: Rollout, query: str | None = None) -> list[Sheet]:
    """List the figures that a rollout of a text is drawn as, in the order of their files."""
    sheets = figures.sheets_of(as_maps(rollout), query)
    labels = rollout.tokens.labels
    titles = {
        "overview": f"rollout over {amount(len(rollout.mean), 'layer')}",
        "grid": "layer {layer}: attention, and where it came from",
        "bars": "where “{label}” (token {query}) came from",
    }
    return [
        replace(
            sheet,
            title=titles[sheet.form].format(layer=sheet.layers[0], query=sheet.query, label=labels[sheet.query]),
            marked=(),
        )
        for sheet in sheets
    ]


def as_maps(rollout: Rollout) -> Heatmap:
    """Return the methods in the place of heads."""
    weights = np.stack([rollout.of(method) for method in METHODS], 1).astype(np.float32)
    n_layers, n_methods = weights.shape[:2]
    attention = AttentionMap(
        kind="rollout",
        layers=tuple(range(n_layers)),
        heads=tuple(range(n_methods)),
        weights=weights,
        queries=rollout.tokens,
        keys=rollout.tokens,
        n_layers=n_layers,
        n_heads=n_methods,
        n_kv_heads=n_methods,
        head_names=_NAMES,
    )
    notes = [
        f"rollout: the identity has {rollout.residual:g} of each layer, for the residual connection "
        "(Abnar & Zuidema 2020)",
        *rollout.run.get("notes", ()),
    ]
    return Heatmap(rollout.text, (attention,), {**rollout.run, "notes": notes}, picture=rollout.picture)
