"""Report the roles of heads: what their evidence amounts to, and the first role of every head as a coloured letter.

`heads` and `head_lines` put these parts into their report; pages take the letters and colours.
"""

import colorsys
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

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
from attnscope.report.head_maps import LEFT_PX, HeadCells, count_cells, grids_of, name_kinds, place_kinds
from attnscope.report.matrix import draw_head_grid, room_for_heads
from attnscope.report.numbers import number
from attnscope.report.plain_text import heading
from attnscope.report.wording import label, list_some, printable
from attnscope.results.result import Result

SINKS = ("first_token", "outlier_token", "sink", "delimiter")
"""Roles of heads that rest: their attention goes where it does nothing."""

_FAMILIES = {
    "rest mostly on sinks (special tokens, the first token)": SINKS,
    "attend to neighbours": ("previous_token", "next_token", "self_token", "local"),
    "look for the same or a similar token": ("same_token", "induction", "similar_token"),
    "look for rare tokens": ("rare",),
    "spread evenly": ("diffuse",),
}
"""What heads do by their first role, in the words of the answer."""

_MOST_NAMED = 12
"""Heads that a sentence names; of more it says how many."""

_LETTER_NOTE = (
    "the letter is the head's strongest role, or a sink's if it has no other; +: it has more roles"
)

_CELL_PX = 110.0
"""Width of a cell at most."""

_SCREEN_PX = 1500
"""Height of all cells together on a screen; a cell is 20 pixels high at least."""

_AROUND_PX = 620
"""On paper, room for title, legend and notes."""

_PAPER_CELL_PX = 12
"""Height of a cell on paper at least."""

_VALUE_CELL_PX = 32
"""Height from which on a cell has room for a value below its letter."""

_GAP_PX = 3
"""Gap between cells."""

_LEGEND_PX = 380
"""Width of an entry of the legend."""


@dataclass(frozen=True)
class Mark:
    """Hold the letter and the colour "#rrggbb" of a role: a capital letter, whose small form marks tentative roles."""

    glyph: str
    color: str


NO_ROLE = Mark("·", "#f3f3f3")

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

_GOLDEN_ANGLE = 0.618034
"""The golden angle as a share of the circle: hues that are so far apart never come close to an earlier one."""


def marks_for(names: AbstractSet[str]) -> dict[str, Mark]:
    """Return a mark for each of these roles: the known ones first, each in its fixed place.

    Roles that are not known get a letter of their name, then any that is left; hues are a golden angle apart.
    """
    marks = {name: mark for name, mark in MARKS.items() if name in names}
    taken = {mark.glyph for mark in MARKS.values()}
    for row, name in enumerate(sorted(names - MARKS.keys())):
        letters = [letter for letter in name.upper() if letter in _LETTERS]
        glyph = next((letter for letter in (*letters, *_LETTERS) if letter not in taken), "Ŋ")
        taken.add(glyph)
        hue = row * _GOLDEN_ANGLE % 1
        lightness = (0.38, 0.55, 0.72)[row % 3]
        red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, 0.6))
        marks[name] = Mark(glyph, f"#{red:02X}{green:02X}{blue:02X}")
    return marks


def marks_of(result: Result) -> dict[str, Mark]:
    """Return a mark for each role that occurs in a result or its control, in a fixed order."""
    # The roles of a head are joined by "+".
    roles = [*result.table("heads")["role"].tolist(), *result.table("control")["role"].tolist()]
    return marks_for({*"+".join(roles).split("+")} - {""})


def first_role(result: Result) -> NDArray[np.int64]:
    """Return for each head the row of its first role in the table of roles, (head,); -1 = it has none."""
    heads = result.table("roles")["head"]
    first = np.full(len(result.table("heads")), -1)
    # From the last row to the first, as the last assignment to a head stays.
    first[heads[::-1]] = np.arange(len(heads))[::-1]
    return first


# What is said


def role_notes(result: Result) -> list[str]:
    """Return what a reader of roles must know beside them: one sentence each."""
    return list(filter(None, [evidence_line(result), idle_line(result), control_line(result)]))


def count_first_roles(result: Result) -> str:
    """Say how many heads do what, each counted once, by its first role; empty if none has a role."""
    roles = result.table("heads")["role"].tolist()
    # Families put roles with one purpose together; other roles are named.
    families = {name: words for words, names in _FAMILIES.items() for name in names}
    counts = dict.fromkeys(_FAMILIES, 0)
    for name in roles:
        first = name.partition("+")[0]
        if first:
            words = families.get(first, f"have the role {label(first)}")
            counts[words] = counts.get(words, 0) + 1
    n_without = roles.count("")
    if n_without == len(roles):
        return ""
    # The most heads first, and those without a role last: "5 of 144 heads attend ..., 3 look ..., 2 have no role".
    parts: list[str] = []
    for words, n in [*Counter(counts).most_common(), ("have no role", n_without)]:
        out_of = "" if parts else f" of {amount(len(roles), 'head')}"
        verb, _, rest = words.partition(" ")
        if n == 1:
            verb = "has" if verb == "have" else f"{verb}s"
        if n:
            parts.append(f"{n}{out_of} {verb} {rest}")
    return ", ".join(parts)


