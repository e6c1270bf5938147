"""Relations as figures: a map of relations x heads, and examples with their links as arcs; PNG, SVG and PDF files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, colormap
from attnscope.drawing.files import distinct
from attnscope.drawing.inks import hex_of
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError, amount
from attnscope.records.frame.pair_tables import head_name
from attnscope.records.relations.record import Example, ExampleLink, Relation, Relations
from attnscope.report.wording import corpus_line, corpus_notes, model_of, printable
from attnscope.views.relations import summary

MOST_RELATIONS = 48
"""Relations on the map; those that no head expresses, and of them the rarest, are left out first."""

MOST_HEADS = 160
"""Heads that are columns of their own; in larger models a column is a layer."""

_TOP_PX, _ROW_PX, _TEXT_PX = layout.MARGIN_PX + 96, 23, 13.0
_SCALE = 0.5  # accuracy above the best simple rule that has the darkest colour
_NONE = "#f4f4f4"

Point = tuple[float, float]


def pages(relations: Relations, style: Style = USUAL) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    `relations` is the map: how far each head is above the best simple rule for each relation. `examples-NAME` shows
    what the best head of a relation does on some texts, where the record has any.

    Raises:
        AttnscopeError: There are no relations.
    """
    if not relations.relations:
        raise AttnscopeError("this record is about no relations", "so there is nothing to draw")
    lettering = lettering_for(_texts(relations), style.paper)
    yield "relations", map_page(relations, lettering)
    by_name: dict[str, list[Example]] = {}
    for example in relations.examples:
        by_name.setdefault(example.relation, []).append(example)
    for stem, examples in zip(distinct(map(_stem, by_name)), by_name.values(), strict=True):
        yield stem, examples_page(relations, examples, lettering)


def _stem(relation: str) -> str:
    """The name of a relation's file: a name from a record must not lead out of the folder."""
    origin, _, goal = relation.partition("→")
    named = re.sub(r"[^A-Za-z0-9]+", "-", f"{origin} to {goal}" if goal else origin).strip("-").lower()
    return f"examples-{named[:60] or 'unnamed'}"


# The map --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Map:
    """The cells of the map.

    Attributes:
        relations: The rows.
        values: Accuracy above the best simple rule, (row, column); NaN without such a head or a link.
        found: Which cells express the relation, (row, column).
        chosen: The column of the chosen head of each row; -1 = none.
        columns: The name of each column: "H0", or "L0" if columns are layers.
        groups: The name of each group of columns, and their number.
    """

    relations: tuple[Relation, ...]
    values: NDArray[np.float64]
    found: NDArray[np.bool_]
    chosen: tuple[int, ...]
    columns: tuple[str, ...]
    groups: tuple[tuple[str, int], ...]


def map_of(relations: Relations) -> Map:
    """The map's rows and columns: heads by layer, or in a large model layers with their best head."""
    ranked = summary.list_relations(relations)
    rest = sorted((relation for relation in ranked if not relation.found.any()), key=lambda relation: -relation.n)
    left_out = {relation.name for relation in rest[max(0, MOST_RELATIONS - len(ranked) + len(rest)) :]}
    rows = tuple(relation for relation in ranked if relation.name not in left_out)
    n_layers, n_heads = rows[0].accuracy.shape
    above = np.stack([relation.accuracy - relation.baseline for relation in rows])
    marked = np.stack([relation.found for relation in rows])
    best = [relation.best for relation in rows]
    if n_layers * n_heads <= MOST_HEADS:
        chosen = tuple(-1 if head is None else head[0] * n_heads + head[1] for head in best)
        names = tuple(f"H{head}" for _ in range(n_layers) for head in range(n_heads))
        groups = tuple((f"L{layer}", n_heads) for layer in range(n_layers))
        shape = (len(rows), n_layers * n_heads)
        return Map(rows, above.reshape(shape), marked.reshape(shape), chosen, names, groups)
    highest = np.where(np.isnan(above), -np.inf, above).max(-1)
    values = np.where(np.isinf(highest), np.nan, highest)
    chosen = tuple(-1 if head is None else head[0] for head in best)
    names = tuple(f"L{layer}" for layer in range(n_layers))
    return Map(rows, values, np.asarray(marked.any(-1)), chosen, names, (("", n_layers),))


