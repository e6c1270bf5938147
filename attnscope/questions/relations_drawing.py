"""What the question of relations alone draws: the map of relations and heads, and texts with their links as arcs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, colormap
from attnscope.drawing.inks import hex_of
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import Page
from attnscope.errors import amount
from attnscope.questions.relations import Relations, best_heads, expressed_by, listed, word_numbers
from attnscope.report.blocks import Report
from attnscope.report.numbers import interval, number
from attnscope.report.wording import printable
from attnscope.results.table import Floats

MOST_RELATIONS = 48
"""Relations on the map; those that no head expresses, and of them the rarest, are left out first."""

MOST_HEADS = 160
"""Heads that are columns of their own; in larger models a column is a layer."""

RIGHT, WRONG, GOLD = "#0072B2", "#D55E00", "#8a8a8a"
"""Colours of Okabe and Ito, which everybody can tell apart; right and wrong differ by form as well."""

_TOP_PX, _ROW_PX, _TEXT_PX, _GAP_PX = layout.MARGIN_PX + 96, 23, 13.0, 18
_DARKEST = 0.5  # accuracy above the best simple rule that has the darkest colour
_NOT_ABOVE = "#f4f4f4"

Point = tuple[float, float]


# The map


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of the map.

    Attributes:
        rows: Relations, by their rows in the table.
        above: Accuracy above the best simple rule, (row, column); NaN without such a head or a link.
        found: Which cells express the relation, (row, column).
        best: The column of the best head of each row, if it expresses the relation; else -1.
        columns: The name of each column: a head or a layer.
        groups: The name of each group of columns, and how many it has.
    """

    rows: list[int]
    above: Floats
    found: Any
    best: list[int]
    columns: list[str]
    groups: list[tuple[str, int]]


