"""Report the roles of heads: what their evidence amounts to, and the first role of every head as a coloured letter."""

import colorsys
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT
from attnscope.drawing.inks import ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import Number, Page
from attnscope.errors import amount
from attnscope.report.blocks import Report
from attnscope.report.head_maps import LEFT_PX, HeadCells, cells_of, grids_of, name_kinds, place_kinds
from attnscope.report.matrix import head_grid, room_for
from attnscope.report.numbers import number
from attnscope.report.plain_text import heading
from attnscope.report.wording import label, printable
from attnscope.results.result import Result

UNCLASSIFIED = "·"

_EMPTY = "#f3f3f3"
"""The colour of a head without a role."""

_MOST_NAMED = 12
"""Heads that a sentence names; of more it says how many."""

_LEGEND_PX = 380
"""Width of an entry of the legend."""

_LEAST_CELL_PX, _VALUE_CELL_PX = 12, 32
"""Height of a cell: on paper at least, and from which on a number has room below the letter."""

_AROUND_PX = 620
"""On paper, room for title, legend and notes."""


@dataclass(frozen=True)
class Mark:
    """The letter and colour "#rrggbb" of a role: a capital letter, whose small form marks tentative roles."""

    glyph: str
    color: str


# Okabe and Ito's seven, then colours that were chosen one by one to be as far as possible from all before them: OKLab
# distance, the smallest of normal, deutan, protan and tritan vision (Machado 2009).
MARKS = {
    "previous_token": Mark("P", "#0072B2"),
    "next_token": Mark("N", "#56B4E9"),
    "self_token": Mark("S", "#15197C"),
    "local": Mark("L", "#927EEC"),
    "same_token": Mark("E", "#009E73"),
    "induction": Mark("I", "#D55E00"),
    "similar_token": Mark("M", "#5C0300"),
    "rare": Mark("R", "#CC79A7"),
    "first_token": Mark("F", "#F0E442"),
    "outlier_token": Mark("T", "#88FCA4"),
    "sink": Mark("K", "#E69F00"),
    "delimiter": Mark("D", "#694C50"),
    "diffuse": Mark("U", "#AFC9B4"),
}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZΓΔΘΛΞΠΣΦΨΩ"


def marks_for(names: AbstractSet[str]) -> dict[str, Mark]:
    """Return a mark for each of these roles: the known ones first, each in its fixed place.

    Roles that are not known get a letter of their name, then any that is left; colours are a golden angle apart.
    """
    marks = {name: mark for name, mark in MARKS.items() if name in names}
    taken = {mark.glyph for mark in MARKS.values()}
    for row, name in enumerate(sorted(names - MARKS.keys())):
        wanted = [letter for letter in name.upper() if letter in _LETTERS]
        glyph = next((letter for letter in (*wanted, *_LETTERS) if letter not in taken), "Ŋ")
        taken.add(glyph)
        parts = colorsys.hls_to_rgb(row * 0.618034 % 1, (0.38, 0.55, 0.72)[row % 3], 0.6)
        marks[name] = Mark(glyph, "#" + "".join(f"{round(part * 255):02X}" for part in parts))
    return marks


def marks_of(result: Result) -> dict[str, Mark]:
    """Return a mark for each role that occurs in a result or its control, in a fixed order."""
    names = [*result.table("heads")["role"].tolist(), *result.table("control")["role"].tolist()]
    return marks_for({name for joined in names for name in joined.split("+")} - {""})


def first_role(result: Result) -> NDArray[np.int64]:
    """Return for each head the row of its first role, (head,); -1 = it has none."""
    owners = result.table("roles")["head"]
    first = np.full(len(result.table("heads")), -1)
    first[owners[::-1]] = np.arange(len(owners))[::-1]
    return first


# What is said


def role_notes(result: Result) -> list[str]:
    """Return what a reader of roles must know beside them: one sentence each."""
    return [line for line in (evidence_line(result), idle_line(result), control_line(result)) if line]


def control_line(result: Result) -> str:
    """Say how many heads of a model with random weights have roles; empty = none was studied."""
    roles = result.table("control")["role"].tolist()
    if not roles:
        return ""
    counts = Counter(label(name) or "unclassified" for joined in roles for name in joined.split("+"))
    said = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    return f"untrained control (random weights, same texts), {amount(len(roles), 'head')}: {said}"


