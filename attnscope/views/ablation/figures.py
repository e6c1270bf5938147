"""An ablation as figures: a map of layers x heads for each quantity, and curves; PNG, SVG and PDF files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.ablation import MODE_LABELS, Ablation, Curve
from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.views.ablation.summary import curve_label, label, notes, predicted_line
from attnscope.views.drawing.canvas import INK, Drawing, matplotlib_defaults
from attnscope.views.drawing.head_maps import measure_page, scale_of
from attnscope.views.drawing.layout import Paper
from attnscope.views.drawing.lettering import Lettering, lettering_for
from attnscope.views.drawing.page import Page
from attnscope.views.drawing.plots import Sheet, draw_line, finish_axes, letter_axes, write_foot
from attnscope.views.drawing.style import USUAL, Style
from attnscope.views.tables.numbers import small_number
from attnscope.views.tables.wording import corpus_line, corpus_notes, model_of, printable

_COLORS = {
    "zero effect": "#0072B2", "zero importance": "#D55E00", "zero sensitivity": "#D55E00", "zero random": "#8a8a8a",
    "line explained": "#0072B2", "line unexplained": "#56B4E9", "line random": "#009E73", "pattern random": "#D55E00",
    "uniform random": "#8a8a8a",
    "sink random": "#E69F00", "other random": "#CC79A7",
}  # fmt: skip

_TITLES = {
    "loss": "loss, nats a prediction",
    "l2": "relative change of the last hidden states",
    "faithfulness": "faithfulness: share of the total effect",
}


def pages(ablation: Ablation, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The figures one after the other, each with its file name without the ending.

    `effect-NAME` has a map of each quantity with numbers, the main one first; `curve` what is left of the model with
    fewer and fewer heads.

    Raises:
        AttnscopeError: There are no heads.
    """
    if not ablation.heads:
        raise AttnscopeError("this ablation is of no heads", "so there is nothing to draw")
    lettering = lettering_for(_texts(ablation), style.paper)
    names = sorted(ablation.names, key=lambda name: name != ablation.main)
    for name, page in zip(names, effect_maps(ablation, names, lettering), strict=True):
        # A name from a record must not lead out of the folder.
        stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:80]
        yield f"effect-{stem}", page
    if ablation.curves:
        yield "curve", curve_drawing(ablation, style.paper)


def effect_maps(ablation: Ablation, names: Sequence[str], lettering: Lettering) -> Iterator[Page]:
    """A map of layers x heads for each of these quantities."""
    heads = []
    for head in ablation.heads:
        effects = {
            label(name): Estimate(effect.value, effect.low, effect.high, math.nan, effect.count)
            for name, effect in head.effects.items()
        }
        heads.append(Head(head.kind, head.layer, head.head, roles=(), resting_share=math.nan, measures=effects))
    facts = {label(name): ablation.facts(name) for name in ablation.names}
    measures = {title: {"what": fact.what, "unit": fact.unit} for title, fact in facts.items()}
    findings = Findings(ablation.run, ablation.corpus, {"measures": measures}, tuple(heads), {})
    for title in map(label, names):
        yield measure_page(findings, title, scale_of(findings, title, small_number), lettering)


# -- curves


@dataclass(frozen=True, eq=False)
class Line:
    """One line of the curve figure.

    Attributes:
        name: The mode and order of the curve, in words.
        color: "#rrggbb".
        n_left: How many heads are left at each point.
        values: The value at each point and the edges of the band around it, (point, 3).
    """

    name: str
    color: str
    n_left: tuple[int, ...]
    values: NDArray[np.float64]


