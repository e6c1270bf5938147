"""Measures of heads as figures: a page of them all, and a map of layers x heads for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, Number, colormap, wrap_lines
from attnscope.drawing.inks import hex_of, ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import HeadGrid, Page
from attnscope.errors import amount
from attnscope.records.heads.findings import Findings, Head
from attnscope.report.numbers import UNDEFINED, digits, number, short_interval, small_number
from attnscope.report.wording import corpus_line, corpus_notes, model_of, printable, title_of, unit_of

_ONE_WAY, _TWO_WAYS = "Blues", "RdBu_r"
LEFT_PX = 50  # for the layers' names
TOP_PX = layout.MARGIN_PX + 62
KIND_PX = 54
HEAD_NAMES_PX = 26
_COMPACT_PX = 135  # width of a small map where the page is of paper
_INTERVAL_SHARE = 0.7  # of the size of a number that its interval is at most
_LEAST_INTERVAL_PX = 9.0  # smaller ones are left out
_MOST_LINES = 4  # of what a measure is, above its map
_MANY_LAYERS = 16  # more of them make a page that no screen shows whole
_UNIFORM = "▲ uniform: the value of a head that attends to all keys that the mask allows alike"


@dataclass(frozen=True)
class Scale:
    """How a measure is coloured."""

    low: float  # of the first colour: 0; -high where values are negative; a round number where all are far from 0
    high: float  # of the last colour: the largest of all heads and of uniform attention
    cmap: str
    uniform: tuple[float, float]  # least and largest value under uniform attention; NaN where none is known
    has_values: bool
    write: Callable[[float], str] = number

    def share(self, value: float) -> float:
        """How far along the colours a value is, 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def uniform_text(self) -> str:
        """Such as 0.03, or 0.02 to 0.09 where it depends on the head."""
        low, high = self.write(self.uniform[0]), self.write(self.uniform[1])
        return low if low == high else f"{low} to {high}"

    @property
    def ticks(self) -> tuple[float, ...]:
        """Round numbers on the scale."""
        return layout.ticks_between(self.low, self.high)


def scale_of(findings: Findings, measure: str, write: Callable[[float], str] | None = None) -> Scale:
    """The colours for a measure: the same for all kinds of attention, and wide enough for uniform's value."""
    estimates = [head.measures[measure] for head in findings.heads if measure in head.measures]
    values = [estimate.value for estimate in estimates if math.isfinite(estimate.value)]
    uniform = [estimate.uniform for estimate in estimates if math.isfinite(estimate.uniform)]
    extent = max((abs(value) for value in (*values, *uniform)), default=0.0) or 1.0
    spread = (min(uniform), max(uniform)) if uniform else (math.nan, math.nan)
    if write is None:
        write = small_number if findings.of_senses else number  # one patch of hundreds seldom gets much
    least, low = min((*values, *uniform), default=0.0), 0.0
    if least < 0:
        return Scale(-extent, extent, _TWO_WAYS, spread, bool(values), write)
    if least > extent / 2 and least < extent:
        step = layout.nice_ticks(extent - least)[1]
        low = max(0.0, math.floor(least / step) * step)
    return Scale(low, extent, _ONE_WAY, spread, bool(values), write)


@dataclass(frozen=True)
class Panels:
    """The places of small maps of measures on a page."""

    columns: int  # of maps side by side
    left: int  # room for the layers' names, left of a map
    label_px: float  # size of the letters of these names
    cell: tuple[float, int]  # width and height of a head's cell
    width: int  # of the page
    pitch_x: int  # from one map to the next
    room: int  # width of a map with what stands around it
    meanings: Mapping[str, list[str]]  # of each measure, in lines
    above: int  # from the top of a panel to its map
    below: int  # from the bottom of a map to the next panel
    layers: tuple[int, ...]  # rows of the map of each kind of attention

    def row_px(self, layers: int) -> int:
        """How tall a row of panels is whose maps have a number of layers."""
        return self.above + layers * self.cell[1] + self.below

    def height_px(self, n_rows: int) -> float:
        """How tall a page is without its notes, with a number of rows of panels for each kind of attention."""
        kinds = KIND_PX * len(self.layers) if len(self.layers) > 1 else 0
        return TOP_PX + kinds + n_rows * sum(self.row_px(layers) for layers in self.layers) + 12.0 + layout.MARGIN_PX


