"""Why a head attends there, in the terminal, with rich."""

from __future__ import annotations

from itertools import zip_longest
from operator import itemgetter

from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.records.why.score import Why
from attnscope.report.numbers import signed
from attnscope.report.plain_text import dim_lines, spell_out_parts
from attnscope.report.table import TextColumn, TextTable
from attnscope.views.why.summary import lists_of, notes_of, score_line, title_of

_MOST = 10


def show(record: Why, console: Console) -> RenderableType:
    """The parts that add most through the query, through the key, and the pairs that add most."""
    lines = Text(title_of(record), style="bold"), Text(score_line(record))
    return spell_out_parts([*lines, Text(), tables(record), Text(), *dim_lines(notes_of(record))], console)


def tables(record: Why) -> TextTable:
    """A column of the query's parts, one of the key's, one of pairs; each with what the others add together."""
    lists = lists_of(record, _MOST)
    texts = [[(name, signed(nats)) for name, nats in side] for side in lists.values()]
    rows = [[cell for pair in row for cell in pair] for row in zip_longest(*texts, fillvalue=("", ""))]
    columns = []
    for number, side in enumerate(lists):
        columns += [
            TextColumn(side, itemgetter(2 * number), wraps=True, least=8, drop=number, style="bold"),
            TextColumn("nats", itemgetter(2 * number + 1), right=True, drop=number, style="cyan"),
        ]
    return TextTable(columns, rows)
