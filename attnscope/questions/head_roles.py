"""Say in sentences what the roles of heads amount to, and show the first role of every head as a coloured letter.

A role is what a head does, such as "previous_token"; a head's roles are joined by "+", the strongest first but sinks
last. `heads` and `head_steps` report these sentences and letters; pages take the letters and colours.
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
from attnscope.drawing.inks import text_color_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import CellNumber, FigurePage
from attnscope.errors import amount
from attnscope.report.blocks import Report
from attnscope.report.head_maps import LEFT_PX, HeadCells, count_cells, grids_of, name_kinds, place_kinds
from attnscope.report.matrix import draw_head_grid, room_for_heads
from attnscope.report.numbers import number
from attnscope.report.plain_text import heading
from attnscope.report.wording import label, list_some, printable
from attnscope.results.result import Result

SINK_ROLES = ("first_token", "outlier_token", "sink", "delimiter")
"""Roles of heads that attend to sinks: the keys that a head rests on when it has nothing to do."""

_FAMILIES = {
    "rest mostly on sinks (special tokens, the first token)": SINK_ROLES,
    "attend to neighbours": ("previous_token", "next_token", "self_token", "local"),
    "look for the same or a similar token": ("same_token", "induction", "similar_token"),
    "look for rare tokens": ("rare",),
    "spread evenly": ("diffuse",),
}
"""What heads do, in the words of the answer, and the first roles that count as that."""

_MAX_NAMED = 12
"""The most heads that a sentence names; it counts the others."""

_LETTER_NOTE = (
    "the letter is the head's strongest role, or a sink's if it has no other; +: it has more roles"
)

_CELL_PX = 110.0
"""The largest width of a cell."""

_SCREEN_PX = 1500
"""The height of all cells together on a screen, if each gets its least height of 20 pixels."""

_AROUND_PX = 620
"""The height on paper that title, legend and notes need."""

_PAPER_CELL_PX = 12
"""The least height of a cell on paper."""

_VALUE_CELL_PX = 32
"""The least height of a cell that has room for a value below its letter."""

_GAP_PX = 3
"""Gap between cells."""

_LEGEND_PX = 380
"""Width of an entry of the legend."""


@dataclass(frozen=True)
class RoleMark:
    """Hold how a role is shown.

    Attributes:
        glyph: Its capital letter; the small letter marks a tentative role. A "+" after it says that the head has more
            roles.
        color: Its colour, "#rrggbb".
    """

    glyph: str
    color: str


NO_ROLE = RoleMark("·", "#f3f3f3")

# Seven colours are Okabe and Ito's. Each other one was chosen to be as far as possible from all before it, by the OKLab
# distance that is least among normal, deutan, protan and tritan vision (Machado 2009).
MARKS = {
    "previous_token": RoleMark("P", "#0072B2"),
    "next_token": RoleMark("N", "#56B4E9"),
    "self_token": RoleMark("S", "#15197C"),
    "local": RoleMark("L", "#927EEC"),
    "same_token": RoleMark("E", "#009E73"),
    "induction": RoleMark("I", "#D55E00"),
    "similar_token": RoleMark("M", "#5C0300"),
    "rare": RoleMark("R", "#CC79A7"),
    "first_token": RoleMark("F", "#F0E442"),
    "outlier_token": RoleMark("T", "#88FCA4"),
    "sink": RoleMark("K", "#E69F00"),
    "delimiter": RoleMark("D", "#694C50"),
    "diffuse": RoleMark("U", "#AFC9B4"),
}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZΓΔΘΛΞΠΣΦΨΩ"

_GOLDEN_ANGLE = 0.618034
"""The golden angle as a share of the circle: hues in steps of it never come close to an earlier hue."""


def marks_for(names: AbstractSet[str]) -> dict[str, RoleMark]:
    """Return a mark for each of these roles: first those in `MARKS`, in the order of `MARKS`, then all others.

    A role without a mark, as a record of another version may have, gets a letter of its name that is not taken, else
    any other letter, and a hue of its own.
    """
    marks = {name: mark for name, mark in MARKS.items() if name in names}
    taken = {mark.glyph for mark in MARKS.values()}
    for index, name in enumerate(sorted(names - MARKS.keys())):
        letters_of_name = [letter for letter in name.upper() if letter in _LETTERS]
        # Ŋ, once all letters are taken.
        glyph = next((letter for letter in (*letters_of_name, *_LETTERS) if letter not in taken), "Ŋ")
        taken.add(glyph)
        hue = index * _GOLDEN_ANGLE % 1
        lightness = (0.38, 0.55, 0.72)[index % 3]
        red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, 0.6))
        marks[name] = RoleMark(glyph, f"#{red:02X}{green:02X}{blue:02X}")
    return marks


def marks_of(result: Result) -> dict[str, RoleMark]:
    """Return a mark for each role that occurs in a result or its untrained control, in a fixed order."""
    names: set[str] = set()
    for table in ("heads", "control"):
        for roles in result.table(table)["role"].tolist():
            names.update(roles.split("+"))
    # A head without a role has the name "".
    return marks_for(names - {""})


def first_role_rows(result: Result) -> NDArray[np.int64]:
    """Return the row of each head's first role in the table "roles", (head,); -1 = the head has no role."""
    heads = result.table("roles")["head"]
    first = np.full(len(result.table("heads")), -1)
    # Of several assignments to a head the last one stays, so the rows go from last to first.
    first[heads[::-1]] = np.arange(len(heads))[::-1]
    return first


