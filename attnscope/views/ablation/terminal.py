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


def show(ablation: Ablation, console: Console) -> RenderableType:
    """All that a record says, from the grid of the main quantity to the notes."""
    parts: list[RenderableType] = []
    main, has_grid = ablation.main, len(ablation.heads) > _FEW
    if main:
        unit = printable(ablation.facts(main).unit, 40)
        parts.append(Text(f"{label(main)}, {unit}" if unit else label(main), style="bold"))
        for kind in ablation.kinds:
            if len(ablation.kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            if has_grid:
                parts.append(effects_grid([head for head in ablation.heads if head.kind == kind], main, console.width))
        parts += [*[Text()] * has_grid, _ranking(ablation, main)]
    several = [each for each in ablation.sets if not each.interaction]
    if by_position := _by_position(ablation, several):
        parts += [Text(), *by_position]
    if ablation.worst_tokens:
        parts += [Text(), worst_tokens(ablation)]
    parts += [part for each in several for part in (Text(), _together(each))]
    if pairs := [each for each in ablation.sets if each.interaction]:
        parts += [Text(), _pairs(pairs)]
    if ablation.curves:
        parts += [Text(), curves_table(ablation.curves)]
    lines = [corpus_line(ablation, predictions=True), predicted_line(ablation), *notes(ablation)]
    return Group(*parts, Text(), *dim_lines(lines))


def effects_grid(heads: Sequence[HeadEffects], name: str, width: int) -> Text:
    """Values, shaded; where a layer has more heads than the terminal has room for, tenths of the largest one."""
    values = {(head.layer, head.head): head.effects[name].value for head in heads if name in head.effects}
    layers, numbers = sorted({head.layer for head in heads}), sorted({head.head for head in heads})
    largest = max((abs(value) for value in values.values() if math.isfinite(value)), default=0.0) or 1.0
    fits = len(numbers) * _CELL <= room_for(layers, width)
    cell = _CELL if fits else 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = values.get((layer, head), math.nan)
        style: str | Style = "dim"
        written = small_number(value) if fits else " "
        if math.isfinite(value):
            share = abs(value) / largest
            style = shade(share**0.7, "#ffffff", "#b2182b" if value < 0 else "#08519c")
            written = written if fits else f"{min(9, int(share * 10))}"
        text.append(f"{written:>{cell - 1}}", style=style).append(" ")

    text = head_grid(layers, numbers, cell, width, draw)
    return text if fits else text.append(f"\ntenths of the largest, {small_number(largest)}", style="dim")


def _ranking(ablation: Ablation, main: str) -> Table:
    """The heads without which most changes."""
    ranked = sorted(ablation.heads, key=lambda head: -_sort_key(head.effects[main].value))
    intervals = any(math.isfinite(head.effects[main].low) for head in ranked)
    title = f"head, of {len(ranked)}" if len(ranked) > _MOST else "head"
    columns = [Column(title, lambda head: printable(ablation.named(head)), style="bold")]
    names = [main, *(name for name in ablation.names if name != main)]
    for at, name in enumerate(names):
        effect = partial(lambda name, head: head.effects.get(name), name)
        columns += effect_columns(short_label(name), effect, intervals=intervals, drop=at and at + 1)
    return Table(columns, ranked[:_MOST], gap=1)


def _by_position(ablation: Ablation, several: Sequence[SetEffects]) -> list[RenderableType]:
    """By how much the loss rises at which places of a text: the whole model first, then heads, and all together."""
    name = next((name for name in ("zero_loss", "mean_loss") if name in ablation.names), "")

    def of(effects: Effects) -> Effects:
        return ablation.by_position(effects, name)

    ranked = sorted(ablation.heads, key=lambda head: -_sort_key(_largest_size(of(head.effects))))
    rows = [(ablation.named(head), of(head.effects)) for head in ranked[:_MOST_PLACES]]
    rows += [(f"{len(each.heads)} together", of(each.effects)) for each in several]
    rows = [row for row in rows if row[1]]
    if not rows:
        return []
    intervals = any(math.isfinite(effect.low) for _, effects in rows for effect in effects.values())
    title = f"{short_label(name)} by position"
    columns = [Column(title, lambda row: printable(row[0]), wraps=True, least=14, style="bold")]
    for place in rows[0][1]:
        effect = partial(lambda place, row: row[1].get(place), place)
        columns += effect_columns(PLACE_LABELS[place], effect, intervals=intervals, drop=0, wraps=True)
    notes = [f"the {_MOST_PLACES} of {len(ranked)} heads without which most changes"] * (len(ranked) > _MOST_PLACES)
    if whole := {place: ablation.whole[f"loss_{place}"] for place in rows[0][1] if f"loss_{place}" in ablation.whole}:
        losses = ", ".join(f"{PLACE_LABELS[place]} {small_number(loss.value)}" for place, loss in whole.items())
        notes.append(f"loss of the whole model, nats: {losses}")
    return [Table(columns, rows, gap=1), *dim_lines(["; ".join(notes)])]


def worst_tokens(ablation: Ablation) -> Table:
    """The tokens that suffer most from lines: several with all heads replaced, and one of each head that matters."""
    together = [token for token in ablation.worst_tokens if not token.heads][:_MOST_TOKENS]
    by_head = {token.heads: token for token in reversed(ablation.worst_tokens) if token.heads}
    ranked = sorted(by_head.values(), key=lambda token: -token.change)[:_MOST_TOKENS]
    predicted = any(math.isfinite(token.loss) for token in ablation.worst_tokens)
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


def _together(several: SetEffects) -> Table:
    """What changes without several heads at once, a quantity a row."""
    heads, effects = [printable(head) for head in several.heads], several.effects
    names = ", ".join(heads[:_MOST]) + (f" and {len(heads) - _MOST} more" if len(heads) > _MOST else "")
    how = "with lines in" if all(name.startswith("line_") for name in effects) else "without"
    intervals = any(math.isfinite(effect.low) for effect in effects.values())
    columns = [
        Column(f"{how} {names}", lambda row: label(row[0]), wraps=True, least=24),
        *effect_columns("together", lambda row: row[1], intervals=intervals, drop=0),
    ]
    # Places have a table of their own.
    return Table(columns, [row for row in effects.items() if not row[0].endswith(tuple(PLACE_LABELS))], gap=1)


def _pairs(pairs: Sequence[SetEffects]) -> Table:
    """The pairs of heads whose joint effect is furthest from the sum of both."""
    names = list(pairs[0].interaction)
    name = next((name for name in names if name.endswith("_loss")), names[0])
    ranked = sorted(pairs, key=lambda pair: -abs(pair.interaction[name].value))[:_MOST_PAIRS]
    title = f"pair, of {len(pairs)}" if len(pairs) > len(ranked) else "pair"
    columns = [
        Column(title, lambda pair: printable(" ".join(pair.heads)), style="bold"),
        Column(short_label(name), lambda pair: small_number(pair.effects[name].value), right=True, drop=2),
        *effect_columns("beyond the sum of both", lambda pair: pair.interaction[name], intervals=True, drop=0),
    ]
    return Table(columns, ranked, gap=1)


def curves_table(curves: Sequence[Curve]) -> Table:
    """What is left of the model with fewer and fewer heads; random orders as the range that they span."""
    name = curves[0].quantity

    def span(order: str, at: int) -> str:
        values = [curve.points[at][name].value for curve in curves if curve_label(curve) == order]
        low, high = small_number(min(values)), small_number(max(values))
        return low if low == high else f"{low} to {high}"

    columns = [Column("heads left", lambda at: str(curves[0].n_left[at]))]
    for number, order in enumerate(dict.fromkeys(map(curve_label, curves))):
        title = f"{'loss' if name == 'loss' else short_label(name)}, {order}"
        columns.append(Column(title, partial(span, order), right=True, wraps=True, least=14, drop=number))
    n = len(curves[0].n_left)
    return Table(columns, sorted({round(row * (n - 1) / (_CURVE_ROWS - 1)) for row in range(_CURVE_ROWS)}), gap=1)


def effect_columns(
    title: str, effect: Callable[[Any], Effect | None], *, intervals: bool, drop: int, wraps: bool = False
) -> list[Column]:
    """A column of values, and, if there are any, one of their intervals."""

    def of(write: Callable[[Effect], str]) -> Callable[[Any], str]:
        return lambda row: "" if (value := effect(row)) is None else write(value)

    values = Column(title, of(lambda effect: small_number(effect.value)), right=True, wraps=wraps, drop=drop)
    ends = Column("95% interval", of(interval), right=True, style="dim", drop=drop or 1)
    return [values, ends] if intervals else [values]


def _sort_key(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
