"""Findings as figures: the role atlas, a page of all measures, and a map for each; PNG, SVG and PDF files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, Box, Drawing, FontStyle, Number, wrap_lines
from attnscope.drawing.files import distinct
from attnscope.drawing.head_maps import (
    HEAD_NAMES_PX,
    KIND_PX,
    LEFT_PX,
    TOP_PX,
    MeasurePage,
    grids_of,
    measure_page,
    measures_pages,
    name_kinds,
    place_kinds,
    scale_of,
)
from attnscope.drawing.inks import blend, ink_on
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import HeadGrid, Page
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError, amount
from attnscope.questions import head_roles
from attnscope.questions.heads import large_measures
from attnscope.records.heads.findings import Findings, Head
from attnscope.report.numbers import number
from attnscope.report.role_marks import UNCLASSIFIED, Mark
from attnscope.report.wording import corpus_line, corpus_notes, label, model_of, printable
from attnscope.views.describe.figures import cards_page, texts_of
from attnscope.views.heads.needles_figure import needles_drawing

_EMPTY, _TRACK, _RESTING = "#f3f3f3", "#ffffff", "#7d7d7d"
_FOOTER_GAP_PX = 26
_LEAST_CELL_PX = 20  # height of a cell that has a letter alone
_VALUE_CELL_PX = 32  # and of one that has room for a number below it
_COMPACT_PX = 220  # width of an entry of a legend that has names alone


def pages(findings: Findings, style: Style = USUAL, measures: str | None = None) -> Iterator[tuple[str, Drawing]]:
    """The figures one after the other, each with its file name without the ending.

    `roles` is the atlas: layers x heads, each cell in the colour of the head's strongest role (not of pictures, which
    give no roles). `needles` has what `--probe needle` found. `descriptions` has a card a head, where heads were
    described. `measures` has a small map of each measure, `measure-NAME` a large one with numbers, of each measure that
    is named and defined for some head. These share a canvas: each is whole until the next one is asked for. Where their
    width is fixed, small maps that are more than a page of paper go on in `measures-2` ...

    Raises:
        AttnscopeError: There are no heads, or there is no such measure.
    """
    if not findings.heads:
        raise AttnscopeError("these findings are about no heads", "so there is nothing to draw")
    large = large_measures(findings, measures)
    lettering = lettering_for(_texts(findings), style.paper)
    shared: dict[object, MeasurePage] = {}
    if not findings.of_senses:
        yield "roles", atlas_page(findings, lettering)
    if findings.needles is not None and findings.needles.at and "retrieval" in findings.measure_names:
        yield "needles", needles_drawing(findings, findings.needles, style.paper)
    if findings.descriptions is not None and findings.descriptions.heads:
        yield "descriptions", cards_page(findings, lettering)
    scales = {name: scale_of(findings, name) for name in findings.measure_names}
    if scales:
        for index, page in enumerate(measures_pages(findings, scales, lettering), 1):
            yield "measures" if index == 1 else f"measures-{index}", page
    # A name from a record must not lead out of the folder.
    stems = distinct("measure-" + (re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:80] or "unnamed") for name in scales)
    for stem, (name, scale) in zip(stems, scales.items(), strict=True):
        if name in large:
            yield stem, measure_page(findings, name, scale, lettering, shared)


# -- the role atlas


@dataclass(frozen=True)
class Cell:
    """A cell of the atlas.

    Attributes:
        box: Its place.
        fill: Its colour.
        ink: The colour of its letters.
        glyph: The strongest role's letter, `·` without a role.
        value: The value that the role rests on; empty without a role or room.
        active: Whether the value is that excluding sinks.
        further: Letter and mark of the other roles, as many as fit; a last one of "+" and None for more.
        resting: The sink share; NaN if it is not known.
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
        return 24 + layout.LINE_PX * len(self.lines) + (14 if self.heads else 8)


