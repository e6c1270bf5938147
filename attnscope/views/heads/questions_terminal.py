"""What `heads --probe needle` found, in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.needles import CopiedWithout, Needles
from attnscope.report.numbers import interval_of, number
from attnscope.report.plain_text import dim_lines, heading
from attnscope.report.table import TextColumn, TextTable


def needles_table(findings: Findings) -> list[RenderableType]:
    """The share of needle tokens that is written, by length and depth, and what is left of it without heads."""
    needles = findings.needles
    if needles is None:
        return []
    parts = [heading("needle tokens that the model writes, by depth of the needle"), _by_depth(needles)]
    if needles.without:
        title = "the same without heads (outputs zero), which half of the needles chose, on the other half"
        parts += [heading(title), _without(needles)]
    return [*parts, Text(), *dim_lines(needle_notes(needles))]


def needle_notes(needles: Needles) -> list[str]:
    """What the tables of a probe mean: one sentence each."""
    notes = ["a token counts as written where it is the model's first choice after the right ones before it"]
    if needles.without:
        moved = max(each.n_moved for each in needles.without)
        n = max((each.n_heads for each in needles.without if each.what == "random"), default=0)
        but = f"; {moved} of {n} from others, as the layer has too few" if moved else ""
        notes.append(f"random heads: from the same layers, drawn anew for each needle{but}")
        if n_needles := max(each.n_needles for each in needles.without):
            notes.append(
                f"heads were taken out on {amount(n_needles, 'needle')}, and chosen on the others alone: "
                "so they may be fewer than have the role by all needles"
            )
    return [*notes, "intervals: 95% over needles"]


def name_removed(removed: CopiedWithout) -> str:
    """Such as "18 retrieval heads"."""
    return amount(removed.n_heads, f"{removed.what} head")


def _by_depth(needles: Needles) -> RenderableType:
    shares = {(each.length, each.depth): each.copied.value for each in needles.at}

    def at(depth: float) -> Callable[[int], str]:
        return lambda length: number(shares.get((length, depth), math.nan))

    lengths, depths = (sorted({place[axis] for place in shares}) for axis in (0, 1))
    columns = [TextColumn(f"{100 * depth:g}%", at(depth), right=True, style="cyan") for depth in depths]
    return TextTable([TextColumn("tokens", lambda length: f"{length:,}", right=True), *columns], lengths, goes_on=True)


def _without(needles: Needles) -> RenderableType:
    removed = [(name_removed(each), each.copied, each.change) for each in needles.without]
    columns = [
        TextColumn("taken out", lambda row: row[0]),
        TextColumn("written", lambda row: number(row[1].value), right=True, style="cyan"),
        TextColumn("95% interval", lambda row: interval_of(row[1]), right=True, drop=2),
        TextColumn(
            "less than whole", lambda row: number(row[2].value) if row[2] else "", right=True, style="cyan", drop=1
        ),
        TextColumn("95% interval", lambda row: interval_of(row[2]) if row[2] else "", right=True, drop=2),
    ]
    return TextTable(columns, [("nothing", needles.copied, None), *removed])
