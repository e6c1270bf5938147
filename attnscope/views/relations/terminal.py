"""Relations drawn in the terminal, with rich: a table with the evidence, and examples with their links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.frame.pair_tables import head_name
from attnscope.records.relations.combined import Score
from attnscope.records.relations.record import Example, ExampleLink, Relation, Relations
from attnscope.views.relations import combined, summary, word_times
from attnscope.views.tables.numbers import UNDEFINED, interval, number, signed
from attnscope.views.tables.plain_text import dim_lines, spell_out
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import corpus_line, corpus_notes, printable

_STYLES = {"yes": "bold", "weakly": "bold", "others": "", "no": "dim", "none": "dim"}


def show(found: Relations, console: Console) -> RenderableType:
    """The table of relations, and the examples if there are any."""
    parts = [table(found)]
    if found.combined:
        parts.append(together(found, console))
    if found.word_times is not None:
        parts.append(word_times.table(found.word_times, found.word_times.lists))
    return Group(*parts, *([examples(found)] if found.examples else []))


def table(found: Relations, most: int = 40) -> RenderableType:
    """A row a relation: those that a head expresses first, the furthest above its baseline; then the rest.

    Args:
        found: What to draw.
        most: How many of those that no head expresses are listed; a line says how many more there are.
    """
    ranked = summary.listed(found)
    kept = sum(one.best_found or bool(one.found.any()) for one in ranked)
    shown_relations = ranked[: max(kept, most)]
    widest = max((len(one.name) for one in shown_relations), default=8)

    def of(name: str, accent: str = "") -> Callable[[Relation], Text]:
        def cell(relation: Relation) -> Text:
            style = _STYLES[summary.verdict(relation)]
            if style != "dim":
                style = accent or style * (name == "name")
            return Text(getattr(summary.row(relation), name), style=style)

        return cell

    columns = [
        Column("relation", of("name"), wraps=widest > 30, least=min(widest, 30)),
        Column("head", of("head", "bold"), least=6),
        Column("accuracy", of("accuracy", "cyan"), right=True),
        Column("95% interval", of("interval"), right=True, drop=3),
        Column("baseline", of("baseline"), right=True, drop=1),
        Column("rule", of("rule"), wraps=True, least=10, drop=5),
        Column("n", of("n"), right=True, least=6, drop=2),
        Column("mass", of("mass"), right=True, drop=4),
        Column("expressed", of("verdict"), wraps=True, least=8),
    ]
    shown = Table(columns, shown_relations, gap=1)
    parts: list[RenderableType] = [shown]
    if len(ranked) > len(shown_relations):
        parts.append(Text(f"and {len(ranked) - len(shown_relations)} more: see --json or the CSV file", style="dim"))
    parts += [Text(), Text(summary.count_line(found), style="bold")]
    said = [summary.explanation(found), summary.unlisted_line(found), corpus_line(found), *corpus_notes(found)]
    return Group(*parts, *dim_lines(said))


def together(found: Relations, console: Console, most: int = 40) -> RenderableType:
    """A row a relation: the best head alone, the mean of several, and the regression; see `table`."""
    rows = list(combined.together_rows(found))
    widest = max(len(row.name) for row in rows)

    def gain(row: combined.TogetherRow, score: Score | None) -> str:
        is_head = score is row.at.mean and len(row.relation.heads) == 1
        return UNDEFINED if score is None or is_head else interval(score.gain_low, score.gain_high, signed)

    columns = [
        Column("relation", lambda row: spell_out(row.name, console), wraps=True, least=min(widest, 30)),
        Column("head", lambda row: head_name(row.relation.heads[0]), least=6, drop=2, style="bold"),
        Column("alone", lambda row: number(row.at.best_head.value), right=True),
        Column("k", lambda row: str(len(row.relation.heads)), right=True, least=2),
        Column("mean", lambda row: number(row.at.mean.value), right=True, style="cyan"),
        Column("gain", lambda row: gain(row, row.at.mean), right=True, least=14, drop=3),
        Column("regression", lambda row: number(row.at.regression.value if row.at.regression else math.nan),
               right=True, style="cyan"),
        Column("gain", lambda row: gain(row, row.at.regression), right=True, least=14, drop=4),
        Column("chance", lambda row: number(row.at.chance), right=True, drop=1),
    ]  # fmt: skip
    shown = Table(columns, rows[:most], gap=1)
    said = [combined.together_explanation(found)]
    if len(rows) > most:
        said.append(f"and {amount(len(rows) - most, 'row')} more: see --json or the CSV file")
    return Group(Text(), shown, *dim_lines(said))


def examples(found: Relations) -> RenderableType:
    """Each example's text, and a line for each link: where it looks, whether that is right, and what would be."""
    parts: list[RenderableType] = []
    last = ""
    for example in found.examples:
        if example.relation != last:
            parts += [Text(), Text(printable(example.relation), style="bold")]
            last = example.relation
        parts += [_sentence(example), Text(f"  {summary.example_line(example)}", style="dim")]
        parts += [_link(example, link) for link in example.links]
    return Group(*parts)


def _sentence(example: Example) -> Text:
    """The words of an example; sources of right links and of wrong ones in their colours."""
    styles: dict[int, str] = {}
    for link in example.links:
        styles |= dict.fromkeys(link.source, f"bold {summary.RIGHT if link.right else summary.WRONG}")
    text = Text("  … " if example.cut_before else "  ")
    for at, (word, spaced) in enumerate(zip(example.words, example.spaced, strict=True)):
        text.append(" " if spaced else "")
        text.append(printable(word), style=styles.get(at, ""))
    return text.append(" …" if example.cut_after else "")


def _link(example: Example, link: ExampleLink) -> Text:
    right = link.right
    text = Text("    ")
    text.append("✓ " if right else "✗ ", style=f"bold {summary.RIGHT if right else summary.WRONG}")
    text.append(_words(example, link.source)).append(" → ")
    text.append(_words(example, (link.looked,)) if link.looked >= 0 else "(a word further away)", style="bold")
    text.append(f" {link.weight:.2f}", style="cyan")
    if not right:
        text.append(f"   right: {_words(example, link.targets)}", style="dim")
    return text


def _words(example: Example, numbers: Sequence[int]) -> str:
    return printable(", ".join(example.words[number] for number in numbers), 60)
