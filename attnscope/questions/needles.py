"""Needles in haystacks: what is said of how much a model finds in long texts, whole and without some heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attnscope.errors import amount
from attnscope.report.blocks import Block, Curves, Ranking, Series, Words
from attnscope.report.numbers import number
from attnscope.results.result import Result
from attnscope.results.table import Table

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Of the heads of retrieval whose scores by depth are drawn."""

ALL = 0
"""The length that stands for texts of all lengths and depths."""


def needle_blocks(result: Result) -> Iterator[Block]:
    """Show the share of needle tokens that is written, by length and depth, and what is left of it without heads."""
    written, without = result.table("written"), result.table("without")
    if not len(written):
        return
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
        notes=_notes(without),
    )
    if len(without):
        yield _removed(written.select(written["length"] == ALL), without)
    if len(depths) > 1:
        yield _curves(result, cells, depths)


def _removed(whole: Table, without: Table) -> Ranking:
    """Show what is written by the whole model and without heads."""
    columns = {
        "copied": replace(without.columns["copied"], label="written"),
        "change": replace(without.columns["change"], label="less than whole"),
    }
    values = {}
    for part in ("", "_low", "_high"):
        values[f"copied{part}"] = np.concatenate([whole[f"copied{part}"], without[f"copied{part}"]])
        values[f"change{part}"] = np.concatenate([[np.nan], without[f"change{part}"]])
    counted = zip(without["what"].tolist(), without["n_heads"].tolist(), strict=True)
    names = ["nothing", *(amount(n, f"{what} head") for what, n in counted)]
    return Ranking(
        heading="the same without heads (outputs zero), which half of the needles chose, on the other half",
        what="taken out",
        names=names,
        table=Table(columns, values),
        columns=["copied", "change"],
        order=range(len(names)),
        most=len(names),
    )


def _curves(result: Result, cells: Table, depths: list[float]) -> Curves:
    """Show how much the model writes by depth of the needle, and the scores of the best heads."""
    series = []
    lengths = np.unique(cells["length"]).tolist()
    for length in lengths:
        points = cells.select(cells["length"] == length).interval("copied")
        series.append(Series(amount(length, "token") if len(lengths) > 1 else "model", points))
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
            *_notes(result.table("without")),
        ],
    )


def _notes(without: Table) -> list[str]:
    """Return what the tables of a probe mean: one sentence each."""
    notes = ["a token counts as written where it is the model's first choice after the right ones before it"]
    if len(without):
        notes.append("random heads: from the same layers as far as these have others, drawn anew for each needle")
        notes.append(
            f"heads were taken out on {amount(int(without['n_needles'].max()), 'needle')}, and chosen on the others "
            "alone: so they may be fewer than have the role by all needles"
        )
    return [*notes, "intervals: 95% over needles"]