def control_line(result: Result) -> str:
    """Say how many heads of a model with random weights have roles; empty = none was studied."""
    roles = result.table("control")["role"].tolist()
    if not roles:
        return ""
    # A head without a role counts as one with the role "".
    counts = Counter("+".join(roles).split("+"))
    listed = ", ".join(f"{n} {label(name) or 'unclassified'}" for name, n in counts.most_common())
    return f"untrained control (random weights, same texts), {amount(len(roles), 'head')}: {listed}"


def evidence_line(result: Result) -> str:
    """Say what few texts mean for roles; empty where there are enough, or the result does not say how many."""
    # Below `least` texts there are no roles, below `enough` only tentative ones.
    least = result.options.get("least_texts")
    enough = result.options.get("fewest_texts")
    effective = result.corpus.get("effective_texts")
    are_few = False
    if isinstance(effective, int | float) and isinstance(least, int):
        are_few = effective < least
    if are_few and len(result.table("heads")):
        # The effective number of texts, by Kish: unequal lengths count for less.
        effective_words = ""
        if result.corpus.get("n_texts") != 1:
            effective_words = f"; effective number of texts: {effective:.1f}"
        return (
            f"too few texts to say what heads do: {least} at least{effective_words}. Give a file of texts "
            "(--file), or cut long ones into chunks (--chunk 512); where heads look in one text: attnscope heatmap"
        )
    if not result.table("roles")["tentative"].any():
        return ""
    return f"tentative: a role that rests on few texts ({least} to {enough} of equal length)"


def idle_rows(result: Result) -> NDArray[np.bool_]:
    """Return which heads were taken out (`heads --causal`) and make no difference by any ablation, (head,).

    That is so where the upper end of each effect's interval (its value, where a text alone gives none) is below what
    `options["causal"]` calls nothing.
    """
    heads = result.table("heads")
    causal = result.options["causal"]
    # The upper end of each mode's effect, (mode, head).
    ends = []
    for mode in causal["modes"]:
        effect = f"{mode}_{causal['quantity']}"
        high = heads.part(effect, "high")
        ends.append(np.where(np.isfinite(high), high, heads[effect]))
    is_idle: NDArray[np.bool_] = np.max(ends, 0) < causal["nothing_below"]
    return is_idle


def idle_line(result: Result) -> str:
    """Say which heads look like something and do nothing; empty where none was taken out (`heads --causal`)."""
    causal = result.options.get("causal")
    roles = result.table("heads")["role"]
    has_role = roles != ""
    if not isinstance(causal, Mapping) or not has_role.any():
        return ""
    bound = f"{printable(causal.get('what', 'effect'))} below {causal['nothing_below']:g}"
    head_names = result.head_names
    idle_heads = []
    for row in np.flatnonzero(has_role & idle_rows(result)).tolist():
        first = roles[row].partition("+")[0]
        idle_heads.append(f"{head_names[row]} ({label(first)})")
    if not idle_heads:
        return f"{amount(int(has_role.sum()), 'head')} with a role, and each does something: none has {bound}"
    return f"look like something and do nothing ({bound}): {list_some(idle_heads, _MOST_NAMED)}"


# The first role of each head