# What is said


def role_notes(result: Result) -> list[str]:
    """Return what a reader must know about the roles: few texts, heads that do nothing, and the untrained control."""
    return list(filter(None, [evidence_line(result), idle_line(result), control_line(result)]))


def count_first_roles(result: Result) -> str:
    """Say how many heads do what, such as "5 of 144 heads attend to neighbours, 3 spread evenly, 2 have no role".

    A head counts once, by its first role. The text is empty if no head has a role.
    """
    roles_of_heads = result.table("heads")["role"].tolist()
    n_without = roles_of_heads.count("")
    if n_without == len(roles_of_heads):
        return ""
    # A role in no family is named. Families come first among equal counts.
    families = {role: words for words, roles in _FAMILIES.items() for role in roles}
    counts = Counter(dict.fromkeys(_FAMILIES, 0))
    for roles in roles_of_heads:
        first_role = roles.partition("+")[0]
        if first_role:
            counts[families.get(first_role, f"have the role {label(first_role)}")] += 1
    # The most frequent first, and heads without a role last.
    phrases: list[str] = []
    for words, n in [*counts.most_common(), ("have no role", n_without)]:
        if not n:
            continue
        # The first phrase says out of how many heads.
        out_of = "" if phrases else f" of {amount(len(roles_of_heads), 'head')}"
        verb, _, rest = words.partition(" ")
        if n == 1:
            verb = "has" if verb == "have" else f"{verb}s"
        phrases.append(f"{n}{out_of} {verb} {rest}")
    return ", ".join(phrases)


def control_line(result: Result) -> str:
    """Say which roles heads of the same architecture with random weights get; empty = no such model was studied."""
    roles = result.table("control")["role"].tolist()
    if not roles:
        return ""
    counts: Counter[str] = Counter()
    for names in roles:
        # A head without a role counts under the name "".
        counts.update(names.split("+"))
    listed = ", ".join(f"{n} {label(name) or 'unclassified'}" for name, n in counts.most_common())
    return f"untrained control (random weights, same texts), {amount(len(roles), 'head')}: {listed}"


def evidence_line(result: Result) -> str:
    """Say that there are too few texts for roles, or for firm ones; empty if neither is known to be so."""
    # With fewer than `least` texts there are no roles, with fewer than `enough` only tentative ones.
    least = result.options.get("least_texts")
    enough = result.options.get("fewest_texts")
    # Kish's effective number of texts: texts of unequal length count as fewer texts of one length.
    effective = result.corpus.get("effective_texts")
    are_few = isinstance(effective, int | float) and isinstance(least, int) and effective < least
    if are_few and len(result.table("heads")):
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
    """Return which heads change next to nothing when they are ablated (`heads --causal`), (head,).

    The effect of every mode of ablation must lie below `options["causal"]["nothing_below"]`, with its whole interval. A
    single text gives no interval, so the value itself counts.
    """
    heads = result.table("heads")
    causal = result.options["causal"]
    # The upper end of each effect, (mode, head).
    ends = []
    for mode in causal["modes"]:
        effect = f"{mode}_{causal['quantity']}"
        high = heads.companion(effect, "high")
        ends.append(np.where(np.isfinite(high), high, heads[effect]))
    is_idle: NDArray[np.bool_] = np.max(ends, 0) < causal["nothing_below"]
    return is_idle


def idle_line(result: Result) -> str:
    """Say which heads have a role and no effect when they are ablated; empty if none was ablated (`--causal`)."""
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
    return f"look like something and do nothing ({bound}): {list_some(idle_heads, _MAX_NAMED)}"


# The first role of each head


