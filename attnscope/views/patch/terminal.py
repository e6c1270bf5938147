"""Patching drawn in the terminal, with rich: a grid of effects, the strongest heads, positions, curve, edges."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.records.patch import Edge, FaithfulnessCurve, Patching
from attnscope.report.matrix import matrix
from attnscope.report.numbers import q_value, small_number
from attnscope.report.plain_text import dim_lines, heading
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import corpus_line, printable
from attnscope.views.ablation.summary import label, short_label
from attnscope.views.ablation.terminal import effect_columns, effects_grid
from attnscope.views.patch.summary import curve_label, notes, title_of, total_line

_MOST = 15
_MOST_ROWS = 8
_CURVE_ROWS = 9


def show(patching: Patching, console: Console) -> RenderableType:
    """All that a record says."""
    parts: list[RenderableType] = [Text(f"{label(patching.main)}, logits: {title_of(patching)}", style="bold")]
    for kind in patching.kinds:
        heads = [head for head in patching.heads if head.kind == kind]
        parts.append(effects_grid(heads, patching.main, console.width))
    parts += [Text(), _ranking(patching)]
    if patching.positions:
        rows = strongest(patching, _MOST_ROWS)
        values, names = patching.position_effects[rows, :, 0], list(map(patching.unit_name, rows))
        parts += [Text(), heading("effect of each position alone, strongest heads")]
        parts.append(matrix(values, names, patching.positions, console, bold=True))
    if patching.curve is not None:
        parts += [Text(), _curve(patching, patching.curve)]
    if patching.edges:
        parts += [Text(), _edges(patching)]
    return Group(*parts, Text(), *dim_lines([corpus_line(patching), total_line(patching), *notes(patching)]))


def strongest(patching: Patching, most: int) -> list[int]:
    """Numbers of the heads with the largest effects of either sign, one of each that are patched together."""
    sizes = []
    for head in patching.heads:
        size = abs(head.effects["effect"].value)
        estimate = abs(head.effects["attribution"].value) if "attribution" in head.effects else 0
        sizes.append((True, size) if math.isfinite(size) else (False, estimate))
    firsts = np.unique(patching.units, return_index=True)[1].tolist()
    return sorted(firsts, key=lambda n: sizes[n], reverse=True)[:most]


def _ranking(patching: Patching) -> TextTable:
    """The heads that matter most."""
    n_units = len(set(patching.units.tolist()))
    title = f"head, of {n_units}" if n_units > _MOST else "head"
    columns = [TextColumn(title, lambda n: printable(patching.unit_name(n)), style="bold", wraps=True, least=12)]
    intervals = patching.whole["total"].count > 1
    names = [name for name in patching.names if name != "share" or patching.has_shares]
    for at, name in enumerate(names):
        effect = partial(lambda name, n: patching.heads[n].effects.get(name), name)
        columns += effect_columns(short_label(name), effect, intervals=intervals, drop=at and at + 2)
    columns.insert(3, TextColumn("q", lambda n: q_value(float(patching.q[n])), right=True, drop=1))
    return TextTable(columns, strongest(patching, _MOST), gap=1)


def _curve(patching: Patching, curve: FaithfulnessCurve) -> TextTable:
    """What is left of the total effect with fewer and fewer heads."""
    columns = [
        TextColumn("heads left", lambda point: str(curve.n_left[point])),
        TextColumn(
            f"faithfulness, {curve_label(patching)}",
            lambda point: small_number(curve.points[point].value),
            right=True,
            wraps=True,
            least=14,
        ),
    ]
    last = len(curve.n_left) - 1
    return TextTable(columns, sorted({round(row * last / (_CURVE_ROWS - 1)) for row in range(_CURVE_ROWS)}), gap=1)


def _edges(patching: Patching) -> TextTable:
    """The paths, strongest first."""
    ranked = sorted(patching.edges, key=lambda edge: -abs(edge.effect.value))

    def name(edge: Edge) -> str:
        return f"{edge.sender} → {edge.receiver}" + (f" ({edge.by})" if edge.by else "")

    columns = [
        TextColumn(f"path, of {len(ranked)}", name, style="bold"),
        *effect_columns("effect", lambda edge: edge.effect, intervals=patching.whole["total"].count > 1, drop=0),
        TextColumn("q", lambda edge: q_value(edge.q), right=True, drop=1),
    ]
    if patching.has_shares:
        columns += effect_columns("share of total", lambda edge: edge.share, intervals=False, drop=2)
    if patching.options.get("n_paths"):
        columns.append(TextColumn("attribution", lambda edge: small_number(edge.attribution), right=True, drop=3))
    return TextTable(columns, ranked[:_MOST], gap=1)
