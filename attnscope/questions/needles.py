"""Report how much a model finds in long texts, by the needles hidden in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnscope.errors import amount
from attnscope.report.blocks import Block, Curves, Ranking, Series, Words
from attnscope.report.numbers import number
from attnscope.results.result import Result
from attnscope.results.table import Table

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Of the heads of retrieval whose scores by depth are drawn."""

_NOTES = (
    "a token counts as written where it is the model's first choice after the right ones before it",
    "intervals: 95% over needles",
)

ALL = 0
"""The length that stands for texts of all lengths and depths."""


def needle_blocks(result: Result) -> Iterator[Block]:
    """Show the share of needle tokens that is written, by length and depth."""
    written = result.table("written")
    if not len(written):
        return
    # One row per length and one column per depth of the needle.
    cells = written.select(written["length"] != ALL)
    lengths, depths = np.unique(cells["length"]).tolist(), np.unique(cells["depth"]).tolist()
    columns: list[str | Words] = []
    for depth in depths:
        at_depth = cells.select(cells["depth"] == depth)
        shares = dict(zip(at_depth["length"].tolist(), map(number, at_depth["copied"].tolist()), strict=True))
        columns.append(Words(f"{100 * depth:g}%", [shares.get(length, "–") for length in lengths]))
    yield Ranking(
        heading="needle tokens that the model writes, by depth of the needle",
        what="tokens",
        names=[f"{length:,}" for length in lengths],
        table=Table({}, {}),
        columns=columns,
        order=range(len(lengths)),
        most=len(lengths),
        notes=_NOTES,
    )
    # Curves need two depths.
    if len(depths) > 1:
        yield _curves(result, cells, depths)


def _curves(result: Result, cells: Table, depths: list[float]) -> Curves:
    """Show how much the model writes by depth of the needle, and the scores of the best heads."""
    # What the model writes, a curve per length.
    series = []
    lengths = np.unique(cells["length"]).tolist()
    for length in lengths:
        points = cells.select(cells["length"] == length).interval("copied")
        series.append(Series(amount(length, "token") if len(lengths) > 1 else "model", points))
    # The best heads, each scored at every depth: (depth, 3) with no interval.
    heads = result.table("heads")
    best = np.argsort(-np.nan_to_num(heads["retrieval"]), kind="stable")
    for color, row in zip(COLORS, best.tolist(), strict=False):
        if heads["retrieval"][row] > 0:
            scores = [heads[f"retrieval_at_{100 * depth:g}"][row] for depth in depths]
            nothing = np.full(len(depths), np.nan)
            series.append(Series(result.head_names[row], np.stack([scores, nothing, nothing], -1), color))
    return Curves(
        printed="never",
        figure="needles",
        title=f"{amount(len(result.table('roles')), 'head')} of retrieval",
        y="needle tokens written, share",
        across="depth of the needle, %",
        x=[100 * depth for depth in depths],
        series=series,
        floor=-0.02,
        ceiling=1.02,
        notes=[
            "black: what the model writes; colours: what it writes while that head's largest weight is on the same "
            "token",
            *_NOTES,
        ],
    )
