"""An ablation as figures: a map of layers x heads for each quantity, and curves; PNG, SVG and PDF files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Ablation, Curve, Effect
from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.views.ablation.summary import curve_label, label, notes, predicted_line
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK, LINE, Box, Page, wrap_lines
from attnscope.views.drawing.head_maps import measure_page, scale_of
from attnscope.views.drawing.layout import SCREEN, Paper
from attnscope.views.drawing.lettering import Lettering, lettering_for
from attnscope.views.drawing.style import USUAL, Style
from attnscope.views.tables.numbers import small_number
from attnscope.views.tables.wording import corpus_line, model_of, printable

_COLORS = {
    "zero effect": "#0072B2", "zero importance": "#D55E00", "zero sensitivity": "#D55E00", "zero random": "#8a8a8a",
    "line explained": "#0072B2", "line unexplained": "#56B4E9", "line random": "#009E73", "uniform random": "#8a8a8a",
    "sink random": "#E69F00", "other random": "#CC79A7",
}  # fmt: skip
_DRAWN = {
    "loss": "loss, nats a prediction",
    "l2": "relative change of the last hidden states",
    "faithfulness": "faithfulness: share of the total effect",
}
_WIDTH_PX, _HEIGHT_PX, _NAME_PX = 1600, 900, 22
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BELOW_PX = 110, 330, 96, 86


def pages(found: Ablation, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    `effect-NAME` has a map of each quantity with numbers, the main one first; `curve` what is left of the model with
    fewer and fewer heads.

    Raises:
        AttnscopeError: There are no heads.
    """
    if not found.heads:
        raise AttnscopeError("this ablation is of no heads", "so there is nothing to draw")
    lettering = lettering_for(_texts(found), style.paper)
    maps = as_findings(found)
    names = sorted(found.names, key=lambda name: name != found.main)
    for name in names:
        # A name from a record must not lead out of the folder.
        stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:80]
        title = label(name)
        yield f"effect-{stem}", measure_page(maps, title, scale_of(maps, title, small_number), lettering)
    if found.curves:
        yield "curve", curve_page(found, lettering)


def as_findings(found: Ablation) -> Findings:
    """The effects in the form in which measures of heads are drawn, by their labels."""
    heads = tuple(
        Head(
            head.kind,
            head.layer,
            head.head,
            roles=(),
            resting_share=math.nan,
            measures={
                label(name): Estimate(one.value, one.low, one.high, math.nan, one.count)
                for name, one in head.effects.items()
            },
        )
        for head in found.heads
    )
    facts = {name: found.facts(name) for name in found.names}
    measures = {label(name): {"what": one.what, "unit": one.unit} for name, one in facts.items()}
    return Findings(found.run, found.corpus, {"measures": measures}, heads, {})


# -- curves


@dataclass(frozen=True)
class Line:
    """One line of the curve figure.

    Attributes:
        name: What it is of, in words.
        color: "#rrggbb".
        points: (heads out, value).
        low: The lower edge of the band around it.
        high: The upper edge.
    """

    name: str
    color: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Plot:
    """Where everything stands on the curve figure.

    Attributes:
        box: The frame: x, y, width, height.
        lines: The lines, in numbers.
        x_ticks: Numbers of heads left.
        y_ticks: Values.
        n_heads: How many heads there are.
        low: The value at the foot of the frame.
        high: The value at its top.
        what: What is drawn upwards.
    """

    box: Box
    lines: tuple[Line, ...]
    x_ticks: tuple[int, ...]
    y_ticks: tuple[float, ...]
    n_heads: int
    low: float
    high: float
    what: str

    def at(self, out: float, value: float) -> tuple[float, float]:
        """Where a point is on the page: heads out go to the right, values up."""
        x, y, width, height = self.box
        share = (value - self.low) / (self.high - self.low)
        return x + width * out / self.n_heads, y + height * (1 - min(1.0, max(0.0, share)))


