"""An ablation drawn in the terminal, with rich: a grid of effects, the heads that matter, sets, pairs, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnscope.records.ablation import Ablation, Curve, Effect, Effects, HeadEffects, SetEffects
from attnscope.views.ablation.summary import (
    PLACE_LABELS,
    interval,
    label,
    notes,
    number,
    order_label,
    predicted_line,
    short_label,
)
from attnscope.views.heads.summary import corpus_line, printable
from attnscope.views.tables.head_grid import head_grid, room_for
from attnscope.views.tables.plain_text import dim_lines, heading, plain_table, shade

_MOST = 15
_FEW = 3
_MOST_PAIRS = 10
_MOST_PLACES = 8
_CURVE_ROWS = 9
_CELL = 8


def show(found: Ablation, console: Console) -> None:
    """Prints all that a record says."""
    console.print(drawing(found, console))


def drawing(found: Ablation, console: Console) -> RenderableType:
    """All that a record says, from the grid of the main quantity to the notes."""
    parts: list[RenderableType] = []
    main = found.main
    if main:
        parts.append(Text(f"{label(main)}{_unit(found, main)}", style="bold"))
        for kind in found.kinds:
            if len(found.kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            if len(found.heads) > _FEW:
                parts.append(_grid([head for head in found.heads if head.kind == kind], main, console.width))
        parts += [*([Text()] if len(found.heads) > _FEW else []), _ranking(found, main, console.width)]
    several = [one for one in found.sets if not one.interaction]
    if table := _by_position(found, several, console.width):
        parts += [Text(), table]
    pairs = [one for one in found.sets if one.interaction]
    if several:
        parts += [renderable for one in several for renderable in (Text(), _together(one))]
    if pairs:
        name = next((name for name in pairs[0].interaction if name.endswith("_loss")), next(iter(pairs[0].interaction)))
        pairs = sorted(pairs, key=lambda one: -abs(one.interaction[name].value))
        rows = [(" ".join(one.heads), {name: one.effects[name]}, one.interaction[name]) for one in pairs[:_MOST_PAIRS]]
        parts += [Text(), _pairs(name, rows, len(pairs))]
    if found.curves:
        parts += [Text(), _curves(found.curves)]
    said = [corpus_line(found, predictions=True), predicted_line(found), *notes(found)]
    return Group(*parts, Text(), *dim_lines(said))


def _grid(heads: Sequence[HeadEffects], name: str, width: int) -> Text:
    """Values, shaded; where a layer has more heads than the terminal has room for, tenths of the largest one."""
    by_head = {(head.layer, head.head): head.effects[name].value for head in heads if name in head.effects}
    layers, numbers = sorted({head.layer for head in heads}), sorted({head.head for head in heads})
    largest = max((abs(value) for value in by_head.values() if math.isfinite(value)), default=0.0) or 1.0
    fits = len(numbers) * _CELL <= room_for(layers, width)
    cell = _CELL if fits else 2

    def draw(text: Text, layer: int, head: int) -> None:
        value = by_head.get((layer, head), math.nan)
        share = abs(value) / largest if math.isfinite(value) else 0.0
        shown = number(value) if fits else f"{min(9, int(share * 10))}" if math.isfinite(value) else " "
        text.append(f"{shown:>{cell - 1}}", style=_style(share, value) if math.isfinite(value) else "dim")
        text.append(" ")

    text = head_grid(layers, numbers, cell, width, draw)
    return text if fits else text.append(f"\ntenths of the largest, {number(largest)}", style="dim")


def _style(share: float, value: float) -> Style:
    """From white to blue, red where the value is negative."""
    return shade(share**0.7, "#ffffff", "#b2182b" if value < 0 else "#08519c")


def _ranking(found: Ablation, main: str, width: int) -> Table:
    """The heads without which most changes."""
    ranked = sorted(found.heads, key=lambda head: -_sort_key(head.effects[main].value))
    names = [main, *(name for name in found.names if name != main)]
    table = _table(f"head, of {len(ranked)}" if len(ranked) > _MOST else "head")
    intervals = any(math.isfinite(head.effects[main].low) for head in ranked)
    shown = names[: max(1, (width - 14) // (28 if intervals else 13))]
    for name in shown:
        _add_columns(table, short_label(name), intervals)
    for head in ranked[:_MOST]:
        cells = []
        for name in shown:
            effect = head.effects.get(name)
            cells += [number(effect.value), interval(effect)][: 1 + intervals] if effect else [""] * (1 + intervals)
        table.add_row(Text(printable(found.named(head)), style="bold"), *cells)
    if len(shown) < len(names):
        table.caption = f"not shown in {width} columns: {', '.join(short_label(n) for n in names[len(shown) :])}"
        table.caption_justify = "left"
    return table


def _by_position(found: Ablation, several: Sequence[SetEffects], width: int) -> Table | None:
    """By how much the loss rises at which places of a text: the whole model first, then heads, and all together."""
    name = next((one for one in ("zero_loss", "mean_loss") if one in found.names), "")
    ranked = sorted(found.heads, key=lambda head: -_sort_key(_largest_size(found.by_position(head.effects, name))))
    rows = [(found.named(head), found.by_position(head.effects, name)) for head in ranked[:_MOST_PLACES]]
    rows += [(f"{len(one.heads)} together", found.by_position(one.effects, name)) for one in several]
    rows = [(named, effects) for named, effects in rows if effects]
    if not rows:
        return None
    shown = list(rows[0][1])
    intervals = width >= 34 + 34 * len(shown) and any(math.isfinite(e.low) for _, one in rows for e in one.values())
    table = _table(f"{short_label(name)} by position")
    table.columns[0].no_wrap = False
    for place in shown:
        _add_columns(table, PLACE_LABELS[place], intervals, wraps=True)
    for named, effects in rows:
        cells = [cell for e in effects.values() for cell in [number(e.value), interval(e)][: 1 + intervals]]
        table.add_row(Text(printable(named), style="bold"), *cells)
    said = [f"the {_MOST_PLACES} of {len(ranked)} heads without which most changes"] * (len(ranked) > _MOST_PLACES)
    if whole := {place: found.whole[f"loss_{place}"] for place in shown if f"loss_{place}" in found.whole}:
        losses = ", ".join(f"{PLACE_LABELS[place]} {number(e.value)}" for place, e in whole.items())
        said.append(f"loss of the whole model, nats: {losses}")
    table.caption, table.caption_justify = "; ".join(said), "left"
    return table


def _largest_size(effects: Effects) -> float:
    return max((abs(effect.value) for effect in effects.values() if math.isfinite(effect.value)), default=-math.inf)


def _together(one: SetEffects) -> Table:
    """What changes without several heads at once, a quantity a row."""
    heads = [printable(head) for head in one.heads]
    named = ", ".join(heads[:_MOST]) + (f" and {len(heads) - _MOST} more" if len(heads) > _MOST else "")
    table = _table(f"without {named}")
    _add_columns(table, "together", intervals=any(math.isfinite(effect.low) for effect in one.effects.values()))
    for name, effect in one.effects.items():
        if name.endswith(tuple(PLACE_LABELS)):  # they have a table of their own
            continue
        table.add_row(Text(label(name)), *[number(effect.value), interval(effect)][: len(table.columns) - 1])
    return table


def _pairs(name: str, rows: Sequence[tuple[str, Effects, Effect]], n_pairs: int) -> Table:
    table = _table(f"pair, of {n_pairs}" if n_pairs > len(rows) else "pair")
    table.add_column(short_label(name), justify="right", no_wrap=True)
    table.add_column("beyond the sum of both", justify="right", no_wrap=True)
    table.add_column("95% interval", justify="right", no_wrap=True, style="dim")
    for heads, effects, interaction in rows:
        cells = [number(effects[name].value), number(interaction.value), interval(interaction)]
        table.add_row(Text(printable(heads), style="bold"), *cells)
    return table


def _curves(curves: Sequence[Curve]) -> Table:
    """What is left of the model with fewer and fewer heads; random orders as the range that they span."""
    name = "loss" if "loss" in curves[0].points[0] else "l2"
    table = _table("heads left")
    orders = list(dict.fromkeys(curve.order for curve in curves))
    for order in orders:
        table.add_column(f"{'loss' if name == 'loss' else 'Δ hidden'}, {order_label(order)}", justify="right")
    n = len(curves[0].n_left)
    for place in sorted({round(row * (n - 1) / (_CURVE_ROWS - 1)) for row in range(_CURVE_ROWS)}):
        cells = []
        for order in orders:
            values = [curve.points[place][name].value for curve in curves if curve.order == order]
            low, high = number(min(values)), number(max(values))
            cells.append(low if low == high else f"{low} to {high}")
        table.add_row(str(curves[0].n_left[place]), *cells)
    return table


def _table(first: str) -> Table:
    table = plain_table(space=1)
    table.add_column(first, no_wrap=True)
    return table


def _add_columns(table: Table, title: str, intervals: bool, wraps: bool = False) -> None:
    """A column of values, whose title may wrap, and one of their intervals where there are any."""
    table.add_column(title, justify="right", no_wrap=not wraps)
    if intervals:
        table.add_column("95% interval", justify="right", no_wrap=True, style="dim")


def _unit(found: Ablation, name: str) -> str:
    unit = printable(found.facts(name).unit, 40)
    return f", {unit}" if unit else ""


def _sort_key(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
