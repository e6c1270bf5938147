"""An ablation drawn in the terminal, with rich: a grid of effects, the heads that matter, sets, pairs, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.records.ablation import Ablation, Curve, Effect, Effects, HeadEffects, SetEffects
from attnscope.views.ablation.summary import (
    PLACE_LABELS,
    curve_label,
    interval,
    label,
    notes,
    predicted_line,
    short_label,
)
from attnscope.views.tables.matrix import head_grid, room_for
from attnscope.views.tables.numbers import small_number
from attnscope.views.tables.plain_text import dim_lines, heading, shade
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import corpus_line, printable

_MOST = 15
_FEW = 3
_MOST_PAIRS = 10
_MOST_PLACES = 8
_MOST_TOKENS = 10
_CURVE_ROWS = 9
_CELL = 8


def show(found: Ablation, console: Console) -> RenderableType:
    """All that a record says, from the grid of the main quantity to the notes."""
    parts: list[RenderableType] = []
    main = found.main
    if main:
        parts.append(Text(f"{label(main)}{_unit(found, main)}", style="bold"))
        for kind in found.kinds:
            if len(found.kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            if len(found.heads) > _FEW:
                parts.append(effects_grid([head for head in found.heads if head.kind == kind], main, console.width))
        parts += [*([Text()] if len(found.heads) > _FEW else []), _ranking(found, main)]
    several = [one for one in found.sets if not one.interaction]
    if by_position := _by_position(found, several):
        parts += [Text(), *by_position]
    if found.worst_tokens:
        parts += [Text(), worst_tokens(found)]
    pairs = [one for one in found.sets if one.interaction]
    if several:
        parts += [renderable for one in several for renderable in (Text(), _together(one))]
    if pairs:
        name = next((name for name in pairs[0].interaction if name.endswith("_loss")), next(iter(pairs[0].interaction)))
        pairs = sorted(pairs, key=lambda one: -abs(one.interaction[name].value))
        rows = [(" ".join(one.heads), {name: one.effects[name]}, one.interaction[name]) for one in pairs[:_MOST_PAIRS]]
        parts += [Text(), _pairs(name, rows, len(pairs))]
    if found.curves:
        parts += [Text(), curves_table(found.curves)]
    said = [corpus_line(found, predictions=True), predicted_line(found), *notes(found)]
    return Group(*parts, Text(), *dim_lines(said))


def effects_grid(heads: Sequence[HeadEffects], name: str, width: int) -> Text:
    """Values, shaded; where a layer has more heads than the terminal has room for, tenths of the largest one."""
    by_head = {(head.layer, head.head): head.effects[name].value for head in heads if name in head.effects}
    layers, numbers = sorted({head.layer for head in heads}), sorted({head.head for head in heads})
    largest = max((abs(value) for value in by_head.values() if math.isfinite(value)), default=0.0) or 1.0
    fits = len(numbers) * _CELL <= room_for(layers, width)
    cell = _CELL if fits else 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = by_head.get((layer, head), math.nan)
        share = abs(value) / largest if math.isfinite(value) else 0.0
        shown = small_number(value) if fits else f"{min(9, int(share * 10))}" if math.isfinite(value) else " "
        text.append(f"{shown:>{cell - 1}}", style=_style(share, value) if math.isfinite(value) else "dim")
        text.append(" ")

    text = head_grid(layers, numbers, cell, width, draw)
    return text if fits else text.append(f"\ntenths of the largest, {small_number(largest)}", style="dim")


def _style(share: float, value: float) -> Style:
    """From white to blue, red where the value is negative."""
    return shade(share**0.7, "#ffffff", "#b2182b" if value < 0 else "#08519c")


def _ranking(found: Ablation, main: str) -> Table:
    """The heads without which most changes."""
    ranked = sorted(found.heads, key=lambda head: -_sort_key(head.effects[main].value))
    intervals = any(math.isfinite(head.effects[main].low) for head in ranked)
    title = f"head, of {len(ranked)}" if len(ranked) > _MOST else "head"
    columns = [Column(title, lambda head: printable(found.named(head)), style="bold")]
    names = [main, *(name for name in found.names if name != main)]
    for at, name in enumerate(names):
        columns += effect_columns(
            short_label(name),
            partial(lambda name, head: head.effects.get(name), name),
            intervals=intervals,
            drop=at and at + 1,
        )
    return Table(columns, ranked[:_MOST], gap=1)


def _by_position(found: Ablation, several: Sequence[SetEffects]) -> list[RenderableType]:
    """By how much the loss rises at which places of a text: the whole model first, then heads, and all together."""
    name = next((one for one in ("zero_loss", "mean_loss") if one in found.names), "")
    ranked = sorted(found.heads, key=lambda head: -_sort_key(_largest_size(found.by_position(head.effects, name))))
    rows = [(found.named(head), found.by_position(head.effects, name)) for head in ranked[:_MOST_PLACES]]
    rows += [(f"{len(one.heads)} together", found.by_position(one.effects, name)) for one in several]
    rows = [(named, effects) for named, effects in rows if effects]
    if not rows:
        return []
    intervals = any(math.isfinite(effect.low) for _, effects in rows for effect in effects.values())
    title = f"{short_label(name)} by position"
    columns = [Column(title, lambda row: printable(row[0]), wraps=True, least=14, style="bold")]
    for place in rows[0][1]:
        columns += effect_columns(
            PLACE_LABELS[place],
            partial(lambda place, row: row[1].get(place), place),
            intervals=intervals,
            drop=0,
            wraps=True,
        )
    said = [f"the {_MOST_PLACES} of {len(ranked)} heads without which most changes"] * (len(ranked) > _MOST_PLACES)
    if whole := {place: found.whole[f"loss_{place}"] for place in rows[0][1] if f"loss_{place}" in found.whole}:
        losses = ", ".join(f"{PLACE_LABELS[place]} {small_number(e.value)}" for place, e in whole.items())
        said.append(f"loss of the whole model, nats: {losses}")
    return [Table(columns, rows, gap=1), *dim_lines(["; ".join(said)])]


def worst_tokens(found: Ablation) -> Table:
    """The tokens that suffer most from lines: several with all heads replaced, and one of each head that matters."""
    together = [token for token in found.worst_tokens if not token.heads][:_MOST_TOKENS]
    by_head = {token.heads: token for token in reversed(found.worst_tokens) if token.heads}
    ranked = sorted(by_head.values(), key=lambda token: -token.change)[:_MOST_TOKENS]
    predicted = any(math.isfinite(token.loss) for token in found.worst_tokens)
    columns = [
        Column("worst with lines in", lambda token: printable(token.heads) or "all heads", style="bold"),
        Column("after", lambda token: printable(token.before), part=1, least=16),
        Column("token", lambda token: printable(token.token)),
    ]
    if predicted:
        columns += [
            Column("loss", lambda token: small_number(token.loss), right=True, drop=2),
            Column("with lines", lambda token: small_number(token.loss + token.change), right=True),
        ]
    else:
        columns.append(Column("Δ hidden", lambda token: small_number(token.change), right=True))
    columns.append(Column("source", lambda token: printable(token.source), style="dim", drop=3))
    return Table(columns, [*together, *ranked], gap=1)


def _largest_size(effects: Effects) -> float:
    return max((abs(effect.value) for effect in effects.values() if math.isfinite(effect.value)), default=-math.inf)


def _together(one: SetEffects) -> Table:
    """What changes without several heads at once, a quantity a row."""
    heads = [printable(head) for head in one.heads]
    named = ", ".join(heads[:_MOST]) + (f" and {len(heads) - _MOST} more" if len(heads) > _MOST else "")
    intervals = any(math.isfinite(effect.low) for effect in one.effects.values())
    columns = [
        Column(
            f"{'with lines in' if _lines_alone(one) else 'without'} {named}",
            lambda row: label(row[0]),
            wraps=True,
            least=24,
        ),
        *effect_columns("together", lambda row: row[1], intervals=intervals, drop=0),
    ]
    # Places have a table of their own.
    return Table(columns, [row for row in one.effects.items() if not row[0].endswith(tuple(PLACE_LABELS))], gap=1)


def _lines_alone(one: SetEffects) -> bool:
    return all(name.startswith("line_") for name in one.effects)


def _pairs(name: str, rows: Sequence[tuple[str, Effects, Effect]], n_pairs: int) -> Table:
    columns = [
        Column(f"pair, of {n_pairs}" if n_pairs > len(rows) else "pair", lambda row: printable(row[0]), style="bold"),
        Column(short_label(name), lambda row: small_number(row[1][name].value), right=True, drop=2),
        *effect_columns("beyond the sum of both", lambda row: row[2], intervals=True, drop=0),
    ]
    return Table(columns, rows, gap=1)


def curves_table(curves: Sequence[Curve]) -> Table:
    """What is left of the model with fewer and fewer heads; random orders as the range that they span."""
    name = curves[0].quantity

    def of(shown: str) -> Callable[[int], str]:
        def span(at: int) -> str:
            values = [curve.points[at][name].value for curve in curves if curve_label(curve) == shown]
            low, high = small_number(min(values)), small_number(max(values))
            return low if low == high else f"{low} to {high}"

        return span

    columns = [Column("heads left", lambda at: str(curves[0].n_left[at]))]
    for number, shown in enumerate(dict.fromkeys(map(curve_label, curves))):
        title = f"{'loss' if name == 'loss' else short_label(name)}, {shown}"
        columns.append(Column(title, of(shown), right=True, wraps=True, least=14, drop=number))
    n = len(curves[0].n_left)
    return Table(columns, sorted({round(row * (n - 1) / (_CURVE_ROWS - 1)) for row in range(_CURVE_ROWS)}), gap=1)


def effect_columns(
    title: str, effect: Callable[[Any], Effect | None], *, intervals: bool, drop: int, wraps: bool = False
) -> list[Column]:
    """A column of values, and, if there are any, one of their intervals."""

    def write(written: Callable[[Effect], str]) -> Callable[[Any], str]:
        return lambda row: "" if (one := effect(row)) is None else written(one)

    values = Column(title, write(lambda one: small_number(one.value)), right=True, wraps=wraps, drop=drop)
    between = Column("95% interval", write(interval), right=True, style="dim", drop=drop or 1)
    return [values, between] if intervals else [values]


def _unit(found: Ablation, name: str) -> str:
    unit = printable(found.facts(name).unit, 40)
    return f", {unit}" if unit else ""


def _sort_key(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