def lines_of(ablation: Ablation) -> list[Line]:
    """A line for each order; of several random ones their mean, and the range that they span."""
    quantity = ablation.curves[0].quantity
    by_label: dict[str, list[Curve]] = {}
    for curve in ablation.curves:
        by_label.setdefault(curve_label(curve), []).append(curve)
    lines = []
    for name, (first, *others) in by_label.items():
        values = [[(e.value, e.low, e.high) for e in (point[quantity] for point in c.points)] for c in (first, *others)]
        table = np.array(values, np.float64)  # (curve, point, 3)
        middle = table[:, :, 0]
        if others:
            table = np.stack([middle.mean(0), middle.min(0), middle.max(0)], 1)
        else:
            table = np.where(np.isfinite(table), table, middle[..., None])[0]
        lines.append(Line(name, _COLORS.get(f"{first.mode} {first.order}", INK), tuple(first.n_left), table))
    return lines


@matplotlib_defaults()
def curve_drawing(ablation: Ablation, paper: Paper) -> Drawing:
    """What is left of the model with fewer and fewer heads."""
    lines, lettering = lines_of(ablation), lettering_for(_texts(ablation), paper)
    sheet = Sheet.on(paper, lettering)
    foot = write_foot(_curve_notes(ablation, lines), sheet)
    size, tall = sheet.size, sheet.width * (0.6 if sheet.stacked else 0.4)
    below = (0.75 + 0.22 * len(lines)) * size  # what the axis is, and the names of the lines
    height = sheet.above + 0.4 * size + tall + below + foot.height
    facts = " · ".join(filter(None, (corpus_line(ablation, predictions=True), predicted_line(ablation))))
    subtitle = lettering.fit(facts, 11 * 96 / 72, sheet.width * 92 / size)
    replaced = all(curve.mode in MODE_LABELS for curve in ablation.curves)
    gone, left_over = ("replaced", "heads with their own attention") if replaced else ("taken out", "heads left")
    figure = sheet.open_figure(height, f"{model_of(ablation.run)} · heads {gone} one after another", subtitle)
    left = 0.6 * size / sheet.width
    bottom = (foot.height + below) / height
    axes = figure.add_axes((left, bottom, 0.97 - left, tall / height))
    for line in sorted(lines, key=lambda line: "random" not in line.name):
        draw_line(axes, line.n_left, line.values, line.color, sheet, line.name)
    axes.set_xlim(lines[0].n_left[0], 0)
    quantity = ablation.curves[0].quantity
    if quantity == "l2":
        axes.set_ylim(0, None)
    axes.locator_params(axis="x", integer=True)
    finish_axes(axes, sheet)
    letter_axes(axes, _TITLES[quantity], sheet, across=left_over)
    sheet.add_legend(axes, (-0.01, -0.45 * size / tall))
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _curve_notes(ablation: Ablation, lines: Sequence[Line]) -> list[str]:
    n_random = len({curve.seed for curve in ablation.curves if curve.order == "random"})
    has_band = any((line.values[:, 1] != line.values[:, 2]).any() for line in lines if "random" not in line.name)
    if ablation.curves[0].quantity == "faithfulness":
        how = "each head that goes has values of the corrupt run, beside those that went before"
        return [how, *["band: 95% interval over pairs"] * has_band, *corpus_notes(ablation)]
    return [
        "each head that goes is taken out by zero ablation, beside those that went before"
        if all(curve.mode == "zero" for curve in ablation.curves)
        else "each head that goes has other weights, beside those that went before; values are the model's own",
        *[f"bands of random orders: the range of {n_random}"] * (n_random > 1),
        *["other bands: 95% interval of the change over texts"] * has_band,
        *(note for note in notes(ablation) if not note.startswith(("mean ablation", "changes of hidden"))),
    ]


def _texts(ablation: Ablation) -> list[str]:
    """All texts of a record that a figure may show, to find fonts for."""
    facts = [ablation.facts(name) for name in ablation.names]
    texts = [text for fact in facts for text in (fact.what, fact.unit)] + list(map(label, ablation.names))
    texts += [model_of(ablation.run), corpus_line(ablation, predictions=True), predicted_line(ablation)]
    texts += [*notes(ablation), *ablation.kinds, *map(curve_label, ablation.curves)]
    return [printable(text, 400) for text in texts]