@dataclass(frozen=True)
class Atlas:
    """The places of everything on the atlas.

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
    cell: tuple[float, int]
    cells: tuple[Cell, ...]
    tops: tuple[int, ...]
    legend: tuple[tuple[float, float, Entry], ...]
    footer_y: int
    footer: tuple[str, ...]


def atlas_layout(findings: Findings, lettering: Lettering) -> Atlas:
    """Places the atlas, with the legend beside the cells or below, whichever makes the smaller page."""
    grids = grids_of(findings)
    shapes = [grid.shape for grid in grids.values()]
    n_heads, n_layers = max(heads for _, heads in shapes), sum(layers for layers, _ in shapes)
    around = len(shapes) * (HEAD_NAMES_PX + (KIND_PX if len(shapes) > 1 else 0))
    paper = lettering.paper
    room = paper.room_px - LEFT_PX
    marks = head_roles.marks_of(findings)
    notes = " · ".join(_atlas_notes(findings))
    choices = []
    for beside in (False,) if paper.fixed else (False, True):
        legend_px, gap = (470, 44) if beside else (0, 0)
        cell_w = min(210.0, (room - legend_px - gap) / n_heads)
        cell_w = cell_w if paper.fixed else max(40, math.floor(cell_w))
        cell_h = max(36, min(100, round(cell_w * 0.7), 1500 // n_layers))
        needed = 2 * layout.MARGIN_PX + LEFT_PX + n_heads * cell_w + gap + legend_px
        width = paper.width_for(layout.MIN_WIDTH_PX, needed)
        bottom = TOP_PX + around + n_layers * cell_h
        left = math.floor(layout.MARGIN_PX + (LEFT_PX + n_heads * cell_w + gap if beside else 0))
        top = TOP_PX + (HEAD_NAMES_PX if beside else 0) if beside else bottom + 34
        columns = 1 if beside else max(1, (width - 2 * layout.MARGIN_PX) // (_COMPACT_PX if paper.fixed else 480))
        footer = wrap_lines(notes, width - 2 * layout.MARGIN_PX, lettering)
        notes_px = _FOOTER_GAP_PX + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX
        legend = _legend(findings, marks, (left, top, width - layout.MARGIN_PX - left), columns, lettering)
        lowest = max((y + entry.height_px for _, y, entry in legend), default=0.0)
        over = max(bottom, lowest) + notes_px - paper.most_px
        if over > 0:  # taller than a page of paper: cells as low as letters allow
            lower = min(cell_h, max(_LEAST_CELL_PX, cell_h - math.ceil(over / n_layers)))
            rise, cell_h = (cell_h - lower) * n_layers, lower
            legend, bottom, lowest = [(x, y - rise, entry) for x, y, entry in legend], bottom - rise, lowest - rise
        if beside:
            # Cells may grow as tall as the legend is, but stay broader than tall.
            cell_h = max(cell_h, min(round(cell_w * 0.95), 100, int(lowest - TOP_PX - around) // n_layers))
            bottom = TOP_PX + around + n_layers * cell_h
        low = max(bottom, lowest)
        choices.append((width * low, beside, (cell_w, cell_h), width, low, legend, footer))
    _, _, cell, width, low, legend, footer = min(choices, key=lambda choice: choice[:2])
    if cell[1] - 3 < _VALUE_CELL_PX:
        notes = " · ".join(_atlas_notes(findings, numbers=False))
        footer = wrap_lines(notes, width - 2 * layout.MARGIN_PX, lettering)
    tops, _ = place_kinds(findings, cell[1])
    cells = tuple(
        _cell(head, grids[head.kind], tops[findings.kinds.index(head.kind)], cell, marks, lettering)
        for head in findings.heads
    )
    footer_y = math.ceil(low) + _FOOTER_GAP_PX
    height = footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX
    return Atlas((width, height), cell, cells, tuple(tops), tuple(legend), footer_y, footer)


def atlas_page(findings: Findings, lettering: Lettering) -> Page:
    """The atlas, drawn."""
    atlas = atlas_layout(findings, lettering)
    n_heads = len(findings.heads)
    page = Page(atlas.size[0], lettering)
    page.head(
        f"{model_of(findings.run)} · what its {amount(n_heads, 'head')} {'does' if n_heads == 1 else 'do'}",
        corpus_line(findings),
    )
    name_kinds(page, findings, atlas.tops, atlas.cell)
    _draw_cells(page, atlas.cells)
    for x, y, entry in atlas.legend:
        _draw_entry(page, x, y, entry)
    page.foot(atlas.footer_y, atlas.footer)
    page.end_at(atlas.size[1])
    return page


def _cell(
    head: Head, grid: HeadGrid, top: int, size: tuple[float, int], marks: Mapping[str, Mark], lettering: Lettering
) -> Cell:
    width, height = size[0] - 3, size[1] - 3
    box = (*grid.corner(head.layer, head.head, (layout.MARGIN_PX + LEFT_PX, top), size), width, height)
    if not head.roles:
        return Cell(box, _EMPTY, FAINT, UNCLASSIFIED, "", False, (), head.resting_share)
    strongest, *others = head.roles
    mark = marks[strongest.name]
    fill = blend(0.35, "#ffffff", mark.color) if strongest.tentative else mark.color
    fits = int((width * 0.93 - _glyph_px(box, lettering.paper) * 1.1) / (_further_px(box) + 2))
    fits = max(0 if lettering.paper.fixed else 1, fits)
    further: list[tuple[str, Mark | None]] = [
        (marks[role.name].letter(tentative=role.tentative), marks[role.name]) for role in others
    ]
    if len(further) > fits:
        further = [*further[: fits - 1], ("+", None)] if fits else []
    value = number(strongest.value)
    if height < _VALUE_CELL_PX or lettering.width_px(value, _value_px(box, lettering.paper)) > width * 1.02:
        value = ""  # there is no room for it
    return Cell(
        box=box,
        fill=fill,
        ink=ink_on(fill),
        glyph=mark.letter(tentative=strongest.tentative),
        value=value,
        active=strongest.active_share is not None,
        further=tuple(further),
        resting=head.resting_share,
    )


def _glyph_px(box: Box, paper: Paper) -> float:
    return paper.letters(min(box[3] * 0.32, 26.0))


def _value_px(box: Box, paper: Paper) -> float:
    return paper.letters(min(box[3] * 0.27, box[2] * 0.27, 19.0))


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
        pad, glyph_px, small = width * 0.07, _glyph_px(cell.box, page.paper), _further_px(cell.box)
        if cell.glyph == UNCLASSIFIED:
            numbers.append(Number(x + width / 2, y + height * 0.42, cell.glyph, glyph_px * 1.4, cell.ink))
        else:
            alone = width < 2 * glyph_px
            left = x + (width / 2 if alone else pad + glyph_px * 0.39)
            down = y + height * (0.25 if height >= _VALUE_CELL_PX else 0.42)
            numbers.append(Number(left, down, cell.glyph, glyph_px, cell.ink, "bold"))
            size = _value_px(cell.box, page.paper)
            font: FontStyle = "italic" if cell.active else "plain"
            if cell.value:
                numbers.append(Number(x + width / 2, y + height * 0.6, cell.value, size, cell.ink, font))
        for index, (letter, mark) in enumerate(reversed(cell.further)):
            left, upper = x + width - pad - small - index * (small + 2), y + height * 0.25 - small / 2
            color = mark.color if mark else "#ffffff"
            squares.append(((left, upper, small, small), color))
            if small * 0.72 >= page.paper.least_px:
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
    room: tuple[float, float, float],
    columns: int,
    lettering: Lettering,
) -> list[tuple[float, float, Entry]]:
    """The roles that occur, down one column and then the next: x, y and what stands there."""
    left, top, width = room
    wide = width / columns
    counts = head_roles.counts(findings, marks)
    entries = [_entry(findings, count, marks[count.role], wide - 70, lettering) for count in counts]
    if n_none := len(head_roles.unclassified(findings.heads)):
        nothing = Mark(UNCLASSIFIED, _EMPTY)
        entries.append(Entry(nothing, "unclassified", amount(n_none, "head"), ("no role passed its test",)))
    per_column = -(-len(entries) // columns)
    corners = []
    for first in range(0, len(entries), per_column):
        column = entries[first : first + per_column]
        downs = accumulate((entry.height_px for entry in column[:-1]), initial=top)
        corners += [(left + first // per_column * wide, down, entry) for down, entry in zip(downs, column, strict=True)]
    return corners


def _entry(findings: Findings, count: head_roles.Count, mark: Mark, room: float, lettering: Lettering) -> Entry:
    facts = findings.role_facts(count.role)
    compact = lettering.paper.fixed  # a paper says in its caption what roles are
    lines = wrap_lines(printable(facts.what, 400), room, lettering) if facts.what and not compact else ()
    least = head_roles.threshold(findings, count.role)
    needs = f"{printable(facts.measure)} ≥ {least}" if least else ""
    heads = amount(count.n_heads, "head")
    if count.n_strongest < count.n_heads:
        heads += f", first in {count.n_strongest}" if count.n_strongest else ", never first"
    name = lettering.fit(label(count.role), layout.PANEL_TITLE_PX, room * (0.88 if compact else 0.55))
    if compact:
        return Entry(mark, name, "", (heads,))
    lines = (*lines, *([lettering.fit(needs, layout.CAPTION_PX, room)] if needs else []))
    return Entry(mark, name, heads, lines)


def _draw_entry(page: Page, x: float, y: float, entry: Entry) -> None:
    page.fill([(x, y, 32, 26)], [entry.mark.color])
    page.entitle(x + 16, y + 13, entry.mark.glyph, 15, ha="center", color=ink_on(entry.mark.color))
    page.entitle(x + 44, y + 11, entry.name)
    bold = 1.12 * page.lettering.width_px(entry.name, layout.PANEL_TITLE_PX)
    page.write(x + 44 + bold + 12, y + 11.5, entry.heads, layout.CAPTION_PX, ha="left", color=FAINT)
    for line_number, line in enumerate(entry.lines):
        down = y + 24 + (line_number + 0.5) * layout.LINE_PX
        page.write(x + 44, down, line, layout.CAPTION_PX, ha="left")


def _atlas_notes(findings: Findings, *, numbers: bool = True) -> list[str]:
    notes = ["letter and colour: a head's strongest role, or a sink's if it has no other"]
    heads, level = [head for head in findings.heads if head.roles], findings.options.get("level")
    if heads and numbers:
        notes.append("number: the value of the measure that the role rests on")
    if numbers and any(head.roles[0].active_share is not None for head in heads):
        notes.append("in italics: excluding sinks")
    if any(len(head.roles) > 1 for head in heads):
        notes.append("small squares: its other roles")
    if any(math.isfinite(head.resting_share) for head in findings.heads):
        notes.append("bar: the sink share, attention on special tokens and the first token")
    if isinstance(level, float) and not all(role.tentative for head in heads for role in head.roles):
        notes.append(
            f"a role is given where its value is above threshold and baseline at a false discovery rate of {level:g}"
        )
    return [*notes, *head_roles.role_notes(findings), *corpus_notes(findings)]


def _texts(findings: Findings) -> list[str]:
    """All texts of a record that a figure may show, to find fonts for."""
    marks = head_roles.marks_of(findings)
    texts = [text for name in marks for text in (label(name), findings.role_facts(name).what)]
    for name in findings.measure_names:
        texts += [name, findings.measure_facts(name).what, findings.measure_facts(name).unit]
    texts += [mark.glyph + mark.glyph.lower() for mark in marks.values()]
    texts += [model_of(findings.run), corpus_line(findings), *findings.kinds, *head_roles.role_notes(findings)]
    return [printable(text, 400) for text in (*texts, *texts_of(findings))]
