"""Circuits in the terminal, with rich: who feeds whom, what is copied, what heads read and write."""

from __future__ import annotations

from itertools import zip_longest
from operator import itemgetter

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.records.circuits import COMPOSITIONS, CircuitHead, Circuits, Direction, Link
from attnscope.views.circuits.summary import (
    READS,
    likeness_of,
    link_line,
    most_copying,
    most_previous,
    notes_of,
    score,
    spell,
    title_of,
    tokens,
)
from attnscope.views.tables.numbers import fixed, percent
from attnscope.views.tables.plain_text import dim_lines, heading, spell_out_parts
from attnscope.views.tables.table import Column, Table

_MOST = 8


def show(found: Circuits, console: Console) -> RenderableType:
    """What the weights say: of all heads the strongest, of picked heads everything."""
    likeness, notes = likeness_of(found), notes_of(found)
    parts: list[RenderableType] = [Text(title_of(found), style="bold"), *dim_lines([likeness] * bool(likeness))]
    if found.picked:
        for place in found.picked:
            parts += _head(found, place)
    else:
        parts += [*_compositions(found), *([] if likeness else _copying(found)), *_places(found)]
        notes = notes[1:] if likeness else notes  # nothing is said of copying
    return spell_out_parts([*parts, Text(), *dim_lines(note for note in notes if note != likeness)], console)


def _compositions(found: Circuits) -> list[RenderableType]:
    links = [[_link(found, link) for link in found.strongest(by, _MOST) if link.share > 0] for by in COMPOSITIONS]
    columns = [Column(f"by {READS[by]}", itemgetter(at), drop=at) for at, by in enumerate(COMPOSITIONS)]
    title = "which heads feed which, most above chance (in brackets: chance)"
    return [heading(title), Table(columns, zip_longest(*links, fillvalue=""))]


def _link(found: Circuits, link: Link) -> Text:
    return Text.assemble(
        f"{link_line(found, link)} ", (fixed(link.share, 2), "cyan"), (f" ({fixed(link.expected, 3)})", "dim")
    )


def _copying(found: Circuits) -> list[RenderableType]:
    heads = most_copying(found, _MOST)
    if not heads:
        return []
    outside = sum(head.copying.is_outside for head in found.heads)
    said: list[RenderableType] = []
    for title, least in (("copy what they attend to", False), ("take away what they attend to", True)):
        shown = [h for h in most_copying(found, _MOST, least=least) if (h.copying.value < 0) is least]
        if shown:
            said += [heading(f"heads that {title} most"), _heads_table(shown)]
    share = 2 / (found.n_draws + 1)
    said.append(
        Text(
            f"{outside} of {len(found.heads)} heads are beyond all random ones; by chance about "
            f"{share * len(found.heads):.0f} would be",
            style="dim",
        )
    )
    return said


def _heads_table(heads: list[CircuitHead]) -> Table:
    columns = [
        Column("head", lambda head: head.name, style="bold"),
        Column("copying", lambda head: score(head.copying), style="cyan"),
        Column("reads", lambda head: tokens(head.writes[0].source[0]) if head.writes else "", wraps=True, least=12),
        Column("writes", lambda head: tokens(head.writes[0].target[0]) if head.writes else "", wraps=True, least=12),
    ]
    return Table(columns, heads)


def _places(found: Circuits) -> list[RenderableType]:
    heads = most_previous(found, _MOST)
    if not heads:
        return []
    columns = [
        Column("head", lambda head: head.name, style="bold"),
        Column("previous", lambda head: fixed(head.previous, 2), style="cyan"),
        Column("same", lambda head: fixed(head.same, 2), style="cyan", drop=2),
        Column("first", lambda head: fixed(head.first, 2), style="cyan", drop=1),
    ]
    title = f"heads that would look at the previous token by position alone (positions are {found.places})"
    return [heading(title), Table(columns, heads)]


def _head(found: Circuits, place: int) -> list[RenderableType]:
    """All that is known of one head."""
    head = found.heads[place]
    said: list[RenderableType] = [heading(head.name)]
    for name, one in (("copying", head.copying), ("matching", head.matching)):
        chance = f"random {fixed(one.mean, 2)} [{fixed(one.low, 2)}, {fixed(one.high, 2)}]"
        said.append(Text.assemble(f"{name} ", (score(one), "cyan"), (f"  {chance}", "dim")))
    said.append(
        Text.assemble(
            "by position alone: previous ", (fixed(head.previous, 2), "cyan"), "  same ", (fixed(head.same, 2), "cyan"),
            "  next ", (fixed(head.next, 2), "cyan"), "  first ", (fixed(head.first, 2), "cyan"),
            "  · the same token scores ", (f"{fixed(abs(head.same_nats), 2)} nats", "cyan"),
            " above others" if head.same_nats >= 0 else " below others",
        )
    )  # fmt: skip
    for title, ends, directions in (
        ("reads → writes", ("reads", "writes"), head.writes),
        ("queries → keys", ("queries", "keys"), head.seeks),
    ):
        if directions:
            said += [heading(f"singular directions, {title}"), _directions(ends, directions)]
    if head.answers:
        columns = [
            Column("attended to", lambda answer: spell(answer.token), wraps=True, least=11, style="bold"),
            Column("rise most", lambda answer: tokens(answer.written), wraps=True, least=12),
        ]
        said += [heading("what it writes for common tokens"), Table(columns, head.answers)]
    said += _links_of(found, place)
    return said


def _directions(ends: tuple[str, str], directions: tuple[Direction, ...]) -> Table:
    rows = [(one, end) for one in directions for end in range(len(one.source))]
    columns = [
        Column("share", lambda row: "" if row[1] else percent(row[0].share, 1), style="cyan"),
        Column(ends[0], lambda row: tokens(row[0].source[row[1]]), wraps=True, least=12),
        Column(ends[1], lambda row: tokens(row[0].target[row[1]]), wraps=True, least=12),
    ]
    return Table(columns, rows)


def _links_of(found: Circuits, place: int) -> list[RenderableType]:
    """By what and how much a head is fed, and whom it feeds."""
    excess, rows = found.excess, []
    for title, values in (("reads from", excess[:, :, place]), ("is read by", excess[:, place])):
        if not np.isfinite(values).any():
            continue
        cells = []
        for by in range(len(COMPOSITIONS)):
            order = np.argsort(-np.nan_to_num(values[by], nan=-np.inf), kind="stable")[:3]
            known = [other for other in order.tolist() if np.isfinite(values[by, other])]
            pairs = [(other, place) if title == "reads from" else (place, other) for other in known]
            cells.append(
                "  ".join(
                    f"{found.heads[other].name} {fixed(found.composition[by][pair], 2)}"
                    for other, pair in zip(known, pairs, strict=True)
                )
            )
        rows.append((title, *cells))

    columns = [Column("", itemgetter(0), style="bold")]
    columns += [
        Column(f"by {READS[by]}", itemgetter(at), wraps=True, least=12) for at, by in enumerate(COMPOSITIONS, 1)
    ]
    return [heading("composition, most above chance"), Table(columns, rows)] if rows else []
