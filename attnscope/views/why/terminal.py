"""Why a head attends there, in the terminal, with rich."""

from __future__ import annotations

from itertools import zip_longest
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.records.why.score import Why
from attnscope.views.tables.numbers import signed
from attnscope.views.tables.plain_text import dim_lines, spell_out_text
from attnscope.views.tables.table import Column, Table
from attnscope.views.why.summary import notes_of, score_line, title_of

_MOST = 10


def show(record: Why, console: Console) -> None:
    """Prints the parts that add most through the query, through the key, and the pairs that add most."""
    parts: list[RenderableType] = [
        Text(title_of(record), style="bold"),
        Text(score_line(record)),
        Text(),
        tables(record),
    ]
    for part in [*parts, Text(), *dim_lines(notes_of(record))]:
        console.print(spell_out_text(part, console) if isinstance(part, Text) else part)


def tables(record: Why) -> Table:
    """A column of the query's parts, one of the key's, one of pairs; each with what the others add together."""
    names = [part.name for part in record.parts]
    pairs = [(f"{names[c]} → {names[d]}", float(record.pairs[c, d])) for c, d in record.strongest(_MOST)]
    total = float(record.pairs.sum())
    columns = [_most(names, record.by_query), _most(names, record.by_key), _with_rest(pairs, record.pairs.size, total)]
    if record.bias is not None:
        for column in columns:
            column.append(("bias by position", record.bias))
    rows = [
        [cell for one in row for cell in (one[0], signed(one[1]) if one[0] else "")]
        for row in zip_longest(*columns, fillvalue=("", 0.0))
    ]
    shown = []
    for number, side in enumerate(("query reads", "key offers", "pair: query → key")):
        shown += [
            Column(side, itemgetter(2 * number), wraps=True, least=8, drop=number, style="bold"),
            Column("nats", itemgetter(2 * number + 1), right=True, drop=number, style="cyan"),
        ]
    return Table(shown, rows)


def _most(names: list[str], values: NDArray[np.float64]) -> list[tuple[str, float]]:
    order = np.argsort(-np.abs(values), kind="stable")[:_MOST]
    return _with_rest([(names[at], float(values[at])) for at in order], len(names), float(values.sum()))


def _with_rest(shown: list[tuple[str, float]], n: int, total: float) -> list[tuple[str, float]]:
    """What is shown, and below it what the others add together."""
    rest = n - len(shown)
    return [*shown, (f"{rest:,} others", total - sum(value for _, value in shown))] if rest else shown
