"""Relations drawn in the terminal, with rich: a table with the evidence, and examples with their links."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.relations.record import Example, ExampleLink, Relation, Relations
from attnscope.records.relations.word_times import BEST, EVEN, RANDOM, UPPER, TimedList, WordTimes
from attnscope.report.numbers import fixed, interval_of
from attnscope.report.plain_text import dim_lines
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import corpus_line, corpus_notes, printable
from attnscope.views.relations import summary

_STYLES = {"yes": "bold", "weakly": "bold", "others": "", "no": "dim", "none": "dim"}


def show(relations: Relations, console: Console) -> RenderableType:
    """The table of relations, and the examples if there are any."""
    parts = [table(relations)]
    if relations.word_times is not None:
        parts.append(word_times_table(relations.word_times))
    if relations.alignment_heads:
        parts.append(alignment_heads(relations.alignment_heads))
    return Group(*parts, *([examples(relations)] if relations.examples else []))


def table(relations: Relations, most: int = 40) -> RenderableType:
    """A row per relation: those that a head expresses first, the furthest above its baseline; then the rest.

    Of more than `most` relations all that a head expresses are listed; a line says how many more there are.
    """
    ranked = summary.list_relations(relations)
    listed = ranked[: max(most, sum(map(summary.is_expressed, ranked)))]
    widest = max((len(relation.name) for relation in listed), default=8)

    def of(name: str, accent: str = "") -> Callable[[Relation], Text]:
        def cell(relation: Relation) -> Text:
            style = _STYLES[summary.verdict(relation)]
            if style != "dim":
                style = accent or style * (name == "name")
            return Text(getattr(summary.row(relation), name), style=style)

        return cell

    columns = [
        TextColumn("relation", of("name"), wraps=widest > 30, least=min(widest, 30)),
        TextColumn("head", of("head", "bold"), least=6),
        TextColumn("accuracy", of("accuracy", "cyan"), right=True),
        TextColumn("95% interval", of("interval"), right=True, drop=3),
        TextColumn("baseline", of("baseline"), right=True, drop=1),
        TextColumn("rule", of("rule"), wraps=True, least=10, drop=5),
        TextColumn("n", of("n"), right=True, least=6, drop=2),
        TextColumn("mass", of("mass"), right=True, drop=4),
        TextColumn("expressed", of("verdict"), wraps=True, least=8),
    ]
    parts: list[RenderableType] = [TextTable(columns, listed, gap=1)]
    if len(ranked) > len(listed):
        parts.append(Text(f"and {len(ranked) - len(listed)} more: see --json or the CSV file", style="dim"))
    parts += [Text(), Text(summary.count_line(relations), style="bold")]
    notes = [summary.explanation(relations), summary.unlisted_line(relations), corpus_line(relations)]
    return Group(*parts, *dim_lines([*notes, *corpus_notes(relations)]))


def word_times_table(word_times: WordTimes) -> RenderableType:
    """A row for each list of heads that times words, and how the errors are made."""

    def title(each: TimedList) -> str:
        if each.by == BEST:
            return "best head" if each.n_heads == 1 else f"best {amount(each.n_heads, 'head')}"
        if each.by == RANDOM:
            return amount(each.n_heads, "random head")
        return EVEN if each.by == EVEN else f"{each.by} ({each.n_heads})"

    def change(each: TimedList) -> str:
        return "" if each.by == UPPER else interval_of(each.change, partial(fixed, decimals=3, signed=True))

    seconds = partial(fixed, decimals=3)
    columns = [
        TextColumn("word times by", title),
        TextColumn("median error", lambda each: f"{seconds(each.median.value)} s", right=True, style="cyan"),
        TextColumn("95% interval", lambda each: interval_of(each.median, seconds), right=True, drop=2),
        TextColumn("mean error", lambda each: f"{seconds(each.mean)} s", right=True, style="cyan"),
        TextColumn("to upper half", change, right=True, drop=1),
    ]
    notes = [
        f"error: seconds between the time that the heads tell for the start of a word and the known one; the mean of "
        f"{amount(word_times.n_words, 'word')}, then over {amount(word_times.n_recordings, 'recording')}",
        "best: the best heads of one half of the recordings, timed on the other, both ways round; "
        "alignment_heads may have others",
        "upper half: all heads of the decoder's upper half, Whisper's default; to it: 95% interval of the median "
        "difference; even spacing: no head, all words of a recording equally long",
    ]
    return Group(Text(), TextTable(columns, word_times.lists, gap=1), *dim_lines(notes))


def alignment_heads(heads: Sequence[Sequence[int]]) -> RenderableType:
    """Return a line of JSON for a Whisper's generation_config.json, and a note that says so."""
    line = Text(f'"alignment_heads": {json.dumps(heads)}', style="bold")
    note = "paste it into the model's generation_config.json: transformers times words by these heads, as --times does"
    return Group(Text(), line, *dim_lines([note]))


def examples(relations: Relations) -> RenderableType:
    """Each example's text, and a line for each link: where it looks, whether that is right, and what would be."""
    parts: list[RenderableType] = []
    for relation, group in groupby(relations.examples, key=lambda example: example.relation):
        parts += [Text(), Text(printable(relation), style="bold")]
        for example in group:
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
    mark = ("✓ ", f"bold {summary.RIGHT}") if link.right else ("✗ ", f"bold {summary.WRONG}")
    looked = _words(example, (link.looked,)) if link.looked >= 0 else "(a word further away)"
    text = Text.assemble(
        "    ", mark, f"{_words(example, link.source)} → ", (looked, "bold"), (f" {link.weight:.2f}", "cyan")
    )
    return text if link.right else text.append(f"   right: {_words(example, link.targets)}", style="dim")


def _words(example: Example, numbers: Sequence[int]) -> str:
    return printable(", ".join(example.words[number] for number in numbers), 60)
