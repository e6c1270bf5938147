"""What heads' choices rest on, in the terminal, with rich."""

from __future__ import annotations

from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.why.heads import BANDS, SIDES, WhyHeads
from attnscope.views.tables.numbers import fixed, interval, percent
from attnscope.views.tables.plain_text import dim_lines, spell_out_parts
from attnscope.views.tables.table import Column, Table
from attnscope.views.tables.wording import model_of

_MOST_HEADS, _MOST_PARTS = 12, 3


def show(record: WhyHeads, console: Console) -> RenderableType:
    """What the heads that rest most on one earlier head rest on, at the key and at the query."""
    texts = f"{amount(record.corpus['n_texts'], 'text')}, {amount(record.corpus['n_tokens'], 'token')}"
    title = f"{model_of(record.run)} · what heads' choices of keys rest on · {texts}"
    is_head = np.array([part.kind == "head" for part in record.parts])
    most = np.where(is_head & np.isfinite(record.shares[1]), record.shares[1], -np.inf).max(1, initial=-np.inf)
    shown = np.argsort(-most, kind="stable")[:_MOST_HEADS].tolist()
    rest = len(record.heads) - len(shown)
    notes = [
        "key, query: the share of the variance of a head's scores, each query's less their mean, that a part brings at "
        "the key or at the query, in percent with 95% intervals over texts; the shares of a side sum to 1",
        "K, Q: composition from the weights, above random directions",
        f"{amount(rest, 'more head')} in the record: --json, or -o" if rest else "",
        *record.run.get("notes", ()),
    ]
    tables = [_table(record, shown), Text(), *_wavelengths(record, shown)]
    parts = [Text(title, style="bold"), Text(), *tables, *dim_lines(notes)]
    return spell_out_parts(parts, console)


def _table(record: WhyHeads, shown: list[int]) -> Table:
    rows: list[Any] = []
    for head in shown:
        sides = [[_cell(record, side, head, at) for at in record.strongest(side, head, _MOST_PARTS)] for side in SIDES]
        for line, (query, key) in enumerate(zip_longest(*sides, fillvalue="")):
            rows.append((record.name(head) if not line else "", key, query))
    columns = [Column("head", itemgetter(0), style="bold")]
    columns += [Column(side, itemgetter(at), wraps=True, least=16) for at, side in ((1, "key"), (2, "query"))]
    return Table(columns, rows)


def _wavelengths(record: WhyHeads, shown: list[int]) -> list[RenderableType]:
    """The shares of bands of wavelengths; nothing for a model without rotary positions."""
    if record.wavelengths is None:
        return []
    shares = record.wavelengths[..., 0]
    filled = [at for at in range(len(BANDS)) if np.any(np.nan_to_num(shares[:, at]))]
    columns = [Column("head", itemgetter(0), style="bold")]
    rows = [(record.name(head), *(percent(float(shares[head, at])) for at in filled)) for head in shown]
    columns += [Column(BANDS[at], itemgetter(number), right=True) for number, at in enumerate(filled, 1)]
    title = "the share of the scores' variance by rotary wavelength, in tokens (long ones hardly turn: content)"
    return [Text(title, style="bold"), Table(columns, rows), Text()]


def _cell(record: WhyHeads, side: str, head: int, at: int) -> Text:
    number = SIDES.index(side)
    ends = interval(record.low[number, head, at], record.high[number, head, at], lambda value: fixed(100 * value, 0))
    composed = float(record.composition[number, head, at])
    weights = f" {side[0].upper()} {fixed(composed, 2, signed=True)}" if np.isfinite(composed) else ""
    share = percent(record.shares[number, head, at])
    return Text.assemble(f"{record.parts[at].name} ", (share, "cyan"), (f" {ends}{weights}", "dim"))