def evidence_line(result: Result) -> str:
    """Say what few texts mean for roles; empty where there are enough, or the result does not say how many."""
    fewest, least = (result.options.get(name) for name in ("fewest_texts", "least_texts"))
    effective = result.corpus.get("effective_texts")
    # The effective number of texts, by Kish: unequal lengths count for less.
    weight = ""
    if isinstance(effective, int | float) and len(result.table("heads")):
        if result.corpus.get("n_texts") != 1:
            weight = f"; effective number of texts: {effective:.1f}"
        # Too few texts for any role.
        if isinstance(least, int) and effective < least:
            return (
                f"too few texts to say what heads do: {least} at least{weight}. Give a file of texts (--file), or cut "
                "long ones into chunks (--chunk 512); where heads look in one text: attnscope heatmap"
            )
    # Enough texts for tentative roles only.
    if not result.table("roles")["tentative"].any():
        return ""
    return f"tentative: few texts ({least} to {fewest} of equal length){weight}"


def idle_rows(result: Result) -> NDArray[np.bool_]:
    """Return which heads were taken out (`heads --causal`) and make no difference by any ablation, (head,).

    That is so where the upper end of each effect's interval (its value, where a text alone gives none) is below what
    `options["causal"]` calls nothing.
    """
    heads = result.table("heads")
    causal = result.options["causal"]
    tops = []
    for mode in causal["modes"]:
        effect = f"{mode}_{causal['quantity']}"
        high = heads.part(effect, "high")
        tops.append(np.where(np.isfinite(high), high, heads[effect]))
    is_idle: NDArray[np.bool_] = np.max(tops, 0) < causal["nothing_below"]
    return is_idle


def idle_line(result: Result) -> str:
    """Say which heads look like something and do nothing; empty where none was taken out (`heads --causal`)."""
    causal = result.options.get("causal")
    roles = result.table("heads")["role"]
    if not isinstance(causal, Mapping) or not (roles != "").any():
        return ""
    what = f"{printable(causal.get('what', 'effect'))} below {causal['nothing_below']:g}"
    idle = np.flatnonzero((roles != "") & idle_rows(result)).tolist()
    if not idle:
        return f"{amount(int((roles != '').sum()), 'head')} with a role, and each does something: none has {what}"
    named = ", ".join(
        f"{result.head_names[row]} ({label(roles[row].partition('+')[0])})" for row in idle[:_MOST_NAMED]
    )
    more = f" and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
    return f"look like something and do nothing ({what}): {named}{more}"


# The first role of each head


