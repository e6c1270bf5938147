"""A split in the terminal: what each head attends to, for each number of heads, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.teaching.split import Seen, Split
from attnscope.report.matrix import matrix
from attnscope.report.numbers import fixed, percent
from attnscope.report.plain_text import dim_lines, heading, safe, spell_out, spell_out_parts
from attnscope.report.table import TextColumn, TextTable

_MOST_TOKENS_IN_FULL = 12
_MOST_HEADS_IN_FULL = 8
_MOST_HEADS_NAMED = 12
_MOST_AT_ODDS = 4


def show(split: Split, console: Console) -> RenderableType:
    """Each number of heads with its weights, output and mixing, then a table that compares them.

    Weights are written out for short texts; of longer ones, what each head attends to most.
    """
    parts: list[RenderableType] = [_heading(split)]
    for seen in split.seen:
        parts += _section(split, seen, console)
    parts += [heading("What the number of heads changes"), _table(split, console), *dim_lines(_explanations(split))]
    return spell_out_parts(parts, console)


def _heading(split: Split) -> Text:
    model = safe(str(split.run.get("model", "")))
    w_o = f", W_O: {safe(split.project)}" if split.project else ""
    twins = "; head 1 has the columns of head 0" if split.same_columns else ""
    return Text(f"{model}: {amount(len(split.queries), 'token')}, d_model {split.d_model}{w_o}{twins}", style="bold")


def _section(split: Split, seen: Seen, console: Console) -> Iterator[RenderableType]:
    heads = amount(seen.n_heads, "head")
    scale = f"  scale 1/√{seen.d_head} = {seen.scale:.4f}"
    yield Text.assemble((f"\n{heads} of {seen.d_head}", "bold underline"), (scale, "dim"))
    if len(split.keys) <= _MOST_TOKENS_IN_FULL and seen.n_heads <= _MOST_HEADS_IN_FULL:
        for head in range(seen.n_heads):
            yield _title(f"head {head}: weights", _span(seen, head))
            yield matrix(seen.weights[head], split.queries, split.keys, console, bold=True)
        if seen.n_heads > 1:
            yield _title("mean of the heads", "no head attends like this")
            yield matrix(seen.mean_weights, split.queries, split.keys, console)
        yield _title("output", "after W_O" if split.w_o is not None else "the heads side by side")
        yield matrix(seen.output, split.queries, None, console)
        if seen.mixing is not None:
            yield _title("from which head each output column comes", "share of W_O's squares")
            yield matrix(seen.mixing, [f"head {head}" for head in range(seen.n_heads)], None, console)
    else:
        yield from _strongest(split, seen)
    if seen.n_heads > 1:
        yield _compromise(split, seen)


def _title(title: str, more: str) -> Text:
    return Text.assemble((f"  {title}", "bold"), (f"  {more}", "dim"))


def _strongest(split: Split, seen: Seen) -> Iterator[Text]:
    """A line a head: its largest weights."""
    for head in range(min(seen.n_heads, _MOST_HEADS_NAMED)):
        order = np.argsort(-seen.weights[head], axis=None, kind="stable")[:3]
        links = [divmod(int(at), len(split.keys)) for at in order]
        pairs = ", ".join(
            f"{safe(split.queries[q])} → {safe(split.keys[k])} {seen.weights[head, q, k]:.4f}" for q, k in links
        )
        yield Text.assemble((f"  head {head}: ", "bold"), pairs)
    if seen.n_heads > _MOST_HEADS_NAMED:
        yield Text(f"  and {amount(seen.n_heads - _MOST_HEADS_NAMED, 'more head')} (--json has all)", style="dim")


def _compromise(split: Split, seen: Seen) -> Text:
    """The query about which the heads disagree most, and what one head makes of it."""
    query = int(seen.disagreement_nats.argmax())
    if not seen.disagreement_nats[query] > 1e-12:
        return Text("  the heads agree about every query", style="dim")
    wanted = [_favourites(seen, head, query) for head in range(seen.n_heads)]
    wishes = "; ".join(
        f"head {head} wants {_names(split, keys)} ({seen.weights[head, query, keys[0]]:.4f})"
        if len(keys) < len(split.keys)
        else f"head {head} wants nothing"
        for head, keys in list(enumerate(wanted))[:_MOST_AT_ODDS]
    )
    wishes = (
        f"  most at odds about {safe(split.queries[query])}: {wishes}{'; …' if seen.n_heads > _MOST_AT_ODDS else ''}"
    )
    one = next((other for other in split.seen if other.n_heads == 1), None)
    if one is not None:
        both = dict.fromkeys(key for keys in wanted[:_MOST_AT_ODDS] if len(keys) < len(split.keys) for key in keys)
        shares = ", ".join(f"{safe(split.keys[key])} {one.weights[0, query, key]:.4f}" for key in both)
        wishes += f". A single head compromises: {shares}"
    return Text(wishes)


def _favourites(seen: Seen, head: int, query: int) -> list[int]:
    """The keys with the largest weight; several where they are equal."""
    row = seen.weights[head, query]
    return [int(key) for key in np.flatnonzero(row >= row.max() * (1 - 1e-9))]


def _names(split: Split, keys: Sequence[int]) -> str:
    return " and ".join(safe(split.keys[key]) for key in keys)


def _table(split: Split, console: Console) -> TextTable:
    columns = [
        TextColumn("heads", lambda seen: str(seen.n_heads), right=True),
        TextColumn("d_head", lambda seen: str(seen.d_head), right=True, drop=1),
        TextColumn("rank", lambda seen: spell_out(range_of_ranks(seen), console), right=True),
        TextColumn("entropy", lambda seen: fixed(seen.entropy_nats.mean(), 4), right=True),
        TextColumn("uniform rows", lambda seen: f"{int(seen.uniform.sum())} of {seen.n_heads * len(split.queries)}",
               right=True, wraps=True, least=8, drop=2),
        TextColumn("disagreement", lambda seen: fixed(seen.disagreement_nats.mean(), 4), right=True),
    ]  # fmt: skip
    if any(seen.drops for seen in split.seen):
        columns.append(TextColumn("without", _without, wraps=True, least=12))
    return TextTable(columns, split.seen)


def _without(seen: Seen) -> str:
    return ", ".join(f"H{drop.head}: L2 change {drop.l2:.4f} ({percent(drop.share)})" for drop in seen.drops) or "-"


def range_of_ranks(seen: Seen) -> str:
    """Such as 2–4, or 3 if the dot products of all heads have that rank."""
    return "–".join(dict.fromkeys(str(end) for end in (seen.rank.min(), seen.rank.max())))


def _explanations(split: Split) -> list[str]:
    lines = [
        "rank: of a head's dot products, at most d_head. entropy: mean over all rows, nats "
        f"(0 to ln {len(split.keys)} = {np.log(len(split.keys)):.4f}).",
        "uniform rows: all scores equal, so that nothing is chosen. disagreement: Jensen-Shannon divergence of the "
        "heads, nats, 0 = alike.",
    ]
    if any(seen.drops for seen in split.seen):
        lines.append("L2 change: norm of the change of the whole output when the head puts out zeros (share of it).")
    return lines


def _span(seen: Seen, head: int) -> str:
    first, last = int(seen.columns[head, 0]), int(seen.columns[head, 1]) - 1
    return f"column {first}" if first == last else f"columns {first} to {last}"
