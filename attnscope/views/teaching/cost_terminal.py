"""Costs in the terminal: each number with its formula, and the formula with its numbers."""

from __future__ import annotations

from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.teaching.cost import Cost, Quantity
from attnscope.views.tables.plain_text import heading, plain_table, safe, spell_out, spell_out_text
from attnscope.views.tables.units import abbreviate

_INDENT = 6
_TITLES = {
    "parameters": "Parameters",
    "per_token": "Multiply-adds for a token of a text of {n:,} tokens",
    "per_text": "Multiply-adds for the whole text",
    "memory": "Memory of the scores",
    "kv_cache": "Keys and values kept while writing {n:,} tokens (KV cache)",
}


def show(cost: Cost, console: Console) -> None:
    """Prints costs with their formulas."""
    console.print(table(cost, console), highlight=False)


def table(cost: Cost, console: Console) -> RenderableType:
    """All quantities by group, then what another number of heads would change, then the notes."""
    parts: list[RenderableType] = [spell_out_text(_heading(cost), console)]
    for name, quantities in cost.groups.items():
        if not quantities:
            continue
        parts.append(heading(_TITLES[name].format(n=cost.n_tokens)))
        parts.append(_group(quantities, console))
    parts += [
        heading(f"The same d_model of {cost.sizes['d_model']:,} in other heads"),
        _heads(cost, console),
    ]
    notes = [
        *cost.notes,
        "multiply-adds are those of matrix products (two floating-point operations each); norms, activations and "
        "adding are left out",
    ]
    parts.append(Text())
    parts += [spell_out_text(Text(f"note: {safe(note)}", style="dim"), console) for note in notes]
    return Group(*parts)


def _heading(cost: Cost) -> Text:
    s = cost.sizes
    layers = amount(s["n_layers"], "layer")
    if s["n_decoder_layers"]:
        layers = f"{s['n_layers']} encoder and {s['n_decoder_layers']} decoder layers"
    shared = "" if s["n_kv_heads"] == s["n_heads"] else f" on {s['n_kv_heads']} key/value heads"
    lines = Text()
    lines.append(f"{safe(cost.name)}", style="bold")
    heads = f"{amount(s['n_heads'], 'head')} of {s['d_head']}{shared}"
    lines.append(f"  {safe(s['kind'])}, {layers}, {heads}, d_model {s['d_model']}\n")
    lines.append(f"sizes: {safe(cost.source)}", style="dim")
    return lines


def _group(quantities: tuple[Quantity, ...], console: Console) -> RenderableType:
    """A line a quantity, with its formula behind it, or below it where the terminal is narrow."""
    wide = console.width >= 140
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(justify="right", no_wrap=True, style="bold")
    lines.add_column(no_wrap=True)
    if wide:
        lines.add_column(style="dim")
    parts: list[RenderableType] = []
    widths = [max(len(q.what) for q in quantities), max(len(_exact(q)) for q in quantities)]
    for q in quantities:
        formula = spell_out(q.formula + (f" = {q.numbers}" if q.numbers else ""), console)
        cells = [spell_out(q.what, console), _exact(q), abbreviate(q.value, q.unit) if _says_more(q) else ""]
        if wide:
            lines.add_row(*cells, formula)
        else:
            parts.append(Text(f"  {cells[0]:<{widths[0]}}  {cells[1]:>{widths[1]}}  {cells[2]}".rstrip()))
            parts += [Text(line, style="dim") for line in _broken(formula, console.width)]
    return Padding(lines, (0, 0, 0, 2), expand=False) if wide else Group(*parts)


def _broken(text: str, width: int) -> list[str]:
    """A formula below its number: on one line, else what it is with numbers on the next."""
    if len(text) + _INDENT <= width or " = " not in text:
        return wrap(text, width, initial_indent=" " * _INDENT, subsequent_indent=" " * (_INDENT + 4))
    formula, _, numbers = text.partition(" = ")
    return [line for part in (formula, f"= {numbers}") for line in _broken(part, width)] if numbers else []


def _exact(q: Quantity) -> str:
    return "" if q.unit in ("share", "times") else f"{q.value:,}"


def _says_more(q: Quantity) -> bool:
    return q.unit in ("share", "times") or q.value >= 10_000


def _heads(cost: Cost, console: Console) -> Table:
    table = plain_table()
    columns = ("", "heads", "d_head", "scale", "weights a layer", "with 1 kv head", f"scores, {cost.dtype}")
    for name in columns:
        table.add_column(spell_out(name, console), justify="right", overflow="fold")
    for row in cost.heads:
        table.add_row(
            ">" if row.chosen else "", str(row.n_heads), str(row.d_head), f"{row.scale:.4f}", f"{row.weights_mha:,}",
            f"{row.weights_mqa:,}", abbreviate(row.scores_bytes, "bytes").split(" (")[0],
            style="bold" if row.chosen else "",
        )  # fmt: skip
    return table
