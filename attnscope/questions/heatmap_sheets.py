"""List the figures of maps, with the heads and titles of each, and draw their pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import INK
from attnscope.drawing.cells import DECADES, log_share
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.maps import MapsPage
from attnscope.drawing.style import Style
from attnscope.errors import amount
from attnscope.questions.maps import HeadMaps, MapsResult
from attnscope.results.tokens import Tokens

Form = Literal["overview", "grid", "single"]
Pair = tuple[int, int]

_SPECIAL, _WRITTEN = "#9a5b00", "#0b6e4f"
_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Sheet:
    """Some heads that are drawn on one figure.

    Attributes:
        stem: Its file name without the ending.
        form: Small maps, larger ones with labels, or one head.
        heads: The heads in it, (layer, head), in reading order.
        subject: These heads, in words.
    """

    stem: str
    form: Form
    heads: tuple[Pair, ...]
    subject: str

    def titles(self, attention: HeadMaps) -> dict[str, Any]:
        """Return the names of its heads as fields of a figure: of rows and columns of an overview, else of each map."""
        if self.form != "overview":
            return {"titles": tuple(attention.name_of(*pair) for pair in self.heads)}
        names = [(f"L{layer}", attention.head_name(head)) for layer, head in self.heads]
        # What is no head has a row.
        return {"names": tuple(name[::-1] for name in names) if attention.head_names else tuple(names)}


@dataclass(frozen=True, eq=False)
class Plate:
    """A figure of maps with its values.

    Attributes:
        stem: Its file name without the ending.
        title: The title of the page.
        figure: What is in it.
        values: The values of each map, (row, column).
        is_logarithmic: Whether colours are.
        top: The value of the darkest colour; None = that of the style.
    """

    stem: str
    title: str
    figure: MapsFigure
    values: Sequence[NDArray[Any]]
    is_logarithmic: bool = False
    top: float | None = None


def draw_plates(plates: Iterable[Plate], style: Style) -> Iterator[tuple[str, MapsPage]]:
    """Draw figures one after the other, each with its stem. They share pages: one is whole until the next is asked for.

    Figures that differ in their values alone share their labels.
    """
    page: MapsPage | None = None
    for plate in plates:
        if style.colours == "log" and not plate.is_logarithmic:
            figure = replace(plate.figure, meaning=f"{plate.figure.meaning} (logarithmic)")
            plate = replace(plate, figure=figure, is_logarithmic=True)
        if page is None or page.content != plate.figure:
            page = MapsPage(plate.figure, style.paper)
        _show(page, plate, style)
        yield plate.stem, page


def _show(page: MapsPage, plate: Plate, style: Style) -> None:
    """Put the values of a figure on its page."""
    values: Sequence[NDArray[Any]] = plate.values
    # The largest value of each map, or of the whole figure.
    tops = style.limits([float(cells[np.isfinite(cells)].max(initial=0.0)) for cells in values])
    if plate.top is not None:
        tops = [plate.top] * len(tops)
    end = tops[0] if style.scale == "figure" or plate.top else 1.0
    # Decades of a logarithmic scale become equal shares of the bar.
    if plate.is_logarithmic:
        ticks = {float(step): f"{end * 10.0 ** (step - DECADES):g}" for step in range(DECADES + 1)}
        shares = [log_share(cells, top) for cells, top in zip(values, tops, strict=True)]
        page.show(plate.title, shares, [(0.0, 1.0)] * len(values), (0.0, DECADES), ticks, values[0])
        return
    ticks = {tick: f"{tick:g}" for tick in layout.nice_ticks(end)}
    page.show(plate.title, values, [(0.0, top) for top in tops], (0.0, end), ticks)


def sheets_of_heads(
    heads: Sequence[Pair], *, picked: bool, apart: bool = False, before: str = "", after: str = "", mean: str = ""
) -> list[Sheet]:
    """List the figures of some heads: an overview of several layers and one a layer; of picked ones, or of one, one.

    Args:
        heads: As (layer, head), in reading order.
        picked: Whether they were picked one by one.
        apart: Whether each of those that were picked has a figure of its own.
        before: Begins their file names.
        after: Ends their file names.
        mean: What the maps are means of, in words: they make one figure. Empty = they are those of heads.
    """
    # A mean is one figure.
    if mean:
        return [Sheet(f"{before}mean{after}", "single" if len(heads) == 1 else "grid", tuple(heads), mean)]
    # One figure per layer, or per head that was picked.
    layers = sorted({layer for layer, _ in heads})
    if picked or len(heads) == 1:
        groups = [[pair] for pair in heads] if apart else [heads]
        stems = ["picked" if len(group) > 1 else f"L{group[0][0]:02d}H{group[0][1]:02d}" for group in groups]
    else:
        groups = [[pair for pair in heads if pair[0] == layer] for layer in layers]
        stems = [f"L{layer:02d}" for layer in layers]
    sheets = []
    if len(layers) > 1 and not picked:  # the overview of one layer would be the same in small
        subject = f"{amount(len(layers), 'layer')}, {amount(len({head for _, head in heads}), 'head')}"
        sheets.append(Sheet(f"{before}overview{after}", "overview", tuple(heads), subject))
    # The subject of each figure: its layer or its number of heads.
    for stem, group in zip(stems, groups, strict=True):
        of_one_layer = len({layer for layer, _ in group}) == 1
        subject = f"layer {group[0][0]}" if of_one_layer else amount(len(group), "head")
        if len(group) == 1:
            subject += f", head {group[0][1]}"
        form: Form = "single" if len(group) == 1 else "grid"
        sheets.append(Sheet(f"{before}{stem}{after}", form, tuple(group), subject))
    return sheets


def model_name(record: MapsResult[Any]) -> str:
    """Return the name of the model, with which titles begin."""
    return str(record.run.get("model", "model"))


def quote(*parts: str, joint: str = "") -> str:
    """Return texts in quotes on one line."""
    # Measuring a book for the one line that it gets would take seconds.
    text = f"”  {joint}  “".join(" ".join(part[:_LONGEST_TEXT].split()) for part in parts)
    return f"“{text}”"


def note_shared(attention: HeadMaps) -> list[str]:
    """Return a note where query heads share key/value heads."""
    if attention.n_kv_heads == attention.n_heads:
        return []
    shared = amount(attention.n_kv_heads, "key/value head")
    return [f"{attention.n_heads} query heads share {shared} (kv); heads with the same kv read the same keys"]


def axis_of(tokens: Tokens, marked: Sequence[int] = ()) -> Axis:
    """Return the labels of tokens, and lines where the second text or what the model wrote begins."""
    seams = (np.flatnonzero(np.diff(tokens.segments)) + 1).tolist()
    if 0 < tokens.n_given < len(tokens):
        seams.append(tokens.n_given)
    colors = [_SPECIAL if special else INK for special in tokens.special.tolist()]
    if tokens.n_given >= 0:
        colors[tokens.n_given :] = [_WRITTEN] * (len(tokens) - tokens.n_given)
    return Axis(tokens.labels, tuple(colors), tuple(seams), tuple(marked))
