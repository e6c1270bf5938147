"""What a model finds in long texts, whole and without some of its heads, in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.needles import CopiedWithout, Needles
from attnscope.views.tables.numbers import interval, number
from attnscope.views.tables.plain_text import dim_lines
from attnscope.views.tables.table import Column, Table


def needles_table(findings: Findings) -> list[RenderableType]:
    """The share of needle tokens that is written, by length and depth, and what is left of it without heads."""
    found = findings.needles
    if found is None:
        return []
    shown: list[RenderableType] = [
        Text("\nneedle tokens that the model writes, by depth of the needle", style="bold"), _by_depth(found)
    ]  # fmt: skip
    if found.without:
        title = "\nthe same without heads (outputs zero), which half of the needles chose, on the other half"
        shown += [Text(title, style="bold"), _without(found)]
    return [*shown, Text(), *dim_lines(notes(found))]


def notes(found: Needles) -> list[str]:
    """What the tables of a probe mean: one sentence each."""
    said = ["a token counts as written where it is the model's first choice after the right ones before it"]
    if found.without:
        moved = max(one.n_moved for one in found.without)
        n = max((one.n_heads for one in found.without if one.what == "random"), default=0)
        but = f"; {moved} of {n} from others, as the layer has too few" if moved else ""
        said.append(f"random heads: from the same layers, drawn anew for each needle{but}")
        if n_needles := max(one.n_needles for one in found.without):
            said.append(
                f"heads were taken out on {amount(n_needles, 'needle')}, and chosen on the others alone: "
                "so they may be fewer than have the role by all needles"
            )
    return [*said, "intervals: 95% over needles"]


def what_is_out(one: CopiedWithout) -> str:
    """Such as "18 retrieval heads"."""
    return amount(one.n_heads, f"{one.what} head")


def _by_depth(found: Needles) -> Table:
    at_depth = {(one.length, one.depth): one.copied.value for one in found.at}

    def at(depth: float) -> Callable[[int], str]:
        return lambda length: number(at_depth.get((length, depth), math.nan))

    depths = sorted({one.depth for one in found.at})
    columns = [Column(f"{100 * depth:g}%", at(depth), right=True, style="cyan") for depth in depths]
    lengths = Column("tokens", lambda length: f"{length:,}", right=True)
    return Table([lengths, *columns], sorted({one.length for one in found.at}), goes_on=True)


def _without(found: Needles) -> Table:
    rows = [("nothing", found.copied, None), *((what_is_out(one), one.copied, one.change) for one in found.without)]
    columns = [
        Column("taken out", lambda row: row[0]),
        Column("written", lambda row: number(row[1].value), right=True, style="cyan"),
        Column("95% interval", lambda row: interval(row[1].low, row[1].high), right=True, drop=2),
        Column("less than whole", lambda row: number(row[2].value) if row[2] else "", right=True, style="cyan", drop=1),
        Column("95% interval", lambda row: interval(row[2].low, row[2].high) if row[2] else "", right=True, drop=2),
    ]
    return Table(columns, rows)