@dataclass(frozen=True, eq=False)
class RelationMap:
    """How far each head is above the best simple rule for each relation, with the numbers of the best heads beside."""

    result: Relations

    def show(self, console: Any, *, every: bool) -> Sequence[Any]:
        """Return nothing: the terminal has a table of these numbers."""
        return []

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Draw rows of relations and columns of heads."""
        cells = cells_of(self.result)
        paper = lettering.paper
        names = self.result.table("relations")["relation"]
        labels = [lettering.spell(printable(names[row], 40)) for row in cells.rows]
        beside = _columns_beside(self.result, cells.rows, lettering)

        # Widths: names at the left, numbers at the right, and the cells between them.
        left = layout.MARGIN_PX + 16 + math.ceil(max(lettering.width_px(label, _TEXT_PX) for label in labels))
        gap: float = 7 if len(cells.groups) > 1 else 0
        if paper.fixed:
            left = min(left, layout.MARGIN_PX + paper.room_px // 3)
            gap = gap // 3
            labels = [lettering.fit(label, _TEXT_PX, left - layout.MARGIN_PX - 12) for label in labels]
        beside_px = sum(width + _GAP_PX for *_, width in beside)
        room = paper.width_px - left - beside_px - layout.MARGIN_PX - gap * len(cells.groups)
        cell = min(34.0, room / len(cells.columns))
        if not paper.fixed:
            cell = max(9, math.floor(cell))
        starts = []
        x: float = left
        for _, n in cells.groups:
            starts += [x + place * cell for place in range(n)]
            x += n * cell + gap
        right = math.ceil(starts[-1] + cell)

        page = Page(paper.width_for(layout.MIN_WIDTH_PX, right + beside_px + layout.MARGIN_PX), lettering)
        page.head(f"{report.model} · which heads express which relations", report.subtitle)
        _write_columns(page, cells, starts, cell)
        _draw_cells(page, cells, starts, cell)
        self._write_rows(page, cells, labels, beside, left, right)

        # What the colours mean: the bar begins where the colours of cells do.
        bottom = _TOP_PX + len(cells.rows) * _ROW_PX
        x = layout.MARGIN_PX + 8 if paper.is_narrow else starts[0]
        boxes = [(x + 5.0 * step, bottom + 26.0, 5.0, 12.0) for step in range(50)]
        page.fill(boxes, [_color(_DARKEST * step / 50) for step in range(50)])
        ticks = {0.0: "0", _DARKEST / 2: "+25 points", _DARKEST: "+50 points or more"}
        page.draw_scale((x, bottom + 26, 250, 12), None, (0.0, _DARKEST), ticks=ticks, color=FAINT)
        page.finish(bottom + 88, _map_notes(self.result, cells, report))
        return page

    def _write_rows(
        self, page: Page, cells: Cells, labels: Sequence[str], beside: Sequence[Any], left: float, right: float
    ) -> None:
        """Write the name of each relation at its left, and the numbers of its best head at its right."""
        verdicts = self.result.verdicts
        for place, row in enumerate(cells.rows):
            y = _TOP_PX + (place + 0.5) * _ROW_PX
            ink = FAINT if verdicts[row] in ("no", "none") else INK
            weight = "bold" if verdicts[row] in ("yes", "weakly") else "normal"
            page.write(left - 10, y, labels[place], _TEXT_PX, ha="right", color=ink, weight=weight)
            x = right
            for title, texts, align, width in beside:
                x += _GAP_PX
                anchor = x + width if align == "right" else x
                if place == 0:
                    page.write(anchor, _TOP_PX - 12, title, 11.0, ha=align, color=FAINT)
                page.write(anchor, y, page.lettering.spell(texts[place]), _TEXT_PX, ha=align, color=ink)
                x += width


def cells_of(result: Relations) -> Cells:
    """Choose the rows of the map, and its columns: heads by layer, or in a large model layers with their best head."""
    relations = result.table("relations")
    ranked = listed(result)
    is_expressed = result["found"].any(1)
    rest = sorted((row for row in ranked if not is_expressed[row]), key=lambda row: -relations["n"][row])
    left_out = {*rest[max(0, MOST_RELATIONS - len(ranked) + len(rest)) :]}
    rows = [row for row in ranked if row not in left_out]
    above = (result["accuracy"] - relations["baseline"][:, None])[rows]
    expressed = result["found"][rows]
    best = relations["best"][rows].tolist()
    best = [head if expressed[place, head] else -1 for place, head in enumerate(best)]
    layers = result.table("heads")["layer"]
    numbers, sizes = np.unique(layers, return_counts=True)
    if len(layers) <= MOST_HEADS:
        names = [f"H{head}" for head in result.table("heads")["head"].tolist()]
        groups = [(f"L{layer}", int(n)) for layer, n in zip(numbers.tolist(), sizes, strict=True)]
        return Cells(rows, above, expressed, best, names, groups)
    starts = np.cumsum([0, *sizes[:-1]])
    by_layer = np.fmax.reduceat(above, starts, axis=1)
    columns = [int(np.searchsorted(numbers, layers[head])) if head >= 0 else -1 for head in best]
    names = [f"L{layer}" for layer in numbers.tolist()]
    return Cells(
        rows, by_layer, np.logical_or.reduceat(expressed, starts, axis=1), columns, names, [("", len(numbers))]
    )


def _columns_beside(result: Relations, rows: Sequence[int], lettering: Lettering) -> list[tuple[str, Any, str, float]]:
    """Return the columns of numbers beside the map: title, texts, alignment and width; narrow paper has few."""
    accuracy, low, high = (result.at_best(f"accuracy{end}") for end in ("", "_low", "_high"))
    relations = result.table("relations")
    heads, expressed, verdicts = best_heads(result), expressed_by(result), result.verdicts
    columns = [
        ("head", [heads[row] for row in rows], "left"),
        ("accuracy", [number(accuracy[row]) for row in rows], "right"),
        ("95% interval", [interval(low[row], high[row]) for row in rows], "right"),
        ("baseline", [number(relations["baseline"][row]) for row in rows], "right"),
        ("rule", [printable(relations["rule"][row], 40) for row in rows], "left"),
        ("n", [f"{relations['n_scored'][row]:,}" for row in rows], "right"),
    ]
    if "others" in verdicts:
        columns.append(("", [expressed[row] if verdicts[row] == "others" else "" for row in rows], "left"))
    if lettering.paper.fixed:
        columns = columns[: 2 if lettering.paper.is_narrow else 3]
    return [
        (title, texts, align, max(lettering.width_px(text, _TEXT_PX) for text in (title, *texts)))
        for title, texts, align in columns
    ]


def _write_columns(page: Page, cells: Cells, starts: Sequence[float], cell: float) -> None:
    """Write layers above heads; of heads as many numbers as there is room for."""
    y = _TOP_PX - 12
    size = page.paper.letters(min(11.0, cell * 0.9 + 2))
    step = max(math.ceil(24 / cell), page.label_step(cells.columns[-1], size, cell))
    every = page.label_step(cells.groups[-1][0], layout.PANEL_TITLE_PX, cells.groups[-1][1] * cell)
    first = 0
    for group, (name, n) in enumerate(cells.groups):
        if name and group % every == 0:
            page.entitle(starts[first] + n * cell / 2, y - 18, name, ha="center")
        for place in range(0, n - step + 1 if page.paper.fixed else n, step):
            x = starts[first + place] + cell / 2
            page.write(x, y, cells.columns[first + place], size, ha="center", color=FAINT)
        first += n


def _draw_cells(page: Page, cells: Cells, starts: Sequence[float], cell: float) -> None:
    """Draw the cells, frames around heads that express the relation, and a dot on the best one."""
    boxes, colors, frames = [], [], []
    for (row, column), value in np.ndenumerate(cells.above):
        box = (starts[column], _TOP_PX + row * _ROW_PX + 1.0, cell - min(1.0, cell * 0.15), _ROW_PX - 2.0)
        if math.isfinite(value):
            boxes.append(box)
            colors.append(_NOT_ABOVE if value <= 0 else _color(value))
        if cells.found[row, column]:
            frames.append(box)
    page.fill(boxes, colors)
    page.outline(frames, INK, min(1.8, cell * 0.3) if page.paper.fixed else 1.8)
    for row, column in enumerate(cells.best):
        if column >= 0:
            is_dark = cells.above[row, column] > 0.55 * _DARKEST
            center = starts[column] + (cell - 1) / 2, _TOP_PX + (row + 0.5) * _ROW_PX
            page.dot(center, min(3.3, cell * 0.35), "#ffffff" if is_dark else INK)


def _color(above: float) -> str:
    """Return the colour of an accuracy above the best simple rule."""
    return hex_of(colormap("Blues"), 0.12 + 0.88 * min(1.0, above / _DARKEST))


def _map_notes(result: Relations, cells: Cells, report: Report) -> list[str]:
    n_rarer = len(listed(result)) - len(cells.rows)
    notes = [
        f"not shown: {amount(n_rarer, 'rarer relation')} without such a head" if n_rarer > 0 else "",
        "colour: accuracy above the best simple rule; grey: not above it",
        "frame: the head expresses the relation (●: the head chosen on the other half does)",
        "" if cells.groups[0][0] else "columns are layers: the best head of each",
        *report.footer,
    ]
    return [note for note in notes if note]


# Examples


@dataclass(frozen=True)
class Link:
    """A link of an example by the numbers of its words; see the table `links`."""

    looking: list[int]
    targets: list[int]
    looked: int
    right: bool
    weight: float


@dataclass(frozen=True)
class Example:
    """A text, or a part of it, and its links.

    Attributes:
        caption: Where it is from, and how many links are right.
        words: Its words; `spaced`: whether a space stands before each.
        cut_before: Whether the text has words before these; `cut_after`: after them.
    """

    caption: str
    words: list[str]
    spaced: list[bool]
    links: list[Link]
    cut_before: bool
    cut_after: bool

    def part(self, first: int, last: int, n_links: int) -> Example:
        """Return the words from one up to another, with the first links; words outside of it are further away."""
        links = []
        for link in self.links[:n_links]:
            looking = [word - first for word in link.looking if first <= word < last]
            targets = [word - first for word in link.targets if first <= word < last]
            looked = link.looked - first if first <= link.looked < last else -1
            if looking:
                links.append(Link(looking, targets, looked, link.right, link.weight))
        return Example(
            self.caption,
            self.words[first:last],
            self.spaced[first:last],
            links,
            self.cut_before or first > 0,
            self.cut_after or last < len(self.words),
        )


def _examples_of(result: Relations, relation: int) -> list[Example]:
    """Return the examples of a relation."""
    examples, links = result.table("examples"), result.table("links")
    head = best_heads(result)[relation]
    columns = [links[name].tolist() for name in ("looking", "targets", "looked", "right", "weight")]
    made = []
    for row in np.flatnonzero(examples["relation"] == relation).tolist():
        mine = [
            Link(word_numbers(looking), word_numbers(targets), *more)
            for example, looking, targets, *more in zip(links["example"].tolist(), *columns, strict=True)
            if example == row
        ]
        where = f"{printable(examples['source'][row], 60)}, line {examples['line'][row]}"
        made.append(
            Example(
                f"{head}, {sum(link.right for link in mine)} of {len(mine)} right · {where}",
                [printable(word, 40) for word in examples["words"][row].split("\n")],
                [mark == "1" for mark in examples["spaced"][row].split()],
                mine,
                bool(examples["cut_before"][row]),
                bool(examples["cut_after"][row]),
            )
        )
    return made


@dataclass(frozen=True, eq=False)
class Examples:
    """Texts with what the best head of a relation does on them."""

    result: Relations
    relation: int

    def show(self, console: Any, *, every: bool) -> Sequence[Any]:
        """Return each text, and for each link where the head looks, whether that is right, and what would be."""
        parts = []
        for example in _examples_of(self.result, self.relation):
            parts += [_sentence(example), Text(f"  {example.caption}", style="dim")]
            parts += [_link_line(example, link) for link in example.links]
        return parts

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Draw texts one below the other: arcs above go where the head looks, arcs below to what would be right."""
        width = lettering.paper.width_px
        room = width - 2 * layout.MARGIN_PX - 40
        examples = _examples_of(self.result, self.relation)
        if lettering.paper.fixed:
            examples = [cut_to_fit(example, lettering, room) for example in examples]
        page = Page(width, lettering)
        links = [link for example in examples for link in example.links]
        name = printable(self.result.table("relations")["relation"][self.relation], 60)
        page.head(
            f"{report.model} · {name} by {best_heads(self.result)[self.relation]}",
            f"{sum(link.right for link in links)} of {len(links)} right in these {len(examples)} · the first such "
            "texts of the half that the head was not chosen on",
        )
        top = layout.MARGIN_PX + 78.0
        for example in examples:
            top = _draw_example(page, example, lettering, room, top)
        note = (
            "over the words: where the head looks, the thicker the larger the weight: blue = right, orange and crossed "
            "out = wrong · below, dashed: a word that would be right"
        )
        page.finish(top + 6, [note])
        return page


