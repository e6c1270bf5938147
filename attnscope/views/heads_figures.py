"""Findings as figures: the role atlas, a page of all measures, and a map for each; PNG, SVG and PDF files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.errors import AttnscopeError
from attnscope.records.findings import Findings, Head
from attnscope.views import heads_summary, layout
from attnscope.views.ablation_summary import number as small_number
from attnscope.views.canvas import (
    FAINT,
    INK,
    Box,
    Fashion,
    Number,
    Page,
    hex_of,
    wrapped_lines,
    write_pages,
)
from attnscope.views.heads_summary import Mark, label, number, printable
from attnscope.views.inks import ink_on
from attnscope.views.lettering import Lettering, lettering_for

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

_EMPTY, _UNKNOWN = "#f3f3f3", "#dcdcdc"
_TRACK, _RESTING = "#ffffff", "#4d4d4d"
_ONE_WAY, _TWO_WAYS = "Blues", "RdBu_r"
_LEFT_PX = 50  # for the layers' names
_TOP_PX = layout.MARGIN_PX + 62
_KIND_PX = 54
_HEAD_NAMES_PX = 26
_FOOTER_GAP_PX = 26
_MANY_LAYERS = 16  # more of them make a page that no screen shows whole
_UNIFORM = "▲ uniform: the value of a head that attends to all keys that the mask allows alike"


def draw(findings: Findings, folder: str | Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draws findings into a folder, each file whole or not at all; the same findings give the same bytes.

    `roles` is the atlas: layers x heads, each cell in the colour of the head's strongest role (not of pictures, which
    give no roles). `measures` has a small map of each measure, `measure-NAME` a large one with numbers.

    Raises:
        AttnscopeError: An unknown format; no heads; the folder cannot be written.
    """
    if not findings.heads:
        raise AttnscopeError("these findings are about no heads", "so there is nothing to draw")
    return write_pages(pages(findings), folder, formats)


