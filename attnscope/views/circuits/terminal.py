"""Circuits in the terminal, with rich: who feeds whom, what is copied, what heads read and write."""

from __future__ import annotations

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.records.circuits import COMPOSITIONS, CircuitHead, Circuits, Direction, Link
from attnscope.views.circuits.summary import (
    READS,
    link_line,
    most_copying,
    most_previous,
    named,
    notes_of,
    number,
    score,
    spell,
    title_of,
    tokens,
)
from attnscope.views.tables.plain_text import dim_lines, heading, plain_table, spell_out_text

_MOST = 8


def show(found: Circuits, console: Console) -> None:
    """Prints what the weights say: of all heads the strongest, of picked heads everything."""
    parts: list[RenderableType] = [Text(title_of(found), style="bold")]
    if found.picked:
        for place in found.picked:
            parts += _head(found, place)
    else:
        parts += [*_compositions(found), *_copying(found), *_places(found)]
    for part in [*parts, Text(), *dim_lines(notes_of(found))]:
        console.print(spell_out_text(part, console) if isinstance(part, Text) else part)


def _compositions(found: Circuits) -> list[RenderableType]:
    table = plain_table()
    for by in COMPOSITIONS:
        table.add_column(f"by {READS[by]}", no_wrap=True)
    columns = [[link for link in found.strongest(by, _MOST) if link.share > 0] for by in COMPOSITIONS]
    for row in range(max(map(len, columns), default=0)):
        table.add_row(*(_link(found, links[row]) if row < len(links) else Text() for links in columns))
    return [heading("which heads feed which, most above chance (in brackets: chance)"), table]


def _link(found: Circuits, link: Link) -> Text:
    return Text.assemble(
        f"{link_line(found, link)} ", (number(link.share), "cyan"), (f" ({number(link.expected, 3)})", "dim")
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
    table = plain_table()
    for column in ("head", "copying", "reads", "writes"):
        table.add_column(column, style="bold" if column == "head" else "", overflow="fold")
    for head in heads:
        source, target = (
            (tokens(head.writes[0].source[0]), tokens(head.writes[0].target[0])) if head.writes else ("",) * 2
        )
        table.add_row(head.name, Text(score(head.copying), style="cyan"), Text(source), Text(target))
    return table


def _places(found: Circuits) -> list[RenderableType]:
    heads = most_previous(found, _MOST)
    if not heads:
        return []
    table = plain_table()
    for column in ("head", "previous", "same", "first"):
        table.add_column(column, style="bold" if column == "head" else "cyan")
    for head in heads:
        table.add_row(head.name, number(head.previous), number(head.same), number(head.first))
    title = f"heads that would look at the previous token by position alone (positions are {found.places})"
    return [heading(title), table]


def _head(found: Circuits, place: int) -> list[RenderableType]:
    """All that is known of one head."""
    head = found.heads[place]
    said: list[RenderableType] = [heading(head.name)]
    for name, one in (("copying", head.copying), ("matching", head.matching)):
        chance = f"random {number(one.mean)} [{number(one.low)}, {number(one.high)}]"
        said.append(Text.assemble(f"{name} ", (score(one), "cyan"), (f"  {chance}", "dim")))
    said.append(
        Text.assemble(
            "by position alone: previous ", (number(head.previous), "cyan"), "  same ", (number(head.same), "cyan"),
            "  next ", (number(head.next), "cyan"), "  first ", (number(head.first), "cyan"),
            "  · the same token scores ", (f"{number(head.same_nats)} nats", "cyan"), " above others",
        )
    )  # fmt: skip
    for title, ends, directions in (
        ("reads → writes", ("reads", "writes"), head.writes),
        ("queries → keys", ("queries", "keys"), head.seeks),
    ):
        if directions:
            said += [heading(f"singular directions, {title}"), _directions(ends, directions)]
    if head.answers:
        table = plain_table()
        table.add_column("attended to", style="bold")
        table.add_column("rise most", overflow="fold")
        for answer in head.answers:
            table.add_row(Text(spell(answer.token)), Text(tokens(answer.written)))
        said += [heading("what it writes for common tokens"), table]
    said += _links_of(found, place)
    return said


def _directions(ends: tuple[str, str], directions: tuple[Direction, ...]) -> Table:
    table = plain_table()
    for column in ("share", *ends):
        table.add_column(column, overflow="fold", style="cyan" if column == "share" else "")
    for one in directions:
        for end in range(len(one.source)):
            share = f"{one.share:.1%}" if end == 0 else ""
            table.add_row(share, Text(tokens(one.source[end])), Text(tokens(one.target[end])))
    return table


def _links_of(found: Circuits, place: int) -> list[RenderableType]:
    """By what and how much a head is fed, and whom it feeds."""
    table = plain_table()
    for column in ("", *(f"by {READS[by]}" for by in COMPOSITIONS)):
        table.add_column(column, style="bold" if not column else "")
    excess, n = found.excess, len(found.heads)
    for title, values in (("reads from", excess[:, :, place]), ("is read by", excess[:, place])):
        if not np.isfinite(values).any():
            continue
        row = []
        for by in range(len(COMPOSITIONS)):
            order = np.argsort(-np.nan_to_num(values[by], nan=-np.inf), kind="stable")[: min(3, n)]
            known = [one for one in order.tolist() if np.isfinite(values[by, one])]
            pairs = [(one, place) if title == "reads from" else (place, one) for one in known]
            cells = [
                f"{named(found, one)} {number(found.composition[by][pair])}"
                for one, pair in zip(known, pairs, strict=True)
            ]
            row.append("  ".join(cells))
        table.add_row(title, *row)
    return [heading("composition, most above chance"), table] if table.row_count else []
