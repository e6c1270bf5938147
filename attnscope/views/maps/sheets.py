"""The figures of attention weights: an overview and one a layer, or one of the heads that were picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attnscope.errors import amount


@dataclass(frozen=True)
class Sheet:
    """One figure to draw: small maps, larger ones with token labels, one head, or bars for one query."""

    stem: str  # its file name without the ending
    form: Literal["overview", "grid", "single", "bars"]
    heads: tuple[tuple[int, int], ...]  # (layer, head), in reading order
    map: int = 0  # number of the record's map that it shows
    query: int = -1  # number of the query that it is about; -1 = of none, or in a picture of the mean over all
    title: str = ""  # empty = it names the heads
    marked: tuple[int, ...] = ()  # queries whose rows are framed in its maps
    n_layers: int = 0  # of the model, where only some of them attend so; 0 = all do

    @property
    def layers(self) -> list[int]:
        """The layers of its heads."""
        return sorted({layer for layer, _ in self.heads})

    @property
    def columns(self) -> list[int]:
        """The numbers of its heads."""
        return sorted({head for _, head in self.heads})

    @property
    def names(self) -> list[tuple[str, str]]:
        """The names of each head's row and column in an overview."""
        return [(f"L{layer}", f"H{head}") for layer, head in self.heads]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Row and column of each head in an overview."""
        layers, columns = self.layers, self.columns
        return [(layers.index(layer), columns.index(head)) for layer, head in self.heads]

    @property
    def subject(self) -> str:
        """Its heads, in words."""
        layers = self.layers
        if self.form == "overview":
            part = f"{len(layers)} of " * (len(layers) < self.n_layers)
            n_layers = max(len(layers), self.n_layers)
            return f"{part}{amount(n_layers, 'layer')}, {amount(len(self.columns), 'head')}"
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
        heads: As (layer, head), in reading order.
        picked: Whether they were picked one by one.
        apart: Whether each of those that were picked has a figure of its own.
        number: Which of the record's maps they are of.
        query: The query that the figures are about.
        before: Begins their file names.
        after: Ends their file names.
    """
    heads = tuple(heads)
    if picked or len(heads) == 1:
        sheets = [
            Sheet(f"L{group[0][0]:02d}H{group[0][1]:02d}" if len(group) == 1 else "picked",
                  "single" if len(group) == 1 else "grid", group, number, query)
            for group in ([(pair,) for pair in heads] if apart else [heads])
        ]  # fmt: skip
    else:
        overview = Sheet("overview", "overview", heads, number, query)
        sheets = [overview] if len(overview.layers) > 1 else []  # of one layer it would be the same in small
        sheets += [
            Sheet(f"L{layer:02d}", "grid", tuple(pair for pair in heads if pair[0] == layer), number, query)
            for layer in overview.layers
        ]
    return [replace(sheet, stem=f"{before}{sheet.stem}{after}") for sheet in sheets]