def _sentence(example: Example) -> Text:
    """Return the words; those that look in the colour of right or wrong."""
    colors = _colors(example)
    text = Text("  … " if example.cut_before else "  ")
    for place, (word, spaced) in enumerate(zip(example.words, example.spaced, strict=True)):
        text.append(" " if spaced else "")
        text.append(word, style=f"bold {colors[place]}" if place in colors else "")
    return text.append(" …" if example.cut_after else "")


def _colors(example: Example) -> dict[int, str]:
    """Return the colour of each word that looks."""
    colors: dict[int, str] = {}
    for link in example.links:
        colors |= dict.fromkeys(link.looking, RIGHT if link.right else WRONG)
    return colors


def _link_line(example: Example, link: Link) -> Text:
    def spell(places: Sequence[int]) -> str:
        return printable(", ".join(example.words[place] for place in places), 60)

    mark = ("✓ ", f"bold {RIGHT}") if link.right else ("✗ ", f"bold {WRONG}")
    looked = spell([link.looked]) if link.looked >= 0 else "(a word further away)"
    text = Text.assemble("    ", mark, f"{spell(link.looking)} → ", (looked, "bold"), (f" {link.weight:.2f}", "cyan"))
    return text if link.right else text.append(f"   right: {spell(link.targets)}", style="dim")


