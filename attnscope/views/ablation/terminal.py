"""An ablation drawn in the terminal, with rich: a grid of effects, the heads that matter, several together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.records.ablation import Ablation, Effect, Effects, HeadEffects, SetEffects
from attnscope.report.matrix import head_grid, room_for
from attnscope.report.numbers import small_number
from attnscope.report.plain_text import dim_lines, heading, shade
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import corpus_line, printable
from attnscope.views.ablation.summary import (
    PLACE_LABELS,
    interval,
    label,
    notes,
    predicted_line,
    short_label,
)

_MOST = 15
_FEW = 3
_MOST_PLACES = 8
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
    if by_position := _by_position(ablation):
        parts += [Text(), *by_position]
    if ablation.together is not None:
        parts += [Text(), _together(ablation.together)]
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


def _ranking(ablation: Ablation, main: str) -> TextTable:
    """The heads without which most changes."""
    ranked = sorted(ablation.heads, key=lambda head: -_sort_key(head.effects[main].value))
    intervals = any(math.isfinite(head.effects[main].low) for head in ranked)
    title = f"head, of {len(ranked)}" if len(ranked) > _MOST else "head"
    columns = [TextColumn(title, lambda head: printable(ablation.named(head)), style="bold")]
    names = [main, *(name for name in ablation.names if name != main)]
    for at, name in enumerate(names):
        effect = partial(lambda name, head: head.effects.get(name), name)
        columns += effect_columns(short_label(name), effect, intervals=intervals, drop=at and at + 1)
    return TextTable(columns, ranked[:_MOST], gap=1)


def _by_position(ablation: Ablation) -> list[RenderableType]:
    """By how much the loss rises at which places of a text: the whole model first, then heads, and all together."""
    name = next((name for name in ("zero_loss", "mean_loss") if name in ablation.names), "")

    def of(effects: Effects) -> Effects:
        return ablation.by_position(effects, name)

    ranked = sorted(ablation.heads, key=lambda head: -_sort_key(_largest_size(of(head.effects))))
    rows = [(ablation.named(head), of(head.effects)) for head in ranked[:_MOST_PLACES]]
    if ablation.together is not None:
        rows.append((f"{len(ablation.together.heads)} together", of(ablation.together.effects)))
    rows = [row for row in rows if row[1]]
    if not rows:
        return []
    intervals = any(math.isfinite(effect.low) for _, effects in rows for effect in effects.values())
    title = f"{short_label(name)} by position"
    columns = [TextColumn(title, lambda row: printable(row[0]), wraps=True, least=14, style="bold")]
    for place in rows[0][1]:
        effect = partial(lambda place, row: row[1].get(place), place)
        columns += effect_columns(PLACE_LABELS[place], effect, intervals=intervals, drop=0, wraps=True)
    notes = [f"the {_MOST_PLACES} of {len(ranked)} heads without which most changes"] * (len(ranked) > _MOST_PLACES)
    if whole := {place: ablation.whole[f"loss_{place}"] for place in rows[0][1] if f"loss_{place}" in ablation.whole}:
        losses = ", ".join(f"{PLACE_LABELS[place]} {small_number(loss.value)}" for place, loss in whole.items())
        notes.append(f"loss of the whole model, nats: {losses}")
    return [TextTable(columns, rows, gap=1), *dim_lines(["; ".join(notes)])]


def _largest_size(effects: Effects) -> float:
    return max((abs(effect.value) for effect in effects.values() if math.isfinite(effect.value)), default=-math.inf)


def _together(several: SetEffects) -> TextTable:
    """What changes without several heads at once, a quantity a row."""
    heads, effects = [printable(head) for head in several.heads], several.effects
    names = ", ".join(heads[:_MOST]) + (f" and {len(heads) - _MOST} more" if len(heads) > _MOST else "")
    intervals = any(math.isfinite(effect.low) for effect in effects.values())
    columns = [
        TextColumn(f"without {names}", lambda row: label(row[0]), wraps=True, least=24),
        *effect_columns("together", lambda row: row[1], intervals=intervals, drop=0),
    ]
    # Places have a table of their own.
    return TextTable(columns, [row for row in effects.items() if not row[0].endswith(tuple(PLACE_LABELS))], gap=1)


def effect_columns(
    title: str, effect: Callable[[Any], Effect | None], *, intervals: bool, drop: int, wraps: bool = False
) -> list[TextColumn]:
    """A column of values, and, if there are any, one of their intervals."""

    def of(write: Callable[[Effect], str]) -> Callable[[Any], str]:
        return lambda row: "" if (value := effect(row)) is None else write(value)

    values = TextColumn(title, of(lambda effect: small_number(effect.value)), right=True, wraps=wraps, drop=drop)
    ends = TextColumn("95% interval", of(interval), right=True, style="dim", drop=drop or 1)
    return [values, ends] if intervals else [values]


def _sort_key(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