@dataclass(frozen=True, eq=False)
class RoleGrid:
    """The view of the first role of every head, in the terminal and as a figure.

    Letters alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, cells narrow first, then
    its heads go on below. The kinds of attention of an encoder-decoder stand one under the other.
    """

    result: Result

    def show(self, console: Console, *, every: bool) -> Sequence[RenderableType]:
        """Return the grids, one per kind of attention, and the legend."""
        heads = self.result.table("heads")
        letters = self._letters()
        kinds = list(dict.fromkeys(heads["kind"].tolist()))
        parts: list[RenderableType] = []
        # A grid per kind of attention.
        for kind in kinds:
            if len(kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            rows = np.flatnonzero(heads["kind"] == kind).tolist()
            parts.append(_draw_letters({heads.places[row]: letters[row] for row in rows}, console))
        # The legend, with the count of each role.
        entries = [
            Text(f" {mark.glyph} ", style=_style(mark)).append(f" {words}")
            for mark, words in self._legend()
        ]
        hints = [_MORE] if any("+" in role for role in heads["role"].tolist()) else []
        if self.result.table("roles")["tentative"].any():
            hints.append("a small letter = tentative")
        return [*parts, Text(), Columns(entries, padding=(0, 2)), Text("; ".join(hints), style="dim")]

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the figure: letters with the values that roles rest on."""
        heads = self.result.table("heads")
        paper = lettering.paper
        grids = grids_of(heads)
        n_across, n_down = cells_of(grids)

        # The cells: as low as a page of paper wants.
        width = min(110.0, (paper.room_px - LEFT_PX) / n_across)
        height = max(20, min(round(0.7 * width), 1500 // n_down))
        if paper.fixed:
            height = max(_LEAST_CELL_PX, min(height, int(paper.most_px - _AROUND_PX) // n_down))
        needed = 2 * layout.MARGIN_PX + LEFT_PX + n_across * width
        page = Page(paper.width_for(layout.MIN_WIDTH_PX, needed), lettering)
        page.head(
            f"{report.model} · what its {amount(len(heads), 'head does', 'heads do')}", report.source
        )
        cells, bottom = place_kinds(grids, (width, height))
        name_kinds(page, cells)
        has_values = self._draw_cells(page, cells)

        # The legend and the notes.
        entries = [(words, mark.color, mark.glyph) for mark, words in self._legend()]
        columns = max(1, int((page.width_px - 2 * layout.MARGIN_PX) // _LEGEND_PX))
        bottom = page.legend(layout.MARGIN_PX, bottom + 34, entries, columns)
        notes = [_MORE]
        if has_values:
            notes.append("number: the value of the measure that the role rests on")
        page.finish(bottom + 20, [*notes, *role_notes(self.result), *report.problems])
        return page

    def _letters(self) -> list[tuple[str, Mark | None]]:
        """Return the letter of each head, with a + where it has more roles, and its mark."""
        heads, roles = self.result.table("heads"), self.result.table("roles")
        marks = marks_of(self.result)
        letters: list[tuple[str, Mark | None]] = []
        # The first role gives the letter; a small one is tentative.
        for row, first in enumerate(first_role(self.result).tolist()):
            if first < 0:
                letters.append((UNCLASSIFIED, None))
                continue
            mark = marks[str(roles["role"][first])]
            more = "+" if "+" in str(heads["role"][row]) else ""
            letter = mark.glyph.lower() if roles["tentative"][first] else mark.glyph
            letters.append((letter + more, mark))
        return letters

    def _legend(self) -> list[tuple[Mark, str]]:
        """Return what each letter means and how many heads have it."""
        roles = self.result.table("roles")
        firsts = first_role(self.result)
        counts = Counter(roles["role"].tolist())
        first_counts = Counter(roles["role"][firsts[firsts >= 0]].tolist())
        entries = []
        # Only roles that some head has; a role may be second in some of its heads.
        for name, mark in marks_of(self.result).items():
            if not counts[name]:
                continue
            words = f"{label(name)} {counts[name]}"
            if first_counts[name] < counts[name]:
                words += f", first in {first_counts[name]}"
            entries.append((mark, words))
        n_none = int((firsts < 0).sum())
        if n_none:
            entries.append((Mark(UNCLASSIFIED, _EMPTY), f"unclassified {n_none}"))
        return entries

    def _draw_cells(self, page: Page, cells: HeadCells) -> bool:
        """Draw all heads; return whether cells have room for values below their letters."""
        heads, roles = self.result.table("heads"), self.result.table("roles")
        width, height = (size - 3 for size in cells.size)
        size = page.paper.letters(min(height * 0.32, 26.0))
        value_size = page.paper.letters(min(height * 0.27, width * 0.27, 19.0))
        has_values = height >= _VALUE_CELL_PX and page.lettering.width_px("0.00", value_size) <= width
        corners = cells.corners_of(heads)
        boxes = []
        colors = []
        numbers = []
        firsts = first_role(self.result).tolist()
        for (x, y), first, (letter, mark) in zip(corners, firsts, self._letters(), strict=True):
            boxes.append((x, y, width, height))
            colors.append(_EMPTY if mark is None else mark.color)
            if mark is None:
                numbers.append(Number(x + width / 2, y + height * 0.5, letter, size, FAINT))
                continue
            ink = ink_on(mark.color)
            up = 0.18 if has_values else 0.0
            numbers.append(
                Number(x + width / 2, y + height * (0.5 - up), letter, size, ink, is_bold=True)
            )
            if has_values:
                value = number(roles["value"][first])
                numbers.append(Number(x + width / 2, y + height * 0.72, value, value_size, ink))
        page.fill(boxes, colors)
        page.numbers(numbers)
        return has_values


_MORE = "the letter is the head's strongest role, or a sink's if it has no other; +: it has more roles"


def _draw_letters(letters: Mapping[tuple[int, int], tuple[str, Mark | None]], console: Console) -> Text:
    """Return a grid of letters by layer and head."""
    # Cells are as wide as the terminal allows, two to four letters.
    layers = range(max(layer for layer, _ in letters) + 1)
    n_heads = max(head for _, head in letters) + 1
    cell = max(2, min(4, room_for(layers, console.width) // n_heads))
    before = " " if cell == 4 else ""
    after = "" if cell == 2 else " "

    def draw(text: Text, layer: int, head: int) -> None:
        # A head that was not measured leaves a gap.
        if (layer, head) not in letters:
            text.append(" " * cell)
            return
        letter, mark = letters[layer, head]
        style = "dim" if mark is None else _style(mark)
        text.append(f"{before}{letter:<2}", style=style).append(after)

    return head_grid(layers, range(n_heads), cell, console.width, draw)


def _style(mark: Mark) -> Style:
    return Style(color=ink_on(mark.color), bgcolor=mark.color, bold=True)