@dataclass(frozen=True, eq=False)
class RoleGrid:
    """Show the first role of every head as a letter, in the terminal and as a figure.

    Letters tell roles apart without colours too (NO_COLOR). If a layer is wider than the terminal, its cells become
    narrower, then its heads continue below. An encoder-decoder has a grid for each kind of attention.
    """

    result: Result

    def show(self, console: Console, *, every: bool) -> Sequence[RenderableType]:
        """Return a grid per kind of attention and the legend; with `every` or without, all heads are in it."""
        heads = self.result.table("heads")
        # (layer, head) of each head.
        places = heads.layer_heads
        marks = self._marks_of_heads()
        # Each kind once, in their order.
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

    def draw(self, report: Report, lettering: Lettering) -> FigurePage:
        """Draw the figure: letters, and below each one the value of the measure that the role rests on."""
        heads = self.result.table("heads")
        paper = lettering.paper
        grids = grids_of(heads)
        n_across, n_down = count_cells(grids)

        # Cells are lower if there are many layers. On paper all of them must fit on one page.
        width = min(_CELL_PX, (paper.room_px - LEFT_PX) / n_across)
        height = max(20, min(round(0.7 * width), _SCREEN_PX // n_down))
        if paper.is_fixed_width:
            room = int(paper.max_height_px - _AROUND_PX)
            height = max(_PAPER_CELL_PX, min(height, room // n_down))
        needed = 2 * layout.MARGIN_PX + LEFT_PX + n_across * width
        page = FigurePage(paper.figure_width_px(layout.PAGE_WIDTH_PX, needed), lettering)
        page.write_header(
            f"{report.model} · what its {amount(len(heads), 'head does', 'heads do')}", report.source
        )
        cells, bottom = place_kinds(grids, (width, height))
        name_kinds(page, cells)
        has_values = self._draw_cells(page, cells)

        # The legend and the notes.
        entries = [(words, mark.color, mark.glyph) for mark, words in self._legend()]
        columns = max(1, int((page.width_px - 2 * layout.MARGIN_PX) // _LEGEND_PX))
        bottom = page.draw_legend(layout.MARGIN_PX, bottom + 34, entries, columns)
        notes = [_LETTER_NOTE]
        if has_values:
            notes.append("number: the value of the measure that the role rests on")
        page.end_with_notes(bottom + 20, [*notes, *role_notes(self.result), *report.problems])
        return page

    def _marks_of_heads(self) -> list[RoleMark]:
        """Return the mark of each head's first role, with the small letter and the + of `RoleMark`."""
        roles = self.result.table("roles")
        mark_of_role = marks_of(self.result)
        marks = []
        roles_of_heads = self.result.table("heads")["role"].tolist()
        for row, roles_of_head in zip(first_role_rows(self.result), roles_of_heads, strict=True):
            if row < 0:
                marks.append(NO_ROLE)
                continue
            mark = mark_of_role[str(roles["role"][row])]
            letter = mark.glyph.lower() if roles["tentative"][row] else mark.glyph
            marks.append(replace(mark, glyph=f"{letter}+" if "+" in roles_of_head else letter))
        return marks

    def _legend(self) -> list[tuple[RoleMark, str]]:
        """Return each mark with its role and the number of heads, such as "local 12, first in 9"."""
        roles = self.result.table("roles")
        first_rows = first_role_rows(self.result)
        counts = Counter(roles["role"].tolist())
        first_counts = Counter(roles["role"][first_rows[first_rows >= 0]].tolist())
        entries = []
        for name, mark in marks_of(self.result).items():
            # Skip a role that only the control has.
            if not counts[name]:
                continue
            words = f"{label(name)} {counts[name]}"
            if first_counts[name] < counts[name]:
                words += f", first in {first_counts[name]}"
            entries.append((mark, words))
        n_none = int((first_rows < 0).sum())
        if n_none:
            entries.append((NO_ROLE, f"unclassified {n_none}"))
        return entries

    def _draw_cells(self, page: FigurePage, cells: HeadCells) -> bool:
        """Draw all heads; return whether cells have room for values below their letters."""
        cell_width, cell_height = cells.size
        width = cell_width - _GAP_PX
        height = cell_height - _GAP_PX
        letter_px = page.paper.legible_px(min(height * 0.32, 26.0))
        value_px = page.paper.legible_px(min(height * 0.27, width * 0.27, 19.0))
        has_values = height >= _VALUE_CELL_PX and page.lettering.width_px("0.00", value_px) <= width
        # How far below the top of a cell stand a letter alone, a letter above a value, and the value.
        alone_y = height * 0.5
        letter_y = height * 0.32 if has_values else alone_y
        value_y = height * 0.72
        corners = cells.corners_of(self.result.table("heads"))
        role_rows = first_role_rows(self.result).tolist()
        values = self.result.table("roles")["value"]
        marks = self._marks_of_heads()
        letters_and_values = []
        for (left, top), row, mark in zip(corners, role_rows, marks, strict=True):
            x = left + width / 2
            if row < 0:
                letters_and_values.append(CellNumber(x, top + alone_y, mark.glyph, letter_px, FAINT))
                continue
            ink = text_color_on(mark.color)
            letter = CellNumber(x, top + letter_y, mark.glyph, letter_px, ink, is_bold=True)
            letters_and_values.append(letter)
            if has_values:
                value = CellNumber(x, top + value_y, number(values[row]), value_px, ink)
                letters_and_values.append(value)
        page.fill_boxes(
            [(left, top, width, height) for left, top in corners], [mark.color for mark in marks]
        )
        page.write_numbers(letters_and_values)
        return has_values


def _draw_letters(marks: Mapping[tuple[int, int], RoleMark], console: Console) -> Text:
    """Return a grid of letters, layers down and heads across, from marks by (layer, head)."""
    layers = range(max(layer for layer, _ in marks) + 1)
    n_heads = max(head for _, head in marks) + 1
    # A cell has two to four letters, as the terminal allows: the letter and a +, then a blank after it, and one before.
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


def _style(mark: RoleMark) -> Style:
    return Style(color=text_color_on(mark.color), bgcolor=mark.color, bold=True)