def map_page(relations: Relations, lettering: Lettering) -> Page:
    """The map, drawn, with a table of the chosen heads beside it."""
    cells, paper = map_of(relations), lettering.paper
    names = [lettering.spell(printable(relation.name, 40)) for relation in cells.relations]
    left = layout.MARGIN_PX + 16 + math.ceil(max(lettering.width_px(name, _TEXT_PX) for name in names))
    gap: float = 7 if len(cells.groups) > 1 else 0
    if paper.fixed:
        left, gap = min(left, layout.MARGIN_PX + paper.room_px // 3), gap // 3
        names = [lettering.fit(name, _TEXT_PX, left - layout.MARGIN_PX - 12) for name in names]
    # On narrow paper the map needs the room: of the numbers beside it the head is left.
    table = _TABLE[:2] if paper.is_narrow else _TABLE[:3] if paper.fixed else _TABLE
    names_others = any(summary.verdict(relation) == "others" for relation in cells.relations)
    table_px = {2: 134, 3: 234}.get(len(table), 650 if names_others else 530)
    room = paper.width_px - left - table_px - layout.MARGIN_PX - gap * len(cells.groups)
    cell = min(34.0, room / len(cells.columns))
    cell = cell if paper.fixed else max(9, math.floor(cell))
    starts = _starts(cells, left, cell, gap)
    right = math.ceil(starts[-1] + cell)
    page = Page(paper.width_for(layout.MIN_WIDTH_PX, right + table_px + layout.MARGIN_PX), lettering)
    page.head(
        f"{model_of(relations.run)} · which heads express which relations",
        f"{summary.count_line(relations)} · {corpus_line(relations)}",
    )
    _write_column_names(page, cells, starts, cell)
    cmap = colormap("Blues")
    boxes: list[Box] = []
    colors: list[str] = []
    frames: list[Box] = []
    for row, relation in enumerate(cells.relations):
        top = _TOP_PX + row * _ROW_PX
        for column, start in enumerate(starts):
            value = cells.values[row, column]
            box = (start, top + 1, cell - min(1.0, cell * 0.15), _ROW_PX - 2)
            if math.isfinite(value):
                boxes.append(box)
                colors.append(_NONE if value <= 0 else hex_of(cmap, 0.12 + 0.88 * min(1.0, value / _SCALE)))
            if cells.found[row, column]:
                frames.append(box)
        _write_row(page, relation, names[row], left, right, top, table)
    page.fill(boxes, colors)
    page.outline(frames, INK, min(1.8, cell * 0.3) if paper.fixed else 1.8)
    _draw_dots(page, cells, starts, cell)
    bottom = _TOP_PX + len(cells.relations) * _ROW_PX
    _draw_bar(page, layout.MARGIN_PX + 8 if paper.is_narrow else starts[0], bottom + 26)
    page.finish(bottom + 88, _map_notes(relations, cells))
    return page


def _map_notes(relations: Relations, cells: Map) -> list[str]:
    n_rarer, by_layer = len(summary.list_relations(relations)) - len(cells.relations), not cells.groups[0][0]
    notes = [
        f"not shown: {amount(n_rarer, 'rarer relation')} without such a head" if n_rarer > 0 else "",
        "colour: accuracy above the best simple rule; grey: not above it",
        "frame: the head expresses the relation (●: the head chosen on the other half does)",
        "columns are layers: the best head of each" if by_layer else "",
        summary.explanation(relations),
        *corpus_notes(relations),
        summary.unlisted_line(relations),
    ]
    return [note for note in notes if note]


def _starts(cells: Map, left: float, cell: float, gap: float) -> list[float]:
    """Left edge of each column."""
    starts, at = [], left
    for _, n in cells.groups:
        starts += [at + number * cell for number in range(n)]
        at += n * cell + gap
    return starts


def _write_column_names(page: Page, cells: Map, starts: Sequence[float], cell: float) -> None:
    """Layers above heads; of heads as many numbers as there is room for."""
    y = _TOP_PX - 12
    size = page.paper.letters(min(11.0, cell * 0.9 + 2))
    step = max(math.ceil(24 / cell), page.label_step(cells.columns[-1], size, cell))
    every = page.label_step(cells.groups[-1][0], layout.PANEL_TITLE_PX, cells.groups[-1][1] * cell)
    first = 0
    for group, (name, n) in enumerate(cells.groups):
        if name and group % every == 0:
            page.entitle(starts[first] + n * cell / 2, y - 18, name, ha="center")
        for number in range(0, n if not page.paper.fixed else n - step + 1, step):
            at = starts[first + number] + cell / 2
            page.write(at, y, cells.columns[first + number], size, ha="center", color=FAINT)
        first += n


_Column = tuple[str, int, str]
_TABLE: tuple[_Column, ...] = (
    ("head", 12, "left"), ("accuracy", 122, "right"), ("95% interval", 222, "right"), ("baseline", 296, "right"),
    ("rule", 310, "left"), ("n", 490, "right"), ("", 506, "left"),
)  # fmt: skip


def _write_row(
    page: Page, relation: Relation, name: str, left: float, right: float, top: float, table: Sequence[_Column]
) -> None:
    """The name of a relation at its left, the numbers of the chosen head at its right."""
    y = top + _ROW_PX / 2
    row, how = summary.row(relation), summary.verdict(relation)
    ink = FAINT if how in ("no", "none") else INK
    weight = "bold" if how in ("yes", "weakly") else "normal"
    page.write(left - 10, y, name, _TEXT_PX, ha="right", color=ink, weight=weight)
    others = row.verdict if how == "others" else ""
    cells = (row.head, row.accuracy, row.interval, row.baseline, row.rule, row.n, others)
    for (title, x, side), text in zip(table, cells, strict=False):
        if top == _TOP_PX:
            page.write(right + x, _TOP_PX - 12, title, 11.0, ha=side, color=FAINT)
        page.write(right + x, y, page.lettering.spell(text), _TEXT_PX, ha=side, color=ink)


def _draw_dots(page: Page, cells: Map, starts: Sequence[float], cell: float) -> None:
    """A dot on each chosen head that expresses its relation."""
    for row, column in enumerate(cells.chosen):
        if cells.relations[row].best_found:
            dark = cells.values[row, column] > 0.55 * _SCALE
            x, y = starts[column] + (cell - 1) / 2, _TOP_PX + (row + 0.5) * _ROW_PX
            page.dot((x, y), min(3.3, cell * 0.35), "#ffffff" if dark else INK)


def _draw_bar(page: Page, x: float, y: float) -> None:
    """The colours with their numbers, in points."""
    cmap, cells = colormap("Blues"), 50
    boxes = [(x + 5 * number, y, 5.0, 12.0) for number in range(cells)]
    page.fill(boxes, [hex_of(cmap, 0.12 + 0.88 * number / cells) for number in range(cells)])
    page.outline([(x, y, 5.0 * cells, 12.0)], "#b8b8b8", 0.8)
    for tick, text in ((0.0, "0"), (0.25, "+25 points"), (_SCALE, "+50 points or more")):
        page.write(x + 5 * cells * tick / _SCALE, y + 25, text, 11.0, ha="center", color=FAINT)


# Examples -------------------------------------------------------------------------------------------------------

_WORD_PX, _LEAST_PX = 17.0, 9.0
_BOLD = 1.13  # how much wider bold words are


def examples_page(relations: Relations, examples: Sequence[Example], lettering: Lettering) -> Page:
    """Texts one under the other; over each where the head looks, below it where it should where that is not right."""
    first, width = examples[0], lettering.paper.width_px
    room_px = width - 2 * layout.MARGIN_PX - 40
    if lettering.paper.fixed:
        examples = [cut_to_fit(example, lettering, room_px) for example in examples]
    page = Page(width, lettering)
    links = [link for example in examples for link in example.links]
    page.head(
        f"{model_of(relations.run)} · {printable(first.relation, 60)} by {head_name((first.layer, first.head))}",
        f"{sum(link.right for link in links)} of {len(links)} right in these {len(examples)} · the first such texts of "
        "the half that the head was not chosen on",
    )
    top = layout.MARGIN_PX + 78.0
    for example in examples:
        room = _room(example, lettering, room_px)
        _draw_example(page, example, room, top)
        top += room.height
    note = (
        "over the words: where the head looks, the thicker the larger the weight: blue = right, orange and crossed "
        "out = wrong · below, dashed: a word that would be right"
    )
    page.finish(top + 6, [note])
    return page


def _rise(distance: float) -> float:
    """How high an arc is that goes so far."""
    return min(92.0, 14 + 0.17 * distance)


@dataclass(frozen=True)
class _Room:
    """Left and right edge of each word of an example, the font size, and the height of arcs above and below."""

    edges: tuple[Point, ...]
    size: float
    above: float
    below: float

    @property
    def height(self) -> float:
        return 34 + self.above + 30 + self.below + 22


def _room(example: Example, lettering: Lettering, width: float) -> _Room:
    edges, size = _places(example, lettering, width)
    above = max((_rise(abs(_middle(edges, link.source) - _goal(edges, link))) for link in example.links), default=0)
    below = max((_rise(abs(_middle(edges, link.source) - _right_at(edges, link))) * 0.6 for link in example.links
                 if not link.right and link.targets), default=0)  # fmt: skip
    return _Room(tuple(edges), size, above, below)


def _places(example: Example, lettering: Lettering, room: float) -> tuple[list[Point], float]:
    """Left and right edge of each word, and the font size at which all fit."""
    words = [lettering.spell(printable(word, 40)) for word in example.words]
    bold = {word for link in example.links for word in link.source}
    size, least = (lettering.paper.least_px,) * 2 if lettering.paper.fixed else (_WORD_PX, _LEAST_PX)
    while True:
        at, edges = layout.MARGIN_PX + (26.0 if example.cut_before else 10.0), []
        for number, (word, spaced) in enumerate(zip(words, example.spaced, strict=True)):
            at += size * (0.5 if spaced else 0.1)
            end = at + lettering.width_px(word, size) * (_BOLD if number in bold else 1.0)
            edges.append((at, end))
            at = end
        if at - layout.MARGIN_PX - 10 <= room or size <= least:
            return edges, size
        size = max(least, size * 0.94)


def cut_to_fit(example: Example, lettering: Lettering, room: float) -> Example:
    """The words around the first links, as many as there is room for; links to words that are left out go with them."""
    n = len(example.words)
    first, last = 0, n
    links = list(example.links)
    while last - first > 1:
        part = _part(example, links, first, last)
        edges, _ = _places(part, lettering, room)
        if edges[-1][1] - layout.MARGIN_PX - 10 <= room - 14:
            return part
        linked = {word for link in links for word in (*link.source, *[link.looked] * (link.looked >= 0))}
        middle = (min(linked, default=0) + max(linked, default=n)) / 2
        at_end = last - 1 - middle > middle - first
        if (last - 1 if at_end else first) in linked and len(links) > 1:
            links.pop()  # its words are further apart than there is room for
        elif at_end:
            last -= 1
        else:
            first += 1
    return _part(example, links, first, last)


def _part(example: Example, links: Sequence[ExampleLink], first: int, last: int) -> Example:
    """An example from one word up to another; what its links lead to outside of it is named as further away."""

    def inside(word: int) -> bool:
        return first <= word < last

    moved = [
        replace(
            link,
            source=tuple(word - first for word in link.source if inside(word)),
            looked=link.looked - first if inside(link.looked) else -1,
            targets=tuple(word - first for word in link.targets if inside(word)),
        )
        for link in links
    ]
    return replace(
        example,
        words=tuple(example.words[first:last]),
        spaced=tuple(example.spaced[first:last]),
        links=tuple(link for link in moved if link.source),
        cut_before=example.cut_before or first > 0,
        cut_after=example.cut_after or last < len(example.words),
    )


def _draw_example(page: Page, example: Example, room: _Room, top: float) -> None:
    caption = page.lettering.fit(summary.example_line(example), layout.CAPTION_PX, page.width_px - 2 * layout.MARGIN_PX)
    page.write(layout.MARGIN_PX, top + 10, caption, layout.CAPTION_PX, ha="left", color=FAINT)
    line = top + 34 + room.above + 15
    colors: dict[int, str] = {}
    for link in example.links:
        colors |= dict.fromkeys(link.source, summary.RIGHT if link.right else summary.WRONG)
    for number, (word, (start, _)) in enumerate(zip(example.words, room.edges, strict=True)):
        spelled = page.lettering.spell(printable(word, 40))
        weight = "bold" if number in colors else "normal"
        page.write(start, line, spelled, room.size, ha="left", color=colors.get(number, INK), weight=weight)
    for cut, x in ((example.cut_before, room.edges[0][0] - 16), (example.cut_after, room.edges[-1][1] + 14)):
        if cut:
            page.write(x, line, "…", room.size, ha="center", color=FAINT)
    for link in example.links:
        _draw_link(page, link, room.edges, line)


def _goal(edges: Sequence[Point], link: ExampleLink) -> float:
    """Where a link's arc ends; at an edge where the word is not among those shown."""
    return _middle(edges, (link.looked,)) if link.looked >= 0 else edges[-1][1] + 14


def _right_at(edges: Sequence[Point], link: ExampleLink) -> float:
    """Where the nearest word is that would be right."""
    return _middle(edges, (min(link.targets, key=lambda word: abs(word - link.source[0])),))


def _draw_link(page: Page, link: ExampleLink, edges: Sequence[Point], line: float) -> None:
    source, goal = _middle(edges, link.source), _goal(edges, link)
    color = summary.RIGHT if link.right else summary.WRONG
    arc = _arc(source, goal, line - 15, -_rise(abs(goal - source)))
    page.lines([arc], color=color, width_px=1.2 + 3 * min(1.0, link.weight))
    page.lines([_arrow(arc)], color=color, width_px=1.6)
    if link.right or not link.targets:
        return
    x, y = arc[len(arc) // 2]
    page.lines([[(x - 5, y - 5), (x + 5, y + 5)], [(x - 5, y + 5), (x + 5, y - 5)]], color=color, width_px=1.8)
    right = _right_at(edges, link)
    arc = _arc(source, right, line + 15, 0.6 * _rise(abs(right - source)))
    page.lines([arc], color=summary.GOLD, width_px=1.4, linestyles="dashed")
    page.lines([_arrow(arc)], color=summary.GOLD, width_px=1.4)


def _middle(edges: Sequence[Point], words: Sequence[int]) -> float:
    return (edges[words[0]][0] + edges[words[-1]][1]) / 2


def _arc(source: float, goal: float, y: float, height: float) -> list[Point]:
    """Half an ellipse, flattened at its top as a parabola of fourth degree is."""
    steps = [step / 40 for step in range(41)]
    return [(source + (goal - source) * t, y + height * (1 - (2 * t - 1) ** 4)) for t in steps]


def _arrow(arc: Sequence[Point]) -> list[Point]:
    """The head of an arrow at the end of an arc."""
    x, y = arc[-1]
    up = -1.0 if arc[len(arc) // 2][1] < y else 1.0
    return [(x - 4.5, y + up * 7), (x, y), (x + 4.5, y + up * 7)]


def _texts(relations: Relations) -> list[str]:
    """All texts of a record that a figure may show, to find fonts for."""
    words = [word for example in relations.examples for word in example.words]
    names = [text for relation in relations.relations for text in (relation.name, relation.rule)]
    sources = [example.source for example in relations.examples]
    titles = [model_of(relations.run), corpus_line(relations), "●…"]
    return [printable(text, 400) for text in (*words, *names, *sources, *titles)]