def pages(findings: Findings) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    Maps of measures share a canvas: each figure is whole until the next one is asked for.
    """
    lettering = lettering_for(_texts(findings))
    shared: dict[object, _Page] = {}
    if not findings.of_senses:
        yield "roles", atlas_page(findings, lettering)
    scales = {name: scale_of(findings, name) for name in findings.measure_names}
    if scales:
        yield "measures", measures_page(findings, scales, lettering)
    stems: set[str] = set()
    for name, scale in scales.items():
        # A name from a record must not lead out of the folder, nor to the file of another measure.
        stem = plain = "measure-" + (re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:80] or "unnamed")
        again = 2
        while stem.lower() in stems:
            stem, again = f"{plain}-{again}", again + 1
        stems.add(stem.lower())
        yield stem, measure_page(findings, name, scale, lettering, scale.written, shared)


# -- the role atlas


@dataclass(frozen=True)
class Cell:
    """What stands in a cell of the atlas.

    Attributes:
        box: Where it is.
        fill: Its colour.
        ink: Colour of what is written in it.
        glyph: The strongest role's letter, `·` without a role.
        value: The value that the role rests on; empty without a role.
        active: Whether the value speaks of the part that does not rest alone.
        further: Letter and mark of the other roles, as many as fit; a last one of "+" and None for more.
        resting: The share of attention that rests; NaN if it is not known.
    """

    box: Box
    fill: str
    ink: str
    glyph: str
    value: str
    active: bool
    further: tuple[tuple[str, Mark | None], ...]
    resting: float


@dataclass(frozen=True)
class Entry:
    """A role in the legend: its mark, its name, how many heads, and lines on what it is and needs."""

    mark: Mark
    name: str
    heads: str
    lines: tuple[str, ...]

    @property
    def height_px(self) -> float:
        """How tall it is."""
        return 24 + layout.LINE_PX * len(self.lines) + 14


@dataclass(frozen=True)
class Atlas:
    """Where everything stands on the atlas.

    Attributes:
        size: Width and height of the page.
        cell: Width and height of a cell, with the gap to the next.
        cells: The cell of each head, in the order of the record.
        tops: Upper edge of the cells of each kind.
        legend: Upper left corner of each entry, and the entry.
        footer_y: Middle of the first line of notes.
        footer: The notes, broken into lines.
    """

    size: tuple[int, int]
    cell: tuple[int, int]
    cells: tuple[Cell, ...]
    tops: tuple[int, ...]
    legend: tuple[tuple[float, float, Entry], ...]
    footer_y: int
    footer: tuple[str, ...]


def atlas_layout(findings: Findings, lettering: Lettering) -> Atlas:
    """Places the atlas, with the legend beside the cells or below, whichever makes the smaller page."""
    shapes = [findings_shape(findings, kind) for kind in findings.kinds]
    several = len(shapes) > 1
    n_heads, n_layers = max(heads for _, heads in shapes), sum(layers for layers, _ in shapes)
    around = len(shapes) * (_HEAD_NAMES_PX + (_KIND_PX if several else 0))
    room = layout.MIN_WIDTH_PX - 2 * layout.MARGIN_PX - _LEFT_PX
    marks = heads_summary.marks_of(findings)
    choices = []
    for beside in (False, True):
        legend_px, gap = (470, 44) if beside else (0, 0)
        cell_w = max(40, min(210, (room - legend_px - gap) // n_heads))
        cell_h = max(36, min(100, round(cell_w * 0.7), 1500 // n_layers))
        width = max(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + _LEFT_PX + n_heads * cell_w + gap + legend_px)
        bottom = _TOP_PX + around + n_layers * cell_h
        left = layout.MARGIN_PX + (_LEFT_PX + n_heads * cell_w + gap if beside else 0)
        top = _TOP_PX + (_HEAD_NAMES_PX if beside else 0) if beside else bottom + 34
        columns = 1 if beside else max(1, (width - 2 * layout.MARGIN_PX) // 480)
        legend = _legend(findings, marks, (left, top, width - layout.MARGIN_PX - left), columns, lettering)
        lowest = max((y + entry.height_px for _, y, entry in legend), default=0.0)
        if beside:
            # Cells may grow as tall as the legend is, but stay broader than tall.
            cell_h = max(cell_h, min(round(cell_w * 0.95), 100, int(lowest - _TOP_PX - around) // n_layers))
            bottom = _TOP_PX + around + n_layers * cell_h
        low = max(bottom, lowest)
        choices.append((width * low, beside, (cell_w, cell_h), width, low, legend))
    _, _, cell, width, low, legend = min(choices, key=lambda choice: choice[:2])
    tops, at = [], _TOP_PX
    for layers, _ in shapes:
        at += _HEAD_NAMES_PX + (_KIND_PX if several else 0)
        tops.append(at)
        at += layers * cell[1]
    cells = tuple(
        _cell(head, tops[findings.kinds.index(head.kind)], cell, marks) for head in findings.heads
    )  # fmt: skip
    footer = wrapped_lines(" · ".join(_atlas_notes(findings)), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = math.ceil(low) + _FOOTER_GAP_PX
    height = footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX
    return Atlas((width, height), cell, cells, tuple(tops), tuple(legend), footer_y, footer)


def atlas_page(findings: Findings, lettering: Lettering) -> Page:
    """The atlas, drawn."""
    atlas = atlas_layout(findings, lettering)
    n_heads = len(findings.heads)
    page = Page(*atlas.size, lettering)
    page.head(f"{_model(findings)} · what its {n_heads} heads do", heads_summary.corpus_line(findings))
    for kind, top in zip(findings.kinds, atlas.tops, strict=True):
        page.sides((layout.MARGIN_PX + _LEFT_PX, top), findings_shape(findings, kind), atlas.cell)
        if len(findings.kinds) > 1:
            page.write(layout.MARGIN_PX, top - 48, f"{_kind(kind)} attention", 17, ha="left", weight="bold")
    _draw_cells(page, atlas.cells)
    for x, y, entry in atlas.legend:
        _draw_entry(page, x, y, entry)
    page.foot(atlas.footer_y, atlas.footer)
    return page


def _cell(head: Head, top: int, size: tuple[int, int], marks: Mapping[str, Mark]) -> Cell:
    width, height = size[0] - 3, size[1] - 3
    box = (layout.MARGIN_PX + _LEFT_PX + head.head * size[0], top + head.layer * size[1], width, height)
    if not head.roles:
        return Cell(box, _EMPTY, FAINT, heads_summary.UNCLASSIFIED, "", False, (), head.resting_share)
    strongest, *others = head.roles
    mark = marks[strongest.name]
    fill = _pale(mark.color) if strongest.tentative else mark.color
    fits = max(1, int((width * 0.93 - _glyph_px(box) * 1.1) / (_further_px(box) + 2)))
    further: list[tuple[str, Mark | None]] = [(marks[role.name].letter(role), marks[role.name]) for role in others]
    if len(further) > fits:
        further = [*further[: fits - 1], ("+", None)]
    return Cell(
        box=box,
        fill=fill,
        ink=ink_on(fill),
        glyph=mark.letter(strongest),
        value=number(strongest.value),
        active=strongest.active_share is not None,
        further=tuple(further),
        resting=head.resting_share,
    )


def _glyph_px(box: Box) -> float:
    return min(box[3] * 0.32, 26.0)


def _further_px(box: Box) -> float:
    return min(box[3] * 0.26, box[2] * 0.16, 18.0)


def _draw_cells(page: Page, cells: Sequence[Cell]) -> None:
    page.fill([cell.box for cell in cells], [cell.fill for cell in cells])
    squares: list[tuple[Box, str]] = []
    tracks: list[Box] = []
    bars: list[Box] = []
    numbers: list[Number] = []
    for cell in cells:
        x, y, width, height = cell.box
        pad, glyph_px, small = width * 0.07, _glyph_px(cell.box), _further_px(cell.box)
        if not cell.value:
            numbers.append(Number(x + width / 2, y + height * 0.42, cell.glyph, glyph_px * 1.4, cell.ink))
        else:
            left = x + pad + glyph_px * 0.39
            numbers.append(Number(left, y + height * 0.25, cell.glyph, glyph_px, cell.ink, "bold"))
            size = min(height * 0.27, width * 0.27, 19.0)
            fashion: Fashion = "italic" if cell.active else "plain"
            numbers.append(Number(x + width / 2, y + height * 0.6, cell.value, size, cell.ink, fashion))
        for place, (letter, mark) in enumerate(reversed(cell.further)):
            left, upper = x + width - pad - small - place * (small + 2), y + height * 0.25 - small / 2
            color = mark.color if mark else "#ffffff"
            squares.append(((left, upper, small, small), color))
            numbers.append(Number(left + small / 2, upper + small / 2, letter, small * 0.72, ink_on(color)))
        if math.isfinite(cell.resting):
            track = (x + pad, y + height * 0.84, width - 2 * pad, max(3.0, height * 0.07))
            tracks.append(track)
            bars.append((*track[:2], track[2] * min(1.0, max(0.0, cell.resting)), track[3]))
    page.numbers(numbers)
    page.fill(tracks, [_TRACK] * len(tracks))
    page.fill(bars, [_RESTING] * len(bars))
    page.outline(tracks, _RESTING, 0.7)
    page.fill([box for box, _ in squares], [color for _, color in squares], edge="#ffffff")


def _legend(
    findings: Findings,
    marks: Mapping[str, Mark],
    place: tuple[float, float, float],
    columns: int,
    lettering: Lettering,
) -> list[tuple[float, float, Entry]]:
    """The roles that occur, down one column and then the next: x, y and what stands there."""
    left, top, width = place
    wide = width / columns
    entries = [
        _entry(findings, count, marks[count.role], wide - 70, lettering)
        for count in heads_summary.counts(findings, marks)
    ]
    if n_none := len(heads_summary.unclassified(findings.heads)):
        nothing = Mark(heads_summary.UNCLASSIFIED, _EMPTY)
        entries.append(Entry(nothing, "unclassified", _heads(n_none), ("no role passed its test",)))
    per_column = -(-len(entries) // columns)
    placed = []
    for first in range(0, len(entries), per_column):
        column = entries[first : first + per_column]
        downs = accumulate((entry.height_px for entry in column[:-1]), initial=top)
        placed += [(left + first // per_column * wide, down, entry) for down, entry in zip(downs, column, strict=True)]
    return placed


def _entry(findings: Findings, count: heads_summary.Count, mark: Mark, room: float, lettering: Lettering) -> Entry:
    facts = findings.role_facts(count.role)
    lines = wrapped_lines(printable(facts.what, 400), room, lettering) if facts.what else ()
    needs = f"{printable(facts.measure)} ≥ {number(facts.threshold)}" if math.isfinite(facts.threshold) else ""
    heads = _heads(count.n_heads)
    if count.n_strongest < count.n_heads:
        heads += f", first in {count.n_strongest}" if count.n_strongest else ", never first"
    name = lettering.fit(label(count.role), layout.PANEL_TITLE_PX, room * 0.55)
    lines = (*lines, *([lettering.fit(needs, layout.CAPTION_PX, room)] if needs else []))
    return Entry(mark, name, heads, lines)


def _draw_entry(page: Page, x: float, y: float, entry: Entry) -> None:
    page.fill([(x, y, 32, 26)], [entry.mark.color])
    page.write(x + 16, y + 13, entry.mark.glyph, 15, ha="center", weight="bold", color=ink_on(entry.mark.color))
    page.write(x + 44, y + 11, entry.name, layout.PANEL_TITLE_PX, ha="left", weight="bold")
    bold = 1.12 * page.lettering.width_px(entry.name, layout.PANEL_TITLE_PX)
    page.write(x + 44 + bold + 12, y + 11.5, entry.heads, layout.CAPTION_PX, ha="left", color=FAINT)
    for line_number, line in enumerate(entry.lines):
        down = y + 24 + (line_number + 0.5) * layout.LINE_PX
        page.write(x + 44, down, line, layout.CAPTION_PX, ha="left")


def _atlas_notes(findings: Findings) -> list[str]:
    said = ["letter and colour: a head's strongest role, a sink's only where there is no other"]
    roles = [role for head in findings.heads for role in head.roles]
    if roles:
        said.append("number: the value of the measure that the role rests on")
    if any(head.roles and head.roles[0].active_share is not None for head in findings.heads):
        said.append("in italics: that of the attention that does not rest")
    if any(len(head.roles) > 1 for head in findings.heads):
        said.append("small squares: its other roles")
    if any(math.isfinite(head.resting_share) for head in findings.heads):
        said.append("bar: the share of attention that rests on special tokens and the first token")
    if roles and not all(role.tentative for role in roles) and isinstance(findings.options.get("level"), float):
        said.append(
            f"a role is given where its value is above threshold and baseline at a false discovery rate of "
            f"{findings.options['level']:g}"
        )
    return [*said, *heads_summary.role_notes(findings), *heads_summary.corpus_notes(findings)]


# -- measures


@dataclass(frozen=True)
class Scale:
    """How a measure is coloured.

    Attributes:
        low: The value of the first colour: 0, minus `high` where values are negative, or a round number below all
            values where those are all far from 0.
        high: The value of the last colour: the largest of all heads and of uniform attention.
        cmap: Name of the colormap.
        uniform: Least and largest value under uniform attention; NaN where none is known.
        known: Whether any value is defined; else there is nothing to scale.
        written: How a number is written.
    """

    low: float
    high: float
    cmap: str
    uniform: tuple[float, float]
    known: bool
    written: Callable[[float], str] = number

    def share(self, value: float) -> float:
        """How far along the colours a value is, 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def uniform_text(self) -> str:
        """Such as 0.03, or 0.02 to 0.09 where it depends on the head."""
        low, high = self.written(self.uniform[0]), self.written(self.uniform[1])
        return low if low == high else f"{low} to {high}"

    @property
    def ticks(self) -> tuple[float, ...]:
        """Round numbers on the scale."""
        steps = layout.nice_ticks(self.high - max(self.low, 0.0))
        if self.low < 0:
            return (*(-tick for tick in reversed(steps[1:])), *steps)
        first = math.ceil(self.low / steps[1] - 1e-9) * steps[1]
        return tuple(round(first + step, 12) for step in steps if first + step <= self.high * 1.0001)