_WORD_PX, _LEAST_PX = 17.0, 9.0
_BOLD = 1.13  # how much wider bold words are


def _edges(example: Example, lettering: Lettering, room: float) -> tuple[list[Point], float]:
    """Return the left and right edge of each word, and the font size at which all fit."""
    bold = _colors(example)
    size, least = _WORD_PX, _LEAST_PX
    if lettering.paper.fixed:
        size = least = lettering.paper.least_px
    while True:
        x = layout.MARGIN_PX + (26.0 if example.cut_before else 10.0)
        edges = []
        for place, (word, spaced) in enumerate(zip(example.words, example.spaced, strict=True)):
            x += size * (0.5 if spaced else 0.1)
            end = x + lettering.width_px(lettering.spell(word), size) * (_BOLD if place in bold else 1.0)
            edges.append((x, end))
            x = end
        if x - layout.MARGIN_PX - 10 <= room or size <= least:
            return edges, size
        size = max(least, size * 0.94)


def cut_to_fit(example: Example, lettering: Lettering, room: float) -> Example:
    """Return the words around the first links, as many as there is room for."""
    first, last, n_links = 0, len(example.words), len(example.links)
    while last - first > 1:
        part = example.part(first, last, n_links)
        edges, _ = _edges(part, lettering, room)
        if edges[-1][1] - layout.MARGIN_PX - 10 <= room - 14:
            return part
        linked = {word for link in example.links[:n_links] for word in (*link.looking, link.looked)} - {-1}
        middle = (min(linked, default=0) + max(linked, default=last)) / 2
        is_at_end = last - 1 - middle > middle - first
        if (last - 1 if is_at_end else first) in linked and n_links > 1:
            n_links -= 1  # the words of the last link are further apart than there is room for
        elif is_at_end:
            last -= 1
        else:
            first += 1
    return example.part(first, last, n_links)