def panels_of(findings: Findings, names: Sequence[str], lettering: Lettering) -> Panels:
    """Places a small map of each of these measures."""
    shapes = [grid.shape for grid in grids_of(findings).values()]
    n_heads, n_layers = max(heads for _, heads in shapes), max(layers for layers, _ in shapes)
    paper = lettering.paper
    # A page of many layers is tall and is seen shrunk: fewer and larger names can still be read there.
    (left, label_px) = (36, 11.0) if n_layers <= _MANY_LAYERS or paper.fixed else (48, 15.0)
    gap, least = (16, _COMPACT_PX) if paper.fixed else (30, max(250, left + n_heads * 8))
    columns = max(1, min(len(names), (paper.room_px + gap) // (least + gap)))
    cell_w = paper.whole(min(44.0, ((paper.room_px + gap) // columns - gap - left) / n_heads), 8)
    cell_h = max(8, min(math.floor(cell_w), 32, 420 // n_layers))
    width = paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + left + n_heads * cell_w)
    pitch_x = (width - 2 * layout.MARGIN_PX + gap) // columns
    room = pitch_x - gap
    meanings = {name: [] if paper.fixed else _few_lines(_meaning(findings, name), room, lettering) for name in names}
    above, below = 46 + 16 * max(len(lines) for lines in meanings.values()), 46 if paper.fixed else 76
    layers = tuple(layers for layers, _ in shapes)
    return Panels(columns, left, label_px, (cell_w, cell_h), width, pitch_x, room, meanings, above, below, layers)


def measures_pages(findings: Findings, scales: Mapping[str, Scale], lettering: Lettering) -> Iterator[Page]:
    """Small maps of the measures that are defined for some head, each with its own colours.

    They stand on one page; where its width is fixed, on several of which none is taller than a page of paper.
    """
    undefined = [name for name, scale in scales.items() if not scale.has_values]
    if len(undefined) < len(scales):
        scales = {name: scale for name, scale in scales.items() if scale.has_values}
    title = f"{model_of(findings.run)} · {amount(len(scales), 'measure')} of its heads"
    names, panels = list(scales), panels_of(findings, list(scales), lettering)
    uniform = _UNIFORM.replace("▲ uniform", "lines over a bar") if lettering.paper.fixed else _UNIFORM
    notes = [
        "rows: layers, columns: heads",
        "each map has its own colours: the bar below it tells which",
        *([uniform] if any(math.isfinite(scale.uniform[0]) for scale in scales.values()) else []),
        *corpus_notes(findings),
    ]
    if undefined and len(undefined) < len(scales):
        notes.append(f"left out, as undefined for all heads: {', '.join(printable(name) for name in undefined)}")
    if any(_any_undefined(findings, name) for name in scales):
        notes.append("grey: undefined")
    n_lines = len(wrap_lines(" · ".join(notes), panels.width - 2 * layout.MARGIN_PX, lettering))
    most = lettering.paper.most_px - (n_lines - 1) * layout.LINE_PX
    n_rows = -(-len(names) // panels.columns)
    fitting = max(1, sum(panels.height_px(rows) <= most for rows in range(1, n_rows + 1)))
    n_pages = -(-n_rows // fitting)
    each = -(-n_rows // n_pages) * panels.columns
    for index in range(n_pages):
        part = {name: scales[name] for name in names[index * each : (index + 1) * each]}
        which = f" ({index + 1} of {n_pages})" if n_pages > 1 else ""
        # The notes are of all pages, and stand on the last.
        yield _panels_page(findings, part, panels, lettering, title + which, notes if index == n_pages - 1 else [])


def _panels_page(
    findings: Findings,
    scales: Mapping[str, Scale],
    panels: Panels,
    lettering: Lettering,
    title: str,
    notes: Sequence[str],
) -> Page:
    """One page of small maps."""
    paper, n_rows = lettering.paper, -(-len(scales) // panels.columns)
    page = MeasurePage(panels.width, lettering)
    page.head(title, corpus_line(findings))
    top, size = float(TOP_PX), layout.CAPTION_PX if paper.fixed else layout.PANEL_TITLE_PX
    for kind, grid in grids_of(findings).items():
        if len(findings.kinds) > 1:
            top += KIND_PX
            page.entitle(layout.MARGIN_PX, top - 18, f"{printable(kind, 40)} attention", 17)
        pitch = panels.pitch_x, panels.row_px(len(grid.layers))
        corners = layout.tile(len(scales), panels.columns, (layout.MARGIN_PX, top), pitch)
        for (name, scale), (x, y) in zip(scales.items(), corners, strict=True):
            page.entitle(x, y + 8, lettering.fit(printable(name), size, panels.room * 0.88), size)
            for line_number, line in enumerate(panels.meanings[name]):
                page.write(x, y + 27 + line_number * 16, line, layout.CAPTION_PX, ha="left", color=FAINT)
            corner = (x + panels.left, y + panels.above)
            page.draw_heads(corner, findings, kind, name, panels.cell, scale)
            page.name_axes(corner, grid, panels.cell, size_px=panels.label_px)
            below = corner[1] + len(grid.layers) * panels.cell[1] + 12
            bar = (x + panels.left, below, len(grid.heads) * panels.cell[0], 9)
            page.write_bar(bar, scale, size_px=panels.label_px, most=3)
            page.mark_uniform(bar, scale, size_px=min(panels.label_px, 12.0), room=(x, x + panels.room))
        top += n_rows * pitch[1]
    page.finish(top + 12, notes)
    return page


def measure_page(
    findings: Findings,
    measure: str,
    scale: Scale,
    lettering: Lettering,
    shared: dict[object, MeasurePage] | None = None,
) -> Page:
    """A large map of one measure, with numbers where cells have room for them.

    `shared` holds pages of other measures of the same findings. One with the same notes is used again; a new one is
    added.
    """
    shapes = [grid.shape for grid in grids_of(findings).values()]
    n_heads, n_layers = max(heads for _, heads in shapes), sum(layers for layers, _ in shapes)
    paper = lettering.paper
    room = paper.room_px - LEFT_PX
    cell_w = paper.whole(min(240.0, room / n_heads), 24)
    cell_h = max(24, min(round(cell_w * 0.62), 90, max(24 if paper.fixed else 44, 1000 // n_layers)))
    width = paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + LEFT_PX + n_heads * cell_w)
    tops, bottom = place_kinds(findings, cell_h)
    bar_y = bottom + 30
    size = paper.letters(min(18.0, cell_w * 0.26))
    texts = [scale.write(head.measures[measure].value) for head in findings.heads if measure in head.measures]
    widest = max((lettering.width_px(text, size) for text in texts), default=0.0)
    numbers = cell_w > widest * 1.05 if paper.fixed else cell_w >= 40
    widest = max((lettering.width_px(_interval(head, measure), 1.0) for head in findings.heads), default=0.0)
    small = min(size * _INTERVAL_SHARE, cell_w * 0.94 / widest) if widest else 0.0
    intervals = numbers and cell_h >= 44 and small >= max(_LEAST_INTERVAL_PX, paper.least_px)
    notes = [
        *([_UNIFORM] if math.isfinite(scale.uniform[0]) else []),
        *(["small numbers: the 95% interval"] if intervals else []),
        *(["grey: undefined" + f" ({UNDEFINED})" * numbers] if _any_undefined(findings, measure) else []),
        *corpus_notes(findings),
    ]
    shared = {} if shared is None else shared
    page = shared.get(tuple(notes))
    if page is None:
        page = shared[tuple(notes)] = MeasurePage(width, lettering)
        page.finish(bar_y + 72, notes)
        name_kinds(page, findings, tops, (cell_w, cell_h))
    page.begin()
    meaning = printable(findings.measure_facts(measure).what, 400)
    corpus = corpus_line(findings)
    subtitle = " · ".join(part for part in (meaning, corpus) if part)
    page.head(f"{model_of(findings.run)} · {title_of(findings, measure)}", subtitle)
    corners = {kind: (layout.MARGIN_PX + LEFT_PX, top) for kind, top in zip(findings.kinds, tops, strict=True)}
    for kind, corner in corners.items():
        page.draw_heads(corner, findings, kind, measure, (cell_w, cell_h), scale)
    if numbers:
        page.numbers(numbers_of(findings, measure, scale, corners, (cell_w, cell_h), size, small * intervals))
    bar = (layout.MARGIN_PX + LEFT_PX, bar_y, min(420, room - 20), 14)
    page.write_bar(bar, scale, size_px=layout.CAPTION_PX, most=6 if paper.is_narrow else 11)
    edges = layout.MARGIN_PX, width - layout.MARGIN_PX * paper.fixed
    page.mark_uniform(bar, scale, size_px=layout.CAPTION_PX, room=edges, unit=unit_of(findings, measure))
    return page


def numbers_of(
    findings: Findings,
    measure: str,
    scale: Scale,
    corners: Mapping[str, tuple[float, float]],
    cell: tuple[float, float],
    size: float,
    small: float,
) -> list[Number]:
    """The value of each head, and below it the ends of its interval in letters of size `small`; 0 = none."""
    cmap, grids, numbers = colormap(scale.cmap), grids_of(findings), []
    for head in findings.heads:
        value = head.estimate(measure).value
        left, top = grids[head.kind].corner(head.layer, head.head, corners[head.kind], cell)
        x, y = left + 0.5 * cell[0] - 1, top + 0.5 * cell[1] - 1
        ink = ink_on(hex_of(cmap, scale.share(value))) if math.isfinite(value) else FAINT
        numbers.append(Number(x, y - (cell[1] * 0.14 if small else 0), scale.write(value), size, ink))
        if small and (interval := _interval(head, measure)):
            numbers.append(Number(x, y + cell[1] * 0.22, interval, small, ink))
    return numbers


def _interval(head: Head, measure: str) -> str:
    estimate = head.estimate(measure)
    return short_interval(estimate.low, estimate.high)


def grids_of(findings: Findings) -> dict[str, HeadGrid]:
    """The rows and columns of each kind of attention."""
    return {
        kind: HeadGrid.over((head.layer, head.head) for head in findings.heads if head.kind == kind)
        for kind in findings.kinds
    }


def place_kinds(findings: Findings, cell_px: int) -> tuple[list[int], int]:
    """Upper edges of the heads of each kind of attention, one below the other, and where they end."""
    tops, y = [], TOP_PX
    for grid in grids_of(findings).values():
        y += HEAD_NAMES_PX + (KIND_PX if len(findings.kinds) > 1 else 0)
        tops.append(y)
        y += len(grid.layers) * cell_px
    return tops, y


def name_kinds(
    page: Page, findings: Findings, tops: Sequence[int], cell: tuple[float, float], *, heads: bool = True
) -> None:
    """Names layers and, if `heads`, heads beside them; and the kinds of attention where there are several."""
    for (kind, grid), top in zip(grids_of(findings).items(), tops, strict=True):
        page.name_axes((layout.MARGIN_PX + LEFT_PX, top), grid if heads else HeadGrid(grid.layers, ()), cell)
        if len(findings.kinds) > 1:
            page.entitle(layout.MARGIN_PX, top - 48, f"{printable(kind, 40)} attention", 17)


class MeasurePage(Page):
    """A page with maps of measures on it."""

    def begin(self) -> None:
        """Clears the page of one figure's own parts, and takes all that is drawn from now on for the next one's."""
        self.wipe()
        self.temporary, self.written_numbers = True, ()

    def draw_heads(
        self,
        corner: tuple[float, float],
        findings: Findings,
        kind: str,
        measure: str,
        cell: tuple[float, float],
        scale: Scale,
    ) -> None:
        """Draws coloured cells of the heads, (layer, head); grey where the measure is undefined."""
        values = {(head.layer, head.head): head.estimate(measure).value for head in findings.heads if head.kind == kind}
        self.grid_cells(corner, cell, values, scale.cmap, scale.share)

    def write_bar(self, bar: Box, scale: Scale, *, size_px: float, most: int) -> None:
        """Draws the colour bar with its numbers: up to `most`, else the ends alone."""
        if not scale.has_values:
            return
        ticks = scale.ticks
        if len(ticks) > most:
            ticks = (scale.low, 0.0, scale.high) if scale.low < 0 else (scale.low, scale.high)
        size_px = self.paper.letters(size_px)
        inside = self.paper.fixed and most <= 3  # the ends of a short bar have no room beyond it
        self.draw_scale(bar, scale.cmap, (scale.low, scale.high), ticks={tick: digits(tick) for tick in ticks},
                        size_px=size_px, color=FAINT, inside=inside)  # fmt: skip

    def mark_uniform(
        self, bar: Box, scale: Scale, *, size_px: float, room: tuple[float, float], unit: str = ""
    ) -> None:
        """Draws lines over the bar where uniform attention is, a triangle below them, and its value beside that."""
        x, y, width, height = bar
        unit = f" {unit}" if unit else ""
        if not (scale.has_values and math.isfinite(scale.uniform[0])):
            return
        at = x + width * scale.share(sum(scale.uniform) / 2)
        ends = {x + width * scale.share(value) for value in scale.uniform}
        self.lines([[(end, y - 4), (end, y + height + 3)] for end in sorted(ends)], color=INK, width_px=1.5)
        if self.paper.fixed and width < _COMPACT_PX:
            return
        # The words stand at the side where there is room for them.
        down = y + height + size_px * 2.4
        self.write(at, down, "▲", size_px, ha="center", color=INK)
        for words in (f"uniform {scale.uniform_text}{unit}", f"uniform {scale.uniform_text}"):
            wide = self.lettering.width_px(words, size_px) * 1.04
            if not self.paper.fixed or min(at + size_px + wide - room[1], room[0] + wide - at + size_px) <= 0:
                break  # the page's subtitle tells the unit too
        else:
            return
        if at + size_px + wide <= room[1]:
            self.write(at + size_px * 0.7, down, words, size_px, ha="left", color=INK)
        else:
            self.write(max(at - size_px * 0.7, room[0] + wide), down, words, size_px, ha="right", color=INK)


def _meaning(findings: Findings, measure: str) -> str:
    """The meaning of a measure, and its unit if its name does not tell."""
    what, unit = printable(findings.measure_facts(measure).what, 400), unit_of(findings, measure)
    return f"{what} [{unit}]" if what and unit and unit not in measure else what


def _few_lines(text: str, room: float, lettering: Lettering) -> list[str]:
    """A text on at most a few lines."""
    lines = wrap_lines(printable(text, 400), room, lettering)
    first, rest = lines[: _MOST_LINES - 1], " ".join(lines[_MOST_LINES - 1 :])
    return [lettering.fit(line, layout.CAPTION_PX, room) for line in (*first, *[rest] * bool(rest))]


def _any_undefined(findings: Findings, measure: str) -> bool:
    return any(not math.isfinite(head.estimate(measure).value) for head in findings.heads)