@dataclass(frozen=True, eq=False)
class RoleGrid:
    """Show the first role of every head, in the terminal and as a figure.

    Letters alone suffice (NO_COLOR is respected). Where a layer is wider than the terminal, cells narrow first, then
    its heads go on below. The kinds of attention of an encoder-decoder stand one under the other.
    """

    result: Result

    def show(self, console: Console, *, every: bool) -> Sequence[RenderableType]:
        """Return a grid per kind of attention and the legend; `every` changes nothing."""
        heads = self.result.table("heads")
        places = heads.places
        marks = self._marks_of_heads()
        kinds = list(dict.fromkeys(heads["kind"].tolist()))
        parts: list[RenderableType] = []
        for kind in kinds:
            if len(kinds) > 1:
                parts.append(heading(f"{printable(kind)} attention"))
            rows = np.flatnonzero(heads["kind"] == kind).tolist()
            parts.append(_draw_letters({places[row]: marks[row] for row in rows}, console))
        # The legend, with the count of each role.
        entries = []
        for mark, words in self._legend():
            entries.append(Text(f" {mark.glyph} ", style=_style(mark)).append(f" {words}"))
        hints = []
        if any("+" in roles for roles in heads["role"].tolist()):
            hints.append(_LETTER_NOTE)
        if self.result.table("roles")["tentative"].any():
            hints.append("a small letter = tentative")
        return [*parts, Text(), Columns(entries, padding=(0, 2)), Text("; ".join(hints), style="dim")]

    def draw(self, report: Report, lettering: Lettering) -> Page:
        """Return the figure: letters with the values that roles rest on."""
        heads = self.result.table("heads")
        paper = lettering.paper
        grids = grids_of(heads)
        n_across, n_down = count_cells(grids)

        # The cells: lower where there are many layers, and on paper so low that all stand on one page.
        width = min(_CELL_PX, (paper.room_px - LEFT_PX) / n_across)
        height = max(20, min(round(0.7 * width), _SCREEN_PX // n_down))
        if paper.fixed:
            room = int(paper.max_height_px - _AROUND_PX)
            height = max(_PAPER_CELL_PX, min(height, room // n_down))
        needed = 2 * layout.MARGIN_PX + LEFT_PX + n_across * width
        page = Page(paper.width_for(layout.PAGE_WIDTH_PX, needed), lettering)
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
        notes = [_LETTER_NOTE]
        if has_values:
            notes.append("number: the value of the measure that the role rests on")
        page.finish(bottom + 20, [*notes, *role_notes(self.result), *report.problems])
        return page

    def _marks_of_heads(self) -> list[Mark]:
        """Return the mark of each head's first role: a small letter is tentative, a + says that it has more roles."""
        roles = self.result.table("roles")
        known = marks_of(self.result)
        marks = []
        names_of_heads = self.result.table("heads")["role"].tolist()
        for first, names in zip(first_role(self.result), names_of_heads, strict=True):
            if first < 0:
                marks.append(NO_ROLE)
                continue
            mark = known[str(roles["role"][first])]
            letter = mark.glyph.lower() if roles["tentative"][first] else mark.glyph
            marks.append(replace(mark, glyph=f"{letter}+" if "+" in names else letter))
        return marks

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
            entries.append((NO_ROLE, f"unclassified {n_none}"))
        return entries

    def _draw_cells(self, page: Page, cells: HeadCells) -> bool:
        """Draw all heads; return whether cells have room for values below their letters."""
        width, height = cells.size
        width -= _GAP_PX
        height -= _GAP_PX
        letter_px = page.paper.letters(min(height * 0.32, 26.0))
        value_px = page.paper.letters(min(height * 0.27, width * 0.27, 19.0))
        has_values = height >= _VALUE_CELL_PX and page.lettering.width_px("0.00", value_px) <= width
        # How far down a cell its letter and its value stand.
        letter_y = height * 0.5
        role_y = height * 0.32 if has_values else letter_y
        value_y = height * 0.72
        corners = cells.corners_of(self.result.table("heads"))
        firsts = first_role(self.result).tolist()
        values = self.result.table("roles")["value"]
        marks = self._marks_of_heads()
        numbers = []
        for (left, top), first, mark in zip(corners, firsts, marks, strict=True):
            x = left + width / 2
            if first < 0:
                numbers.append(Number(x, top + letter_y, mark.glyph, letter_px, FAINT))
                continue
            ink = ink_on(mark.color)
            numbers.append(Number(x, top + role_y, mark.glyph, letter_px, ink, is_bold=True))
            if has_values:
                numbers.append(Number(x, top + value_y, number(values[first]), value_px, ink))
        page.fill([(left, top, width, height) for left, top in corners], [mark.color for mark in marks])
        page.numbers(numbers)
        return has_values


def _draw_letters(marks: Mapping[tuple[int, int], Mark], console: Console) -> Text:
    """Return a grid of letters, layers down and heads across, from marks by (layer, head)."""
    layers = range(max(layer for layer, _ in marks) + 1)
    n_heads = max(head for _, head in marks) + 1
    # Cells are as wide as the terminal allows, two to four letters: a letter, a + and a blank at each side.
    cell = max(2, min(4, room_for_heads(layers, console.width) // n_heads))
    before = " " if cell == 4 else ""
    after = "" if cell == 2 else " "

    def draw(text: Text, layer: int, head: int) -> None:
        # A head that was not measured leaves a gap.
        if (layer, head) not in marks:
            text.append(" " * cell)
            return
        mark = marks[layer, head]
        style = "dim" if mark is NO_ROLE else _style(mark)
        text.append(f"{before}{mark.glyph:<2}", style=style).append(after)

    return draw_head_grid(layers, range(n_heads), cell, console.width, draw)


def _style(mark: Mark) -> Style:
    return Style(color=ink_on(mark.color), bgcolor=mark.color, bold=True)