def _rise(distance: float) -> float:
    """Return how high an arc is that goes so far."""
    return min(92.0, 14 + 0.17 * distance)


def _draw_example(page: Page, example: Example, lettering: Lettering, room: float, top: float) -> float:
    """Draw an example, and return where the next one begins."""
    edges, size = _edges(example, lettering, room)

    def middle(places: Sequence[int]) -> float:
        return (edges[places[0]][0] + edges[places[-1]][1]) / 2

    # Each link: from where, to where, and, if that is wrong, the nearest word that would be right.
    arcs = []
    for link in example.links:
        source = middle(link.looking)
        goal = middle([link.looked]) if link.looked >= 0 else edges[-1][1] + 14
        right = None
        if not link.right and link.targets:
            right = middle([min(link.targets, key=lambda word: abs(word - link.looking[0]))])
        arcs.append((link, source, goal, right))
    above = max((_rise(abs(goal - source)) for _, source, goal, _ in arcs), default=0)
    below = max((0.6 * _rise(abs(right - source)) for _, source, _, right in arcs if right is not None), default=0)

    # The caption and the words.
    caption = lettering.fit(example.caption, layout.CAPTION_PX, page.width_px - 2 * layout.MARGIN_PX)
    page.write(layout.MARGIN_PX, top + 10, caption, layout.CAPTION_PX, ha="left", color=FAINT)
    line = top + 34 + above + 15
    colors = _colors(example)
    for place, (word, (start, _)) in enumerate(zip(example.words, edges, strict=True)):
        weight = "bold" if place in colors else "normal"
        page.write(start, line, lettering.spell(word), size, ha="left", color=colors.get(place, INK), weight=weight)
    for is_cut, x in ((example.cut_before, edges[0][0] - 16), (example.cut_after, edges[-1][1] + 14)):
        if is_cut:
            page.write(x, line, "…", size, ha="center", color=FAINT)

    for link, source, goal, right in arcs:
        color = RIGHT if link.right else WRONG
        arc = _arc(source, goal, line - 15, -_rise(abs(goal - source)))
        page.lines([arc], color=color, width_px=1.2 + 3 * min(1.0, link.weight))
        page.lines([_arrow(arc)], color=color, width_px=1.6)
        if right is not None:
            x, y = arc[len(arc) // 2]
            cross = [[(x - 5, y - 5), (x + 5, y + 5)], [(x - 5, y + 5), (x + 5, y - 5)]]
            page.lines(cross, color=color, width_px=1.8)
            arc = _arc(source, right, line + 15, 0.6 * _rise(abs(right - source)))
            page.lines([arc], color=GOLD, width_px=1.4, linestyles="dashed")
            page.lines([_arrow(arc)], color=GOLD, width_px=1.4)
    return line + 15 + below + 22


def _arc(source: float, goal: float, y: float, height: float) -> list[Point]:
    """Return half an ellipse, flattened at its top as a parabola of fourth degree is."""
    steps = [step / 40 for step in range(41)]
    return [(source + (goal - source) * t, y + height * (1 - (2 * t - 1) ** 4)) for t in steps]


def _arrow(arc: Sequence[Point]) -> list[Point]:
    """Return the head of an arrow at the end of an arc."""
    x, y = arc[-1]
    up = -1.0 if arc[len(arc) // 2][1] < y else 1.0
    return [(x - 4.5, y + up * 7), (x, y), (x + 4.5, y + up * 7)]
