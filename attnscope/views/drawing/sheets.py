"""Which figures attention weights are drawn as: an overview and one a layer, or one of the heads that were picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attnscope.errors import amount


@dataclass(frozen=True)
class Sheet:
    """One figure to draw.

    Attributes:
        stem: Its file name without the ending.
        form: Small maps without labels ("overview"), larger ones with them ("grid"), one head that was asked for
            ("single"), or bars for one query ("bars").
        heads: The heads on it, as (layer, head), in reading order.
        map: Which map of the record it shows.
        query: Number of the query that it is about; -1 = of none, or in a picture of the mean over all.
        title: What the figure says it shows; empty = which heads.
        marked: Queries whose rows are framed in its maps.
        n_layers: How many layers the model has, where only some of them attend so; 0 = that goes without saying.
    """

    stem: str
    form: Literal["overview", "grid", "single", "bars"]
    heads: tuple[tuple[int, int], ...]
    map: int = 0
    query: int = -1
    title: str = ""
    marked: tuple[int, ...] = ()
    n_layers: int = 0

    @property
    def layers(self) -> list[int]:
        """The layers of its heads."""
        return sorted({layer for layer, _ in self.heads})

    @property
    def columns(self) -> list[int]:
        """The numbers of its heads."""
        return sorted({head for _, head in self.heads})

    @property
    def subject(self) -> str:
        """Which heads it shows, in words."""
        layers = self.layers
        if self.form == "overview":
            shown = f"{len(layers)} of " * (len(layers) < self.n_layers)
            return f"{shown}{amount(self.n_layers if shown else len(layers), 'layer')}, " + amount(
                len(self.columns), "head"
            )
        if len(self.heads) == 1:
            return f"layer {layers[0]}, head {self.heads[0][1]}"
        return f"layer {layers[0]}" if len(layers) == 1 else amount(len(self.heads), "head")


def sheets_of_heads(
    heads: Sequence[tuple[int, int]],
    *,
    picked: bool,
    apart: bool = False,
    number: int = 0,
    query: int = -1,
    before: str = "",
    after: str = "",
) -> list[Sheet]:
    """The figures of some heads: an overview of several layers and a figure a layer; of picked ones, or of one, one.

    Args:
        heads: The heads, as (layer, head), in reading order.
        picked: Whether they were picked one by one.
        apart: Whether each of those that were picked has a figure of its own.
        number: Which map of the record they are of.
        query: Place of the query that the figures are about.
        before: What their names begin with.
        after: What their names end with.
    """
    heads = tuple(heads)
    if picked or len(heads) == 1:
        made = [
            Sheet(f"L{group[0][0]:02d}H{group[0][1]:02d}" if len(group) == 1 else "picked",
                  "single" if len(group) == 1 else "grid", group, number, query)
            for group in ([(pair,) for pair in heads] if apart else [heads])
        ]  # fmt: skip
    else:
        overview = Sheet("overview", "overview", heads, number, query)
        made = [overview] if len(overview.layers) > 1 else []  # of one layer it would be the same in small
        made += [
            Sheet(f"L{layer:02d}", "grid", tuple(pair for pair in heads if pair[0] == layer), number, query)
            for layer in overview.layers
        ]
    return [replace(sheet, stem=f"{before}{sheet.stem}{after}") for sheet in made]
