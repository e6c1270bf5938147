"""What the weights say, in the terminal, with rich: who feeds whom, what is copied, what heads read and write."""

from __future__ import annotations

import math
from itertools import zip_longest
from operator import itemgetter

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.records.weights import COMPOSITIONS, Direction, HeadWeights, Link
from attnscope.report.numbers import fixed, percent
from attnscope.report.plain_text import dim_lines, heading, list_numbers, spell_out_parts
from attnscope.report.table import TextColumn, TextTable
from attnscope.views.weights.summary import (
    READS,
    likeness_of,
    notes_of,
    score,
    spell,
    title_of,
    tokens,
)

_MOST = 8


def show(weights: HeadWeights, console: Console) -> RenderableType:
    """What the weights say: of all heads the strongest, of picked heads everything."""
    likeness, notes = likeness_of(weights), notes_of(weights)
    parts: list[RenderableType] = [Text(title_of(weights), style="bold"), *dim_lines([likeness] * bool(likeness))]
    if weights.picked:
        for place in weights.picked:
            parts += _head(weights, place)
    else:
        parts += [*_compositions(weights), *([] if likeness else _copying(weights)), *_places(weights)]
        notes = notes[1:] if likeness else notes  # nothing is said of copying
    return spell_out_parts([*parts, Text(), *dim_lines(note for note in notes if note != likeness)], console)


def _compositions(weights: HeadWeights) -> list[RenderableType]:
    def write(link: Link) -> Text:
        names = f"{weights.heads[link.sender].name} → {weights.heads[link.receiver].name} "
        return Text.assemble(names, (fixed(link.share, 2), "cyan"), (f" ({fixed(link.expected, 3)})", "dim"))

    links = [[write(link) for link in weights.strongest(by, _MOST) if link.share > 0] for by in COMPOSITIONS]
    columns = [TextColumn(f"by {READS[by]}", itemgetter(at), drop=at) for at, by in enumerate(COMPOSITIONS)]
    title = "which heads feed which, most above chance (in brackets: chance)"
    return [heading(title), TextTable(columns, zip_longest(*links, fillvalue=""))]


def _copying(weights: HeadWeights) -> list[RenderableType]:
    scored = [head for head in weights.heads if math.isfinite(head.copying.value)]
    if not scored:
        return []
    columns = [
        TextColumn("head", lambda head: head.name, style="bold"),
        TextColumn("copying", lambda head: score(head.copying), style="cyan"),
        TextColumn("reads", lambda head: tokens(head.writes[0].source[0]) if head.writes else "", wraps=True, least=12),
        TextColumn(
            "writes", lambda head: tokens(head.writes[0].target[0]) if head.writes else "", wraps=True, least=12
        ),
    ]
    parts: list[RenderableType] = []
    for title, sign in (("copy what they attend to", -1), ("take away what they attend to", 1)):
        ranked = sorted(scored, key=lambda head, sign=sign: sign * head.copying.value)[:_MOST]  # type: ignore[misc]
        if rows := [head for head in ranked if (head.copying.value < 0) is (sign > 0)]:
            parts += [heading(f"heads that {title} most"), TextTable(columns, rows)]
    n, n_outside = len(weights.heads), sum(head.copying.is_outside for head in weights.heads)
    by_chance = 2 / (weights.n_draws + 1) * n
    note = f"{n_outside} of {n} heads are beyond all random ones; by chance about {by_chance:.0f} would be"
    return [*parts, *dim_lines([note])]


def _places(weights: HeadWeights) -> list[RenderableType]:
    """The heads that would look at the previous token by position alone, most first; of those above uniform."""
    layers = sorted({head.layer for head in weights.heads})
    uniform = dict(zip(layers, weights.uniform.get("previous", ()), strict=False))
    above = [head for head in weights.heads if head.previous > uniform.get(head.layer, math.inf)]
    heads = sorted(above, key=lambda head: -head.previous)[:_MOST]
    if not heads:
        return []
    columns = [
        TextColumn("head", lambda head: head.name, style="bold"),
        TextColumn("previous", lambda head: fixed(head.previous, 2), style="cyan"),
        TextColumn("same", lambda head: fixed(head.same, 2), style="cyan", drop=2),
        TextColumn("first", lambda head: fixed(head.first, 2), style="cyan", drop=1),
    ]
    title = f"heads that would look at the previous token by position alone (positions are {weights.places})"
    return [heading(title), TextTable(columns, heads)]


def _head(weights: HeadWeights, place: int) -> list[RenderableType]:
    """All that is known of one head."""
    head = weights.heads[place]
    said: list[RenderableType] = [heading(head.name)]
    for name, one in (("copying", head.copying), ("matching", head.matching)):
        chance = f"random {fixed(one.mean, 2)} [{fixed(one.low, 2)}, {fixed(one.high, 2)}]"
        said.append(Text.assemble(f"{name} ", (score(one), "cyan"), (f"  {chance}", "dim")))
    shares = {"previous": head.previous, "same": head.same, "next": head.next, "first": head.first}
    line = Text("by position alone: ").append(list_numbers(((n, fixed(s, 2)) for n, s in shares.items()), "  "))
    line.append("  · the same token scores ").append(f"{fixed(abs(head.same_nats), 2)} nats", "cyan")
    said.append(line.append(" above others" if head.same_nats >= 0 else " below others"))
    for ends, directions in ((("reads", "writes"), head.writes), (("queries", "keys"), head.seeks)):
        if directions:
            said += [heading(f"singular directions, {' → '.join(ends)}"), _directions(ends, directions)]
    if head.answers:
        columns = [
            TextColumn("attended to", lambda answer: spell(answer.token), wraps=True, least=11, style="bold"),
            TextColumn("rise most", lambda answer: tokens(answer.written), wraps=True, least=12),
        ]
        said += [heading("what it writes for common tokens"), TextTable(columns, head.answers)]
    said += _links_of(weights, place)
    return said


def _directions(ends: tuple[str, str], directions: tuple[Direction, ...]) -> TextTable:
    rows = [(one, end) for one in directions for end in range(len(one.source))]
    columns = [
        TextColumn("share", lambda row: "" if row[1] else percent(row[0].share, 1), style="cyan"),
        TextColumn(ends[0], lambda row: tokens(row[0].source[row[1]]), wraps=True, least=12),
        TextColumn(ends[1], lambda row: tokens(row[0].target[row[1]]), wraps=True, least=12),
    ]
    return TextTable(columns, rows)


def _links_of(weights: HeadWeights, place: int) -> list[RenderableType]:
    """By what and how much a head is fed, and whom it feeds."""
    rows = []
    for title, at in (("reads from", np.s_[:, :, place]), ("is read by", np.s_[:, place])):
        excess, composition = weights.excess[at], weights.composition[at]  # (composition, other head)
        if not np.isfinite(excess).any():
            continue
        cells = []
        for by in range(len(COMPOSITIONS)):
            order = np.argsort(-np.nan_to_num(excess[by], nan=-np.inf), kind="stable")[:3]
            others = [other for other in order.tolist() if np.isfinite(excess[by, other])]
            cells.append("  ".join(f"{weights.heads[n].name} {fixed(composition[by, n], 2)}" for n in others))
        rows.append((title, *cells))
    columns = [TextColumn("", itemgetter(0), style="bold")]
    columns += [
        TextColumn(f"by {READS[by]}", itemgetter(at), wraps=True, least=12) for at, by in enumerate(COMPOSITIONS, 1)
    ]
    return [heading("composition, most above chance"), TextTable(columns, rows)] if rows else []
