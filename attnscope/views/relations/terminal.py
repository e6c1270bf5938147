"""Relations drawn in the terminal, with rich: a table with the evidence, and examples with their links."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.relations.record import Example, ExampleLink, Relations
from attnscope.views.heads.summary import corpus_line, corpus_notes, printable
from attnscope.views.relations import combined, summary
from attnscope.views.tables.plain_text import dim_lines, plain_table, spell_out

_STYLES = {"yes": "bold", "weakly": "bold", "others": "", "no": "dim", "none": "dim"}

# What goes first where a terminal is narrow.
_GOES = ("rule", "mass", "interval", "n")
_WIDTHS = {
    "name": 10, "head": 6, "accuracy": 8, "interval": 12, "baseline": 8, "rule": 10, "n": 6, "mass": 4, "verdict": 8,
}  # fmt: skip

_TOGETHER_GOES = ("regression_gain", "mean_gain", "head", "chance")
_TOGETHER_WIDTHS = {
    "name": 10, "head": 6, "alone": 5, "heads": 2, "mean": 4, "mean_gain": 14, "regression": 10,
    "regression_gain": 14, "chance": 6,
}  # fmt: skip
_TITLES = {"name": "relation", "heads": "k", "mean_gain": "gain", "regression_gain": "gain"}


def show(found: Relations, console: Console) -> None:
    """Prints the table of relations, and the examples if there are any."""
    console.print(table(found, console))
    if found.combined:
        console.print(together(found, console))
    if found.examples:
        console.print(examples(found))


def table(found: Relations, console: Console, most: int = 40) -> RenderableType:
    """A row a relation: those that a head expresses first, the furthest above its baseline; then the rest.

    In a narrow terminal the least important columns go, and a line says which.

    Args:
        found: What to draw.
        console: Tells the width.
        most: How many of those that no head expresses are listed; a line says how many more there are.
    """
    ranked = summary.listed(found)
    kept = sum(one.best_found or bool(one.found.any()) for one in ranked)
    shown_relations = ranked[: max(kept, most)]
    names, left_out = list(_WIDTHS), []
    widest = max((len(one.name) for one in shown_relations), default=8)
    widths = _WIDTHS | {"name": min(widest, 30)}
    for name in _GOES:
        if sum(widths[one] + 1 for one in names) > console.width:
            names.remove(name)
            left_out.append(name)
    shown = plain_table(space=1)
    for name in names:
        title = {"name": "relation", "interval": "95% interval", "verdict": "expressed"}.get(name, name)
        right = name in ("accuracy", "interval", "baseline", "n", "mass")
        # A column that may wrap is narrowed to its longest word, whatever min_width says: names wrap only if they must.
        wraps = name in ("rule", "verdict") or (name == "name" and widest > widths[name])
        shown.add_column(
            title, justify="right" if right else "left", no_wrap=not wraps, overflow="fold", min_width=widths[name]
        )
    for relation in shown_relations:
        row = summary.row(relation)
        style = _STYLES[summary.verdict(relation)]
        accents = {"name": style, "head": "bold", "accuracy": "cyan"} if style != "dim" else dict.fromkeys(names, "dim")
        shown.add_row(*(Text(getattr(row, name), style=accents.get(name, "")) for name in names))
    parts: list[RenderableType] = [shown]
    if len(ranked) > len(shown_relations):
        parts.append(Text(f"and {len(ranked) - len(shown_relations)} more: see --json or the CSV file", style="dim"))
    parts += [Text(), Text(summary.count_line(found), style="bold")]
    said = [summary.explanation(found), summary.unlisted_line(found), corpus_line(found), *corpus_notes(found)]
    if left_out:
        said.append(f"not shown in {console.width} columns: {', '.join(left_out)}")
    return Group(*parts, *dim_lines([line for line in said if line]))


def together(found: Relations, console: Console, most: int = 40) -> RenderableType:
    """A row a relation: the best head alone, the mean of several, and the regression; see `table`."""
    rows = list(combined.together_rows(found))
    names, left_out = list(_TOGETHER_WIDTHS), []
    widths = _TOGETHER_WIDTHS | {"name": min(max(len(row.name) for row in rows), 30)}
    for name in _TOGETHER_GOES:
        if sum(widths[one] + 1 for one in names) > console.width:
            names.remove(name)
            left_out.append(_TITLES.get(name, name))
    shown = plain_table(space=1)
    for name in names:
        left = name in ("name", "head")
        shown.add_column(
            _TITLES.get(name, name), justify="left" if left else "right", no_wrap=name != "name", overflow="fold",
            min_width=widths[name],
        )  # fmt: skip
    accents = {"head": "bold", "mean": "cyan", "regression": "cyan"}
    for row in rows[:most]:
        shown.add_row(*(Text(spell_out(getattr(row, name), console), style=accents.get(name, "")) for name in names))
    said = [combined.together_explanation(found)]
    if len(rows) > most:
        said.append(f"and {amount(len(rows) - most, 'row')} more: see --json or the CSV file")
    if left_out:
        said.append(f"not shown in {console.width} columns: {', '.join(left_out)}")
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
    for number, (word, spaced) in enumerate(zip(example.words, example.spaced, strict=True)):
        text.append(" " if spaced else "")
        text.append(printable(word), style=styles.get(number, ""))
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
