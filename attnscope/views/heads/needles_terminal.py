"""What a model finds in long texts, whole and without some of its heads, in the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.ablation import Effect
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.needles import CopiedWithout, Needles
from attnscope.views.heads.summary import interval, number
from attnscope.views.tables.plain_text import dim_lines, plain_table


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
    depths = sorted({one.depth for one in found.at})
    lengths = sorted({one.length for one in found.at})
    table = plain_table(space=2)
    table.add_column("tokens", justify="right", no_wrap=True)
    for depth in depths:
        table.add_column(f"{100 * depth:g}%", justify="right", no_wrap=True)
    at_depth = {(one.length, one.depth): one.copied.value for one in found.at}
    for length in lengths:
        cells = [number(at_depth.get((length, depth), float("nan"))) for depth in depths]
        table.add_row(f"{length:,}", *(Text(cell, style="cyan") for cell in cells))
    return table


def _without(found: Needles) -> Table:
    table = plain_table(space=2)
    for title in ("taken out", "written", "95% interval", "less than whole", "95% interval"):
        table.add_column(title, justify="left" if title == "taken out" else "right", no_wrap=True)
    table.add_row("nothing", *_cells(found.copied), "", "")
    for one in found.without:
        table.add_row(what_is_out(one), *_cells(one.copied), *_cells(one.change))
    return table


def _cells(one: Effect) -> tuple[Text, Text]:
    return Text(number(one.value), style="cyan"), Text(interval(one.low, one.high))