def plot_of(found: Ablation, paper: Paper = SCREEN) -> Plot:
    """Places the curves of a record."""
    name = found.curves[0].quantity
    n_heads = found.curves[0].n_left[0]
    by_label: dict[str, list[Curve]] = {}
    for curve in found.curves:
        by_label.setdefault(curve_label(curve), []).append(curve)
    lines = tuple(_line(label, curves, name, n_heads) for label, curves in by_label.items())
    values = [value for line in lines for value in (*line.low, *line.high, *(y for _, y in line.points))]
    values = [value for value in values if math.isfinite(value)] or [0.0]
    high, low = max(values), 0.0 if name == "l2" else min(values)
    step = layout.nice_ticks((high - low) or 1.0)[1]
    low = math.floor(low / step) * step
    y_ticks = tuple(round(low + n * step, 12) for n in range(math.ceil((high - low) / step) + 1))
    x_step = max(1, round(layout.nice_ticks(float(n_heads))[1]))
    round_ones = [left for left in range(0, n_heads, x_step) if n_heads - left >= x_step / 3]
    x_ticks = (n_heads, *reversed(round_ones))
    if paper.fixed:  # the lines are named below
        height = round(paper.room_px * (0.75 if paper.is_narrow else 0.5))
        box = (layout.MARGIN_PX + 56, _TOP_PX + 34, paper.room_px - 56 - 8, height)
    else:
        box = (_LEFT_PX, _TOP_PX + 34, _WIDTH_PX - _LEFT_PX - _RIGHT_PX, _HEIGHT_PX - _TOP_PX - _BELOW_PX - 110)
    return Plot(
        box=box,
        lines=lines,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        n_heads=n_heads,
        low=low,
        high=max(y_ticks[-1], low + step),
        what=_DRAWN[name],
    )  # fmt: skip


def _line(label: str, curves: Sequence[Curve], name: str, n_heads: int) -> Line:
    """The line of an order; of several random ones their mean, and the range that they span."""
    outs = [n_heads - left for left in curves[0].n_left]
    columns: list[list[Effect]] = [[curve.points[place][name] for curve in curves] for place in range(len(outs))]
    means = [sum(one.value for one in column) / len(column) for column in columns]
    if len(curves) > 1:
        low, high = ([edge(one.value for one in column) for column in columns] for edge in (min, max))
    else:
        low = [_finite_or(column[0].low, column[0].value) for column in columns]
        high = [_finite_or(column[0].high, column[0].value) for column in columns]
    return Line(
        label,
        _COLORS.get(f"{curves[0].mode} {curves[0].order}", INK),
        tuple(zip(map(float, outs), means, strict=True)),
        tuple(low),
        tuple(high),
    )


def curve_page(found: Ablation, lettering: Lettering) -> Page:
    """What is left of the model with fewer and fewer heads."""
    paper = lettering.paper
    plot = plot_of(found, paper)
    n_random = len({curve.seed for curve in found.curves if curve.order == "random"})
    said = [
        "each head that goes is taken out by zero ablation, beside those that went before"
        if all(curve.mode == "zero" for curve in found.curves)
        else "each head that goes has other weights, beside those that went before; values are the model's own",
        f"bands of random orders: the range of {n_random}" if n_random > 1 else "",
        "other bands: 95% interval of the change over texts" if _any_band(plot) else "",
        *(note for note in notes(found) if not note.startswith(("mean ablation", "changes of hidden"))),
    ]
    footer = wrap_lines(" · ".join(part for part in said if part), paper.room_px, lettering)
    bottom = _HEIGHT_PX
    if paper.fixed:
        bottom = math.ceil(plot.box[1] + plot.box[3]) + 72 + len(plot.lines) * _NAME_PX + 60
    page = Page(paper.width_for(_WIDTH_PX), bottom + layout.LINE_PX * (len(footer) - 1), lettering)
    subtitle = " · ".join(part for part in (corpus_line(found, predictions=True), predicted_line(found)) if part)
    page.head(f"{model_of(found.run)} · heads taken out one after another", subtitle)
    _draw_frame(page, plot)
    for line in sorted(plot.lines, key=lambda line: "random" not in line.name):
        _draw_band(page, plot, line)
    for line in plot.lines:
        page.lines([[plot.at(*point) for point in line.points]], color=line.color, width_px=2.6, zorder=3)
    _draw_names(page, plot)
    page.foot(bottom - 46, footer)
    return page


