"""Costs in the terminal: each number with its formula, and the formula with its numbers."""

from __future__ import annotations

from dataclasses import replace
from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.teaching.cost import Cost, Quantity
from attnscope.report.numbers import abbreviate, fixed
from attnscope.report.plain_text import dim_lines, heading, safe, spell_out, spell_out_parts
from attnscope.report.table import TextColumn, TextTable

_INDENT = 6
_TITLES = {
    "parameters": "Parameters",
    "per_token": "Multiply-adds per token of a text of {n:,} tokens",
    "per_text": "Multiply-adds for the whole text",
    "memory": "Memory of the scores",
    "kv_cache": "Keys and values kept while writing {n:,} tokens (KV cache)",
}


def show(cost: Cost, console: Console) -> RenderableType:
    """All quantities by group, then what another number of heads would change, then the notes."""
    parts: list[RenderableType] = [_heading(cost)]
    for name, quantities in cost.groups.items():
        if quantities:
            parts += [heading(_TITLES[name].format(n=cost.n_tokens)), _group(quantities, console)]
    parts += [heading(f"The same d_model of {cost.sizes['d_model']:,} in other heads"), _heads(cost, console), Text()]
    notes = [
        *cost.notes,
        "multiply-adds are those of matrix products (two floating-point operations each); norms, activations and "
        "adding are left out",
    ]
    return spell_out_parts([*parts, *dim_lines(f"note: {safe(note)}" for note in notes)], console)


def _heading(cost: Cost) -> Text:
    s = cost.sizes
    layers = amount(s["n_layers"], "layer")
    if s["n_decoder_layers"]:
        layers = f"{s['n_layers']} encoder and {s['n_decoder_layers']} decoder layers"
    shared = "" if s["n_kv_heads"] == s["n_heads"] else f" on {s['n_kv_heads']} key/value heads"
    heads = f"{amount(s['n_heads'], 'head')} of {s['d_head']}{shared}"
    sizes = f"  {safe(s['kind'])}, {layers}, {heads}, d_model {s['d_model']}\n"
    return Text.assemble((safe(cost.name), "bold"), sizes, (f"sizes: {safe(cost.source)}", "dim"))


def _group(quantities: tuple[Quantity, ...], console: Console) -> RenderableType:
    """A line a quantity, with its formula behind it, or below it where the terminal is narrow."""
    wide, parts = console.width >= 140, list[RenderableType]()
    widths = [max(len(q.what) for q in quantities), max(len(_exact(q)) for q in quantities)]

    def formula(q: Quantity) -> str:
        return spell_out(q.formula + (f" = {q.numbers}" if q.numbers else ""), console)

    columns = [
        TextColumn("", lambda q: f"  {spell_out(q.what, console)}", wraps=True, least=min(widths[0] + 2, 24)),
        TextColumn("", _exact, right=True, least=widths[1], style="bold" if wide else ""),
        TextColumn("", lambda q: abbreviate(q.value, q.unit) if _says_more(q) else "", wraps=True),
        TextColumn("", formula, wraps=True, style="dim"),
    ]
    if wide:
        return TextTable(columns, quantities, header=False)
    columns[0] = replace(columns[0], least=min(widths[0] + 2, max(12, console.width - widths[1] - 24)), wraps=False)
    for q in quantities:
        parts += [TextTable(columns[:3], [q], header=False), *dim_lines(_broken(formula(q), console.width))]
    return Group(*parts)


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


def _heads(cost: Cost, console: Console) -> TextTable:
    scores = spell_out(f"scores, {cost.dtype}", console)
    columns = [
        TextColumn("", lambda row: ">" if row.chosen else ""),
        TextColumn("heads", lambda row: str(row.n_heads), right=True),
        TextColumn("d_head", lambda row: str(row.d_head), right=True),
        TextColumn("scale", lambda row: fixed(row.scale, 4), right=True, drop=3),
        TextColumn("weights per layer", lambda row: f"{row.weights_mha:,}", right=True, wraps=True, drop=2),
        TextColumn("with 1 kv head", lambda row: f"{row.weights_mqa:,}", right=True, wraps=True, drop=1),
        TextColumn(scores, lambda row: abbreviate(row.scores_bytes, "bytes").split(" (")[0], right=True, wraps=True,
               least=8),
    ]  # fmt: skip
    return TextTable(columns, cost.heads, style=lambda row: "bold" if row.chosen else "")