def scale_of(findings: Findings, measure: str) -> Scale:
    """The colours for a measure: the same for all kinds of attention, and wide enough for uniform's value."""
    estimates = [head.measures[measure] for head in findings.heads if measure in head.measures]
    values = [one.value for one in estimates if math.isfinite(one.value)]
    uniform = [one.uniform for one in estimates if math.isfinite(one.uniform)]
    extent = max((abs(value) for value in (*values, *uniform)), default=0.0) or 1.0
    spread = (min(uniform), max(uniform)) if uniform else (math.nan, math.nan)
    written = small_number if findings.of_senses else number  # one patch of hundreds seldom gets much
    if min((*values, *uniform), default=0.0) < 0:
        return Scale(-extent, extent, _TWO_WAYS, spread, bool(values), written)
    least, low = min((*values, *uniform), default=0.0), 0.0
    if least > extent / 2 and least < extent:
        step = layout.nice_ticks(extent - least)[1]
        low = max(0.0, math.floor(least / step) * step)
    return Scale(low, extent, _ONE_WAY, spread, bool(values), written)


def measures_page(findings: Findings, scales: Mapping[str, Scale], lettering: Lettering) -> Page:
    """A small map of each measure that is defined for some head, each with its own colours."""
    undefined = [name for name, scale in scales.items() if not scale.known]
    if len(undefined) < len(scales):
        scales = {name: scale for name, scale in scales.items() if scale.known}
    shapes = [findings_shape(findings, kind) for kind in findings.kinds]
    n_heads, n_layers = max(heads for _, heads in shapes), max(layers for layers, _ in shapes)
    # A page of many layers is tall and is seen shrunk: fewer and larger names can still be read there.
    (left, label_px) = (36, 11.0) if n_layers <= _MANY_LAYERS else (48, 15.0)
    gap = 30
    inside = layout.MIN_WIDTH_PX - 2 * layout.MARGIN_PX
    columns = max(1, min(len(scales), (inside + gap) // (max(250, left + n_heads * 8) + gap)))
    cell_w = max(8, min(44, ((inside + gap) // columns - gap - left) // n_heads))
    cell_h = max(8, min(cell_w, 32, 420 // n_layers))
    width = max(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + left + n_heads * cell_w)
    pitch_x = (width - 2 * layout.MARGIN_PX + gap) // columns
    room = pitch_x - gap
    meanings = {name: _two_lines(_meaning(findings, name), room, lettering) for name in scales}
    above, below = 46 + 16 * max(len(lines) for lines in meanings.values()), 76
    at, tops = float(_TOP_PX), []
    for layers, _ in shapes:
        at += _KIND_PX if len(shapes) > 1 else 0
        tops.append(at)
        at += -(-len(scales) // columns) * (above + layers * cell_h + below)
    said = [
        "rows: layers, columns: heads",
        "each map has its own colours: the bar below it tells which",
        *([_UNIFORM] if any(math.isfinite(scale.uniform[0]) for scale in scales.values()) else []),
        *heads_summary.corpus_notes(findings),
    ]
    if undefined and len(undefined) < len(scales):
        said.append(f"left out, as undefined for all heads: {', '.join(printable(name) for name in undefined)}")
    if any(_any_undefined(findings, name) for name in scales):
        said.append("grey: undefined")
    footer = wrapped_lines(" · ".join(said), width - 2 * layout.MARGIN_PX, lettering)
    at += 12
    height = math.ceil(at) + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX
    page = _Page(width, height, lettering)
    page.head(f"{_model(findings)} · {len(scales)} measures of its heads", heads_summary.corpus_line(findings))
    for kind, shape, top in zip(findings.kinds, shapes, tops, strict=True):
        if len(shapes) > 1:
            page.write(layout.MARGIN_PX, top - 18, f"{_kind(kind)} attention", 17, ha="left", weight="bold")
        for place, (name, scale) in enumerate(scales.items()):
            x = layout.MARGIN_PX + place % columns * pitch_x
            y = top + place // columns * (above + shape[0] * cell_h + below)
            title = lettering.fit(printable(name), layout.PANEL_TITLE_PX, room * 0.88)
            page.write(x, y + 8, title, layout.PANEL_TITLE_PX, ha="left", weight="bold")
            for line_number, line in enumerate(meanings[name]):
                page.write(x, y + 27 + line_number * 16, line, layout.CAPTION_PX, ha="left", color=FAINT)
            corner = (x + left, y + above)
            page.map(corner, findings, kind, name, (cell_w, cell_h), scale)
            page.sides(corner, shape, (cell_w, cell_h), size_px=label_px)
            bar = (x + left, corner[1] + shape[0] * cell_h + 12, shape[1] * cell_w, 9)
            page.scale(bar, scale, size_px=label_px, most=3)
            page.uniform(bar, scale, size_px=min(label_px, 12.0), room=(x, x + room))
    page.foot(math.ceil(at), footer)
    return page


def measure_page(
    findings: Findings,
    measure: str,
    scale: Scale,
    lettering: Lettering,
    written: Callable[[float], str] = number,
    shared: dict[object, _Page] | None = None,
) -> Page:
    """A large map of one measure, with numbers where cells have room for them.

    Args:
        findings: What to draw.
        measure: Which measure.
        scale: Its colours.
        lettering: The fonts.
        written: How a number is written.
        shared: Pages of other measures of the same findings: one is used again where only what this measure says
            differs, and a new one is put there.
    """
    shapes = [findings_shape(findings, kind) for kind in findings.kinds]
    several = len(shapes) > 1
    n_heads, n_layers = max(heads for _, heads in shapes), sum(layers for layers, _ in shapes)
    room = layout.MIN_WIDTH_PX - 2 * layout.MARGIN_PX - _LEFT_PX
    cell_w = max(24, min(240, room // n_heads))
    cell_h = max(24, min(round(cell_w * 0.62), 90, max(44, 1000 // n_layers)))
    width = max(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + _LEFT_PX + n_heads * cell_w)
    at, tops = _TOP_PX, []
    for layers, _ in shapes:
        at += _HEAD_NAMES_PX + (_KIND_PX if several else 0)
        tops.append(at)
        at += layers * cell_h
    bar_y = at + 30
    numbers = cell_w >= 40
    intervals = (
        numbers
        and cell_h >= 44
        and any(measure in head.measures and math.isfinite(head.measures[measure].low) for head in findings.heads)
    )
    said = [_UNIFORM] if math.isfinite(scale.uniform[0]) else []
    if intervals:
        said.append("small numbers: ± half the width of the 95% interval")
    if _any_undefined(findings, measure):
        said.append("grey: undefined" + (f" ({heads_summary.UNDEFINED})" if numbers else ""))
    said += heads_summary.corpus_notes(findings)
    footer = wrapped_lines(" · ".join(said), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = bar_y + 72
    page = None if shared is None else shared.get(footer)
    if page is None:
        page = _Page(width, footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX, lettering)
        for kind, shape, top in zip(findings.kinds, shapes, tops, strict=True):
            page.sides((layout.MARGIN_PX + _LEFT_PX, top), shape, (cell_w, cell_h))
            if several:
                page.write(layout.MARGIN_PX, top - 48, f"{_kind(kind)} attention", 17, ha="left", weight="bold")
        page.foot(footer_y, footer)
        if shared is not None:
            shared[footer] = page
    page.begin()
    meaning = printable(findings.measure_facts(measure).what, 400)
    corpus = heads_summary.corpus_line(findings)
    subtitle = " · ".join(part for part in (meaning, corpus) if part)
    page.head(f"{_model(findings)} · {heads_summary.title_of(findings, measure)}", subtitle)
    for kind, top in zip(findings.kinds, tops, strict=True):
        page.map((layout.MARGIN_PX + _LEFT_PX, top), findings, kind, measure, (cell_w, cell_h), scale)
    if numbers:
        lefts = layout.MARGIN_PX + _LEFT_PX
        corners = {kind: (lefts, top) for kind, top in zip(findings.kinds, tops, strict=True)}
        page.numbers(numbers_of(findings, measure, scale, corners, (cell_w, cell_h), intervals, written))
    bar = (layout.MARGIN_PX + _LEFT_PX, bar_y, 420, 14)
    page.scale(bar, scale, size_px=layout.CAPTION_PX, most=11)
    unit = heads_summary.unit_of(findings, measure)
    page.uniform(bar, scale, size_px=layout.CAPTION_PX, room=(layout.MARGIN_PX, width), unit=unit)
    return page


def numbers_of(
    findings: Findings,
    measure: str,
    scale: Scale,
    corners: Mapping[str, tuple[float, float]],
    cell: tuple[int, int],
    intervals: bool,
    written: Callable[[float], str] = number,
) -> list[Number]:
    """The value of each head, and below it how far its interval reaches."""
    cmap, size = _colormap(scale), min(18.0, cell[0] * 0.26)
    found = []
    for head in findings.heads:
        one = head.measures.get(measure)
        value = one.value if one else math.nan
        half = (one.high - one.low) / 2 if one else math.nan
        left, top = corners[head.kind]
        x, y = left + (head.head + 0.5) * cell[0] - 1, top + (head.layer + 0.5) * cell[1] - 1
        ink = ink_on(hex_of(cmap, scale.share(value))) if math.isfinite(value) else FAINT
        found.append(Number(x, y - (cell[1] * 0.14 if intervals else 0), written(value), size, ink))
        if intervals and math.isfinite(half):
            said = _half(half) if written is number else f"±{written(half)}"
            found.append(Number(x, y + cell[1] * 0.22, said, size * 0.7, ink))
    return found


def _half(width: float) -> str:
    """Half the width of an interval, with a third decimal where two would say 0.00."""
    return "±<0.001" if 0 < width < 0.0005 else f"±{width:.3f}" if width < 0.00995 else f"±{number(width)}"


def findings_shape(findings: Findings, kind: str) -> tuple[int, int]:
    """How many layers and heads a kind of attention has."""
    mine = [head for head in findings.heads if head.kind == kind]
    return max(head.layer for head in mine) + 1, max(head.head for head in mine) + 1


class _Page(Page):
    """A page with maps of measures on it."""

    def begin(self) -> None:
        """Clears the page of what was one figure's alone; so is all that is placed from now on."""
        self.wipe()
        self.passing, self.drawn = True, ()

    def map(
        self,
        corner: tuple[float, float],
        findings: Findings,
        kind: str,
        measure: str,
        cell: tuple[int, int],
        scale: Scale,
    ) -> None:
        """Coloured cells of the heads that there are, (layer, head); grey where the measure is undefined."""
        cmap = _colormap(scale)
        gap = 2 if min(cell) >= 24 else 1
        boxes, colors = [], []
        values = findings.grid(kind, measure)
        for head in findings.heads:
            if head.kind == kind:
                value = float(values[head.layer, head.head])
                left, top = corner[0] + head.head * cell[0], corner[1] + head.layer * cell[1]
                boxes.append((left, top, cell[0] - gap, cell[1] - gap))
                colors.append(hex_of(cmap, scale.share(value)) if math.isfinite(value) else _UNKNOWN)
        self.fill(boxes, colors)

    def scale(self, bar: Box, scale: Scale, *, size_px: float, most: int) -> None:
        """The colour bar with its numbers."""
        if not scale.known:
            return
        x, y, width, height = bar
        self.colour_bar(bar, _colormap(scale))
        ticks = scale.ticks
        if len(ticks) > most:
            ticks = (scale.low, 0.0, scale.high) if scale.low < 0 else (scale.low, scale.high)
        for tick in ticks:
            at = x + width * scale.share(tick)
            self.write(at, y + height + size_px * 0.95, _tick(tick), size_px, ha="center", color=FAINT)

    def uniform(self, bar: Box, scale: Scale, *, size_px: float, room: tuple[float, float], unit: str = "") -> None:
        """Lines over the bar where uniform attention is, a triangle below them, and its value beside that."""
        x, y, width, height = bar
        unit = f" {unit}" if unit else ""
        if not (scale.known and math.isfinite(scale.uniform[0])):
            return
        middle = sum(scale.uniform) / 2
        at = x + width * scale.share(middle)
        ends = {x + width * scale.share(value) for value in scale.uniform}
        self.lines([[(end, y - 4), (end, y + height + 3)] for end in sorted(ends)], color=INK, width_px=1.5)
        # The words stand at the side where there is room for them.
        words, down = f"uniform {scale.uniform_text}{unit}", y + height + size_px * 2.4
        self.write(at, down, "▲", size_px, ha="center", color=INK)
        wide = self.lettering.width_px(words, size_px) * 1.04
        if at + size_px + wide <= room[1]:
            self.write(at + size_px * 0.7, down, words, size_px, ha="left", color=INK)
        else:
            self.write(max(at - size_px * 0.7, room[0] + wide), down, words, size_px, ha="right", color=INK)


def _meaning(findings: Findings, measure: str) -> str:
    """What a measure says, and in which unit if its name does not tell."""
    what, unit = printable(findings.measure_facts(measure).what, 400), heads_summary.unit_of(findings, measure)
    return f"{what} [{unit}]" if what and unit and unit not in measure else what


def _two_lines(text: str, room: float, lettering: Lettering) -> list[str]:
    """A text on at most two lines."""
    lines = wrapped_lines(printable(text, 400), room, lettering)
    rest = [" ".join(lines[1:])] if len(lines) > 1 else []
    return [lettering.fit(line, layout.CAPTION_PX, room) for line in (lines[0], *rest)]


def _texts(findings: Findings) -> list[str]:
    """All texts of a record that a figure may show, to find fonts for."""
    marks = heads_summary.marks_of(findings)
    roles = [text for name in marks for text in (label(name), findings.role_facts(name).what)]
    measures = [t for n in findings.measure_names for t in (n, findings.measure_facts(n).what)]
    units = [findings.measure_facts(name).unit for name in findings.measure_names]
    glyphs = [mark.glyph + mark.glyph.lower() for mark in marks.values()]
    said = [_model(findings), heads_summary.corpus_line(findings), *findings.kinds, *heads_summary.role_notes(findings)]
    return [printable(text, 400) for text in (*roles, *measures, *units, *glyphs, *said)]


def _model(findings: Findings) -> str:
    return printable(findings.run.get("model", "model"))


def _kind(kind: str) -> str:
    return printable(kind, 40)


def _heads(n: int) -> str:
    return f"{n} head" if n == 1 else f"{n} heads"


def _any_undefined(findings: Findings, measure: str | None = None) -> bool:
    names = findings.measure_names if measure is None else (measure,)
    return any(
        name not in head.measures or not math.isfinite(head.measures[name].value)
        for head in findings.heads
        for name in names
    )


def _tick(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _pale(color: str) -> str:
    """A third of a colour, the rest white."""
    parts = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.35):02x}" for part in parts)


def _colormap(scale: Scale) -> Colormap:
    import matplotlib as mpl

    return mpl.colormaps[scale.cmap]