def _draw_frame(page: Page, plot: Plot) -> None:
    x, y, width, height = plot.box
    for tick in plot.y_ticks:
        at = plot.at(0, tick)[1]
        page.lines([[(x, at), (x + width, at)]], color="#ececec", width_px=1)
        page.write(x - 12, at, f"{tick:g}".replace("-", "−"), layout.PANEL_TITLE_PX, ha="right", color=FAINT)
    page.lines([[(x, y + height), (x + width, y + height)]], color=LINE, width_px=1.2)
    for left in plot.x_ticks:
        at = plot.at(plot.n_heads - left, 0)[0]
        page.lines([[(at, y + height), (at, y + height + 6)]], color=LINE, width_px=1.2)
        page.write(at, y + height + 20, f"{left}", layout.PANEL_TITLE_PX, ha="center", color=FAINT)
    page.write(x + width / 2, y + height + 48, "heads left", layout.PANEL_TITLE_PX, ha="center")
    page.write(layout.MARGIN_PX if page.paper.fixed else x - 70, y - 26, plot.what, layout.PANEL_TITLE_PX, ha="left")


def _draw_band(page: Page, plot: Plot, line: Line) -> None:
    from matplotlib.collections import PolyCollection

    outs = [out for out, _ in line.points]
    if all(low == high for low, high in zip(line.low, line.high, strict=True)):
        return
    upper = [plot.at(*point) for point in zip(outs, line.high, strict=True)]
    lower = [plot.at(*point) for point in zip(outs, line.low, strict=True)]
    placed = PolyCollection([[*upper, *reversed(lower)]], facecolors=line.color, edgecolors="none", alpha=0.16)
    page.axes.add_collection(placed, autolim=False)


def _draw_names(page: Page, plot: Plot) -> None:
    """A key beside the frame, in the order in which the lines stand at their middle."""
    fixed = page.paper.fixed
    x = layout.MARGIN_PX if fixed else plot.box[0] + plot.box[2] + 34
    top, pitch = (plot.box[1] + plot.box[3] + 76, _NAME_PX) if fixed else (plot.box[1] + 24, 44)
    room = page.paper.room_px - 44 if fixed else _RIGHT_PX - 34 - 44 - layout.MARGIN_PX
    ordered = sorted(plot.lines, key=lambda line: -line.points[len(line.points) // 2][1])
    for place, line in enumerate(ordered):
        y = top + place * pitch
        page.lines([[(x, y), (x + 30, y)]], color=line.color, width_px=3.2)
        name = page.lettering.fit(line.name, layout.PANEL_TITLE_PX, room)
        page.write(x + 42, y, name, layout.PANEL_TITLE_PX, ha="left")


def _any_band(plot: Plot) -> bool:
    return any(line.low != line.high for line in plot.lines if "random" not in line.name)


def _finite_or(value: float, other: float) -> float:
    return value if math.isfinite(value) else other


def _texts(found: Ablation) -> list[str]:
    """All texts of a record that a figure may show, to find fonts for."""
    labels = [text for name in found.names for text in (label(name), found.facts(name).what, found.facts(name).unit)]
    said = [
        found.run.get("model", ""),
        corpus_line(found, predictions=True),
        predicted_line(found),
        *notes(found),
        *found.kinds,
    ]
    orders = [curve_label(curve) for curve in found.curves]
    return [printable(text, 400) for text in (*labels, *said, *orders)]
