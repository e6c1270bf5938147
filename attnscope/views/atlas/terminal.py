"""An atlas in the terminal: a row a head, with the tokens and the text that show what it does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.questions.heads import description_notes, measures_block, parse_measures, sort_heads
from attnscope.records.atlas.record import FURTHEST, OUTSIDE_SINKS, Atlas, ExampleFacts, Side
from attnscope.records.heads.findings import Findings, Head
from attnscope.report.plain_text import cut, dim_lines
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.terminal import render_block
from attnscope.report.wording import corpus_line, corpus_notes, full_name, label, printable

_MOST_SHOWN = 160
"""Heads that are listed where none are chosen."""

_STANDS_OUT = 0.05
"""Share of attention beyond uniform attention's at an offset, from which on the offset is named."""

_TOKENS = 3
_AROUND = 4


def show(
    atlas: Atlas,
    console: Console,
    *,
    measures: str | None = None,
    sort: str | None = None,
    has_page: bool = False,
) -> RenderableType:
    """What each head does, where it looks, which tokens stand out, and its best example.

    `measures`, separated by commas, are shown too; `sort` is as of `questions.heads`. A head that is picked alone
    has everything, over several lines.
    """
    findings = atlas.findings
    heads = [atlas.heads[row] for row in sort_heads(atlas, sort)]
    whole = len(heads) == 1
    parts: list[RenderableType] = [table(atlas, heads if whole else heads[:_MOST_SHOWN], whole=whole)]
    if not whole and len(heads) > _MOST_SHOWN:
        more = f"and {len(heads) - _MOST_SHOWN} more: --sort puts others first; the page and npz have all"
        parts.append(Text(more, style="dim"))
    notes = _notes(atlas, whole=whole, has_page=has_page)
    parts += dim_lines([*notes, corpus_line(findings), *corpus_notes(findings)])
    if measures:
        block = measures_block(findings, parse_measures(findings, measures), sort)
        parts += render_block(block, console, every=True)
    return Group(*parts)


def table(atlas: Atlas, heads: list[Head], *, whole: bool) -> TextTable:
    """A row a head: with `whole` everything, over several lines; else a line."""
    findings = atlas.findings
    best = {facts.head: facts for facts in reversed(atlas.facts) if facts.why == "top"}
    numbers = {head.address: number for number, head in enumerate(atlas.heads)}

    def of(write: Callable[[int], str | Text]) -> Callable[[Head], str | Text]:
        return lambda head: write(numbers[head.address])

    columns = [
        TextColumn("head", lambda head: full_name(head, findings), style="bold"),
        TextColumn("offset", of(lambda head: _offset(atlas, head)), right=True),
        TextColumn("what it does", lambda head: _words(head, findings), wraps=whole, part=0 if whole else 5, least=28),
        TextColumn("pairs", of(lambda head: _tokens(atlas, head, "pairs", ", ")), wraps=whole, part=0 if whole else 3,
               least=18, drop=1),
        TextColumn("keys", of(lambda head: _tokens(atlas, head, "gets")), wraps=whole, part=0 if whole else 2, least=12,
               drop=2 if whole else 3),
        TextColumn("best example", of(lambda head: _excerpt(best[head]) if head in best else ""), wraps=whole,
               part=0 if whole else 5, least=28, drop=3),
    ]  # fmt: skip
    return TextTable(columns[: None if best else -1], heads)


def _words(head: Head, findings: Findings) -> str:
    """Its description, else its roles."""
    described = None if findings.descriptions is None else findings.descriptions.by_head.get(head.address)
    if described is not None:
        return printable(described.words + (f" ! {described.warning}" if described.warning else ""))
    return ", ".join(label(role.name) for role in head.roles) or "unclassified"


def _tokens(atlas: Atlas, head: int, side: Side, between: str = " ") -> str:
    rows = [row for row in atlas.tables[head] if row.side == side][:_TOKENS]
    return between.join("→".join(cut(printable(token), 12) for token in row.tokens) for row in rows)


def _offset(atlas: Atlas, head: int) -> Text:
    """The offset at which it is furthest above uniform attention, and its share there."""
    profile = atlas.profiles[head, 1:-1]
    above = profile - atlas.even_profiles[head, 1:-1]
    if not np.isfinite(above).any():
        return Text("")
    best = int(np.nanargmax(above))
    if above[best] < _STANDS_OUT:
        return Text("–", style="dim")
    offset = best - FURTHEST
    return Text(f"{offset:+d} " if offset else "0 ").append(f"{100 * profile[best]:.0f}%", style="cyan")


def _excerpt(facts: ExampleFacts) -> str:
    """The tokens around the one that counts most."""
    focus = max(0, facts.focus)
    first = max(0, focus - _AROUND)
    pieces = [
        f"{before}[{token}]" if number == focus else f"{before}{token}"
        for number, (before, token) in enumerate(facts.pieces()[first : focus + _AROUND + 1], first)
    ]
    return printable("".join(pieces), 80)


def _notes(atlas: Atlas, *, whole: bool, has_page: bool) -> list[str]:
    notes = [
        "offset: of the key from the query, where attention is furthest above uniform attention (by 5 points or more), "
        "and its share there; pairs (query→key) and keys: those with the largest lift.",
        f"lift: attention divided by {OUTSIDE_SINKS}.",
        *description_notes(atlas.findings),
        f"Examples are ranked by {printable(atlas.rank)}: {printable(atlas.options.get('rank', ''))}.",
    ]
    if not whole:
        notes.append(
            "… : cut. `attnscope show atlas.npz --pick L3H1` prints everything about a head; -f npz writes that file"
        )
    if atlas.facts and not has_page:
        notes.append(f"not shown: {amount(len(atlas.facts), 'example')}; -o atlas.html writes the page with them")
    return notes
