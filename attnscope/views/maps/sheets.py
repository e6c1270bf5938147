"""The list of figures of attention weights: an overview and one a layer, or one of the heads that were picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope.errors import amount

if TYPE_CHECKING:
    from attnscope.questions.maps import HeadMaps

Heads = Sequence[tuple[int, int]]
Form = Literal["overview", "grid", "single", "bars"]


@dataclass(frozen=True)
class Sheet:
    """One figure to draw.

    Attributes:
        stem: Its file name without the ending.
        form: Small maps, larger ones with labels, one head, or bars for one query.
        heads: The heads in it, (layer, head), in reading order.
        map: The number of the record's map that it shows.
        query: The number of the query that it is about; -1 = of none, or in a picture of the mean over all.
        title: Empty = it names the heads.
        marked: Queries whose rows are framed.
        n_layers: Of the model, where only some of them attend so; 0 = all do.
    """

    stem: str
    form: Form
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

    def names(self, attention: HeadMaps) -> list[tuple[str, str]]:
        """Return the names of each head's row and column in an overview; what is no head has a row."""
        names = [(f"L{layer}", attention.head_name(head)) for layer, head in self.heads]
        return [name[::-1] for name in names] if attention.head_names else names

    @property
    def subject(self) -> str:
        """Its heads, in words."""
        layers = self.layers
        if self.form == "overview":
            n_layers = max(len(layers), self.n_layers)
            part = f"{len(layers)} of " if len(layers) < n_layers else ""
            return f"{part}{amount(n_layers, 'layer')}, {amount(len(self.columns), 'head')}"
        if len(self.heads) == 1:
            return f"layer {layers[0]}, head {self.heads[0][1]}"
        return f"layer {layers[0]}" if len(layers) == 1 else amount(len(self.heads), "head")


def sheets_of_heads(
    heads: Heads,
    *,
    picked: bool,
    apart: bool = False,
    number: int = 0,
    query: int = -1,
    before: str = "",
    after: str = "",
) -> list[Sheet]:
    """List the figures of some heads: an overview of several layers and one a layer; of picked ones, or of one, one.

    Args:
        heads: As (layer, head), in reading order.
        picked: Whether they were picked one by one.
        apart: Whether each of those that were picked has a figure of its own.
        number: Which of the record's maps they are of.
        query: The query that the figures are about.
        before: Begins their file names.
        after: Ends their file names.
    """

    def sheet(stem: str, form: Form, some: Heads) -> Sheet:
        return Sheet(f"{before}{stem}{after}", form, tuple(some), number, query)

    if picked or len(heads) == 1:
        groups = [[pair] for pair in heads] if apart else [list(heads)]
        return [
            sheet(f"L{group[0][0]:02d}H{group[0][1]:02d}", "single", group)
            if len(group) == 1
            else sheet("picked", "grid", group)
            for group in groups
        ]
    layers = sorted({layer for layer, _ in heads})
    # The overview of one layer would be the same in small.
    sheets = [sheet("overview", "overview", heads)] if len(layers) > 1 else []
    for layer in layers:
        sheets.append(sheet(f"L{layer:02d}", "grid", [pair for pair in heads if pair[0] == layer]))
    return sheets
