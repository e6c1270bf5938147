"""Patching drawn in the terminal, with rich: a grid of effects, the strongest heads, positions, curve, edges."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.records.patch import Patching
from attnscope.views.ablation.summary import label, short_label
from attnscope.views.ablation.terminal import curves_table, effect_columns, effects_grid
from attnscope.views.patch.summary import notes, title_of, total_line
from attnscope.views.tables.matrix import matrix
from attnscope.views.tables.numbers import q_value, small_number
from attnscope.views.tables.plain_text import dim_lines, heading
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import corpus_line, printable

_MOST = 15
_MOST_ROWS = 8


def show(found: Patching, console: Console) -> RenderableType:
    """All that a record says."""
    parts: list[RenderableType] = [Text(f"{label(found.main)}, logits: {title_of(found)}", style="bold")]
    for kind in found.kinds:
        parts.append(effects_grid([head for head in found.heads if head.kind == kind], found.main, console.width))
    parts += [Text(), _ranking(found)]
    if found.positions:
        parts += [Text(), heading("effect of each position alone, strongest heads"), _positions(found, console)]
    if found.curves:
        parts += [Text(), curves_table(found.curves)]
    if found.edges:
        parts += [Text(), _edges(found)]
    return Group(*parts, Text(), *dim_lines([corpus_line(found), total_line(found), *notes(found)]))


def strongest(found: Patching, most: int) -> list[int]:
    """Numbers of the heads with the largest effects of either sign, one of each that are patched together."""
    sizes = [abs(head.effects["effect"].value) for head in found.heads]
    estimates = [abs(head.effects["attribution"].value) if "attribution" in head.effects else 0 for head in found.heads]
    firsts = np.unique(found.units, return_index=True)[1].tolist()
    keys = {n: (math.isfinite(sizes[n]), sizes[n] if math.isfinite(sizes[n]) else estimates[n]) for n in firsts}
    return sorted(firsts, key=lambda n: keys[n], reverse=True)[:most]


def _ranking(found: Patching) -> Table:
    """The heads that matter most."""
    n_units = len(set(found.units.tolist()))
    title = f"head, of {n_units}" if n_units > _MOST else "head"
    columns = [Column(title, lambda n: printable(found.unit_name(n)), style="bold", wraps=True, least=12)]
    for at, name in enumerate(found.names):
        columns += effect_columns(
            short_label(name),
            partial(lambda name, n: found.heads[n].effects.get(name), name),
            intervals=len(found.pairs) > 1,
            drop=at and at + 2,
        )
    columns.insert(3, Column("q", lambda n: q_value(float(found.q[n])), right=True, drop=1))
    return Table(columns, strongest(found, _MOST), gap=1)


def _positions(found: Patching, console: Console) -> RenderableType:
    rows = strongest(found, _MOST_ROWS)
    names = [found.unit_name(n) for n in rows]
    return matrix(found.position_effects[rows, :, 0], names, found.positions, console, bold=True)


def _edges(found: Patching) -> Table:
    """The paths, strongest first."""
    ranked = sorted(found.edges, key=lambda edge: -abs(edge.effect.value))
    columns = [
        Column(
            f"path, of {len(ranked)}",
            lambda edge: f"{edge.sender} → {edge.receiver}" + (f" ({edge.by})" if edge.by else ""),
            style="bold",
        ),
        *effect_columns("effect", lambda edge: edge.effect, intervals=len(found.pairs) > 1, drop=0),
        Column("q", lambda edge: q_value(edge.q), right=True, drop=1),
        *effect_columns("share of total", lambda edge: edge.share, intervals=False, drop=2),
    ]
    if found.options.get("n_paths"):
        columns.append(Column("attribution", lambda edge: small_number(edge.attribution), right=True, drop=3))
    return Table(columns, ranked[:_MOST], gap=1)
