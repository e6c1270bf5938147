"""Say in sentences what the roles of heads amount to, and show the first role of every head as a coloured letter.

A role names what a head does, such as "previous_token". The column "role" of the table "heads" joins the roles of a
head by "+": the strongest first, sink roles last, "" for a head without a role. The table "roles" has a row per role of
each head, with the evidence; rows of a head stand together, in the same order. A role is tentative if it rests on few
texts.

`heads` and `head_lines` report these sentences and letters. HTML pages use the letters and colours.
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
from attnscope.report.head_maps import (
    LEFT_PX,
    HeadCells,
    count_cells,
    find_grids,
    name_kinds,
    place_kinds,
)
from attnscope.report.matrix import draw_head_grid, find_width_for_heads
from attnscope.report.numbers import number
from attnscope.report.plain_text import heading
from attnscope.report.wording import label, list_some, printable
from attnscope.results.result import Result

SINK_ROLES = ("first_token", "outlier_token", "sink", "delimiter")
"""Roles of heads that attend to sinks: keys to which heads attend when they have nothing to do."""

_ROLES_BY_BEHAVIOUR = {
    "rest mostly on sinks (special tokens, the first token)": SINK_ROLES,
    "attend to neighbours": ("previous_token", "next_token", "self_token", "local"),
    "look for the same or a similar token": ("same_token", "induction", "similar_token"),
    "look for rare tokens": ("rare",),
    "spread evenly": ("diffuse",),
}
"""Groups of roles, under the predicate of the sentence "5 of 144 heads attend to neighbours".

A head counts in the group of its first role. Every predicate begins with a plural verb.
"""

_MAX_NAMED_HEADS = 12
"""A sentence names at most so many heads, and counts the others."""

_LETTER_NOTE = (
    "the letter is the head's strongest role, or a sink's if it has no other; +: it has more roles"
)

_MAX_CELL_WIDTH_PX = 110.0
"""The largest width of a cell, in pixels of the figure like all sizes here."""

_SCREEN_CELLS_PX = 1500
"""On a screen all cells together are at most this high, unless each would be lower than 20 pixels."""

_PAPER_TEXT_PX = 620
"""The height that title, legend and notes need on a page of paper."""

_MIN_PAPER_CELL_PX = 12
"""The smallest height of a cell on paper."""

_MIN_VALUE_CELL_PX = 32
"""The smallest height of a cell with room for a value below its letter."""

_GAP_PX = 3
"""Gap between cells."""

_LEGEND_ENTRY_PX = 380
"""Width of one entry of the legend."""


@dataclass(frozen=True)
class RoleMark:
    """Hold the letter and the colour of a role, or of one head's first role.

    Attributes:
        glyph: The capital letter of the role. In the mark of a head it is small if the role is tentative, and a "+"
            follows if the head has more roles.
        color: Its colour, "#rrggbb".
    """

    glyph: str
    color: str


NO_ROLE = RoleMark("·", "#f3f3f3")

# Seven colours are Okabe and Ito's. Each other colour is as far as possible from all chosen before it. The distance of
# two colours is their smallest OKLab distance in normal, deutan, protan and tritan vision (Machado 2009).
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
_GLYPHS = "ABCDEFGHIJKLMNOPQRSTUVWXYZΓΔΘΛΞΠΣΦΨΩ"

_GOLDEN_ANGLE = 0.618034
"""The golden angle, as a fraction of the colour circle. Hues in steps of it stay apart from all earlier hues."""


def choose_marks(names: AbstractSet[str]) -> dict[str, RoleMark]:
    """Return a mark for each role in `names`: first the roles in `MARKS`, in that order, then unknown roles.

    A record of another version of attnscope may have roles that are not in `MARKS`. Such a role gets a free letter of
    its name, else any free letter, and a hue of its own.
    """
    marks = {name: mark for name, mark in MARKS.items() if name in names}
    taken_glyphs = {mark.glyph for mark in MARKS.values()}
    for index, name in enumerate(sorted(names - MARKS.keys())):
        name_letters = [letter for letter in name.upper() if letter in _GLYPHS]
        # Once all letters are taken, further roles share Ŋ.
        glyph = next((letter for letter in (*name_letters, *_GLYPHS) if letter not in taken_glyphs), "Ŋ")
        taken_glyphs.add(glyph)
        hue = index * _GOLDEN_ANGLE % 1
        lightness = (0.38, 0.55, 0.72)[index % 3]
        red, green, blue = (round(255 * channel) for channel in colorsys.hls_to_rgb(hue, lightness, 0.6))
        marks[name] = RoleMark(glyph, f"#{red:02X}{green:02X}{blue:02X}")
    return marks


def choose_result_marks(result: Result) -> dict[str, RoleMark]:
    """Return a mark for each role in a result or its control, a model with random weights; in a fixed order."""
    names: set[str] = set()
    for table in ("heads", "control"):
        for roles in result.table(table)["role"].tolist():
            names.update(roles.split("+"))
    # `"".split("+")`, of a head without a role, gave "".
    return choose_marks(names - {""})


def find_first_role_rows(result: Result) -> NDArray[np.int64]:
    """Return the row of each head's first role in the table "roles", (head,); -1 = the head has no role."""
    head_by_role_row = result.table("roles")["head"]
    first_rows = np.full(len(result.table("heads")), -1)
    # NumPy keeps the last of several assignments to the same head. In reversed order that is the head's first row.
    first_rows[head_by_role_row[::-1]] = np.arange(len(head_by_role_row))[::-1]
    return first_rows


# Sentences


def explain_roles(result: Result) -> list[str]:
    """Return sentences on the roles: too few texts, heads that do nothing when ablated, and the untrained control."""
    return list(
        filter(None, [explain_few_texts(result), describe_idle_heads(result), describe_control(result)])
    )


def count_first_roles(result: Result) -> str:
    """Say how many heads do what, such as "5 of 144 heads attend to neighbours, 3 spread evenly, 2 have no role".

    A head counts once, by its first role. The sentence is empty if no head has a role.
    """
    roles_of_heads = result.table("heads")["role"].tolist()
    n_without_role = roles_of_heads.count("")
    if n_without_role == len(roles_of_heads):
        return ""
    # A role in no group is counted under its own name. The zero counts put the groups first among equal counts, since
    # `most_common` keeps the order in which names were added.
    behaviour_by_role = {
        role: behaviour for behaviour, roles in _ROLES_BY_BEHAVIOUR.items() for role in roles
    }
    counts = Counter(dict.fromkeys(_ROLES_BY_BEHAVIOUR, 0))
    for roles in roles_of_heads:
        first_role = roles.partition("+")[0]
        if first_role:
            counts[behaviour_by_role.get(first_role, f"have the role {label(first_role)}")] += 1
    # The most frequent behaviour comes first, heads without a role last.
    phrases: list[str] = []
    for behaviour, n_heads in [*counts.most_common(), ("have no role", n_without_role)]:
        if not n_heads:
            continue
        # The first phrase says out of how many heads.
        out_of = "" if phrases else f" of {amount(len(roles_of_heads), 'head')}"
        # "1 head attends", "2 heads attend".
        verb, _, object_phrase = behaviour.partition(" ")
        if n_heads == 1:
            verb = "has" if verb == "have" else f"{verb}s"
        phrases.append(f"{n_heads}{out_of} {verb} {object_phrase}")
    return ", ".join(phrases)


def describe_control(result: Result) -> str:
    """Say which roles the heads of the control get: the same architecture with random weights.

    The sentence is empty if no control was studied.
    """
    roles_by_head = result.table("control")["role"].tolist()
    if not roles_by_head:
        return ""
    counts: Counter[str] = Counter()
    for joined_roles in roles_by_head:
        # A head without a role counts under the name "".
        counts.update(joined_roles.split("+"))
    counts_phrase = ", ".join(f"{n} {label(name) or 'unclassified'}" for name, n in counts.most_common())
    return f"untrained control (random weights, same texts), {amount(len(roles_by_head), 'head')}: {counts_phrase}"


def explain_few_texts(result: Result) -> str:
    """Say that the texts are too few for any role, or that some roles are tentative; empty if neither holds."""
    # Fewer than `min_texts` texts give no roles. Fewer than `min_firm_texts` give only tentative roles.
    min_texts = result.options.get("least_texts")
    min_firm_texts = result.options.get("fewest_texts")
    # Kish's effective sample size: how many texts of equal length the texts are worth.
    n_effective = result.corpus.get("effective_texts")
    is_few = (
        isinstance(n_effective, int | float) and isinstance(min_texts, int) and n_effective < min_texts
    )
    if is_few and len(result.table("heads")):
        effective_phrase = ""
        if result.corpus.get("n_texts") != 1:
            effective_phrase = f"; effective number of texts: {n_effective:.1f}"
        return (
            f"too few texts to say what heads do: {min_texts} at least{effective_phrase}. Give a file of texts "
            "(--file), or cut long ones into chunks (--chunk 512); where heads look in one text: attnscope heatmap"
        )
    if not result.table("roles")["tentative"].any():
        return ""
    return f"tentative: a role that rests on few texts ({min_texts} to {min_firm_texts} of equal length)"


def find_idle_heads(result: Result) -> NDArray[np.bool_]:
    """Return which heads are idle, (head,), bool: ablating them (`heads --causal`) changes next to nothing.

    For every mode of ablation, such as "zero", the upper end of the effect's interval must lie below
    `options["causal"]["nothing_below"]`. A single text gives no interval, so there the effect itself must lie below it.
    """
    heads = result.table("heads")
    ablation = result.options["causal"]
    # The upper end of each effect's interval, (mode, head).
    upper_ends = []
    for mode in ablation["modes"]:
        effect = f"{mode}_{ablation['quantity']}"
        interval_high = heads.companion(effect, "high")
        upper_ends.append(np.where(np.isfinite(interval_high), interval_high, heads[effect]))
    is_idle: NDArray[np.bool_] = np.max(upper_ends, 0) < ablation["nothing_below"]
    return is_idle


def describe_idle_heads(result: Result) -> str:
    """Say which heads have a role but are idle; empty if no head was ablated (`--causal`) or no head has a role."""
    ablation = result.options.get("causal")
    roles_by_head = result.table("heads")["role"]
    has_role = roles_by_head != ""
    if not isinstance(ablation, Mapping) or not has_role.any():
        return ""
    bound_phrase = f"{printable(ablation.get('what', 'effect'))} below {ablation['nothing_below']:g}"
    head_names = result.head_names
    idle_heads = []
    for head in np.flatnonzero(has_role & find_idle_heads(result)).tolist():
        first_role = roles_by_head[head].partition("+")[0]
        idle_heads.append(f"{head_names[head]} ({label(first_role)})")
    if not idle_heads:
        return f"{amount(int(has_role.sum()), 'head')} with a role, and each does something: none has {bound_phrase}"
    return (
        f"look like something and do nothing ({bound_phrase}): {list_some(idle_heads, _MAX_NAMED_HEADS)}"
    )


# The first role of each head


@dataclass(frozen=True, eq=False)
class RoleGrid:
    """Show the first role of every head as a letter, in the terminal and as a figure.

    Letters tell roles apart even without colours (NO_COLOR). If a layer is wider than the terminal, its cells become
    narrower; if that is not enough, the layer continues on further lines. An encoder-decoder has a grid for each kind
    of attention: encoder, decoder and cross.
    """

    result: Result

    def show(self, console: Console, *, every: bool) -> Sequence[RenderableType]:
        """Return a grid per kind of attention, and the legend. `every`, the option --all, changes nothing here."""
        heads = self.result.table("heads")
        # (layer, head) of each row of the table.
        layer_heads = heads.layer_heads
        marks = self._marks_of_heads()
        # Each kind once, in the order of the table.
        kinds = list(dict.fromkeys(heads["kind"].tolist()))
        renderables: list[RenderableType] = []
        for kind in kinds:
            if len(kinds) > 1:
                renderables.append(heading(f"{printable(kind)} attention"))
            rows = np.flatnonzero(heads["kind"] == kind).tolist()
            renderables.append(_draw_letters({layer_heads[row]: marks[row] for row in rows}, console))
        # The legend, with the number of heads of each role.
        legend_texts = []
        for mark, legend_words in self._legend():
            legend_texts.append(
                Text(f" {mark.glyph} ", style=_color_style(mark)).append(f" {legend_words}")
            )
        hints = []
        if any("+" in roles for roles in heads["role"].tolist()):
            hints.append(_LETTER_NOTE)
        if self.result.table("roles")["tentative"].any():
            hints.append("a small letter = tentative")
        return [
            *renderables,
            Text(),
            Columns(legend_texts, padding=(0, 2)),
            Text("; ".join(hints), style="dim"),
        ]

    def draw(self, report: Report, lettering: Lettering) -> FigurePage:
        """Draw the figure: the letter of each head, and below it the value of the measure that the role rests on."""
        heads = self.result.table("heads")
        paper = lettering.paper
        grids = find_grids(heads)
        n_across, n_down = count_cells(grids)

        # Many layers make cells lower. On paper all layers must fit on one page.
        cell_width = min(_MAX_CELL_WIDTH_PX, (paper.room_px - LEFT_PX) / n_across)
        cell_height = max(20, min(round(0.7 * cell_width), _SCREEN_CELLS_PX // n_down))
        if paper.is_fixed_width:
            cells_height_px = int(paper.max_height_px - _PAPER_TEXT_PX)
            cell_height = max(_MIN_PAPER_CELL_PX, min(cell_height, cells_height_px // n_down))
        needed_width_px = 2 * layout.MARGIN_PX + LEFT_PX + n_across * cell_width
        page = FigurePage(paper.figure_width_px(layout.PAGE_WIDTH_PX, needed_width_px), lettering)
        page.write_header(
            f"{report.model} · what its {amount(len(heads), 'head does', 'heads do')}", report.source
        )
        cells, bottom = place_kinds(grids, (cell_width, cell_height))
        name_kinds(page, cells)
        has_values = self._draw_cells(page, cells)

        # The legend and the notes.
        legend_entries = [(words, mark.color, mark.glyph) for mark, words in self._legend()]
        n_legend_columns = max(1, int((page.width_px - 2 * layout.MARGIN_PX) // _LEGEND_ENTRY_PX))
        bottom = page.draw_legend(layout.MARGIN_PX, bottom + 34, legend_entries, n_legend_columns)
        notes = [_LETTER_NOTE]
        if has_values:
            notes.append("number: the value of the measure that the role rests on")
        page.end_with_notes(bottom + 20, [*notes, *explain_roles(self.result), *report.problems])
        return page

    def _marks_of_heads(self) -> list[RoleMark]:
        """Return the mark of each head's first role, with a small letter if tentative and a + if it has more roles."""
        roles = self.result.table("roles")
        mark_of_role = choose_result_marks(self.result)
        marks = []
        roles_of_heads = self.result.table("heads")["role"].tolist()
        for role_row, roles_of_head in zip(
            find_first_role_rows(self.result), roles_of_heads, strict=True
        ):
            if role_row < 0:
                marks.append(NO_ROLE)
                continue
            mark = mark_of_role[str(roles["role"][role_row])]
            letter = mark.glyph.lower() if roles["tentative"][role_row] else mark.glyph
            marks.append(replace(mark, glyph=f"{letter}+" if "+" in roles_of_head else letter))
        return marks

    def _legend(self) -> list[tuple[RoleMark, str]]:
        """Return the entries of the legend: each mark, with words such as "local 12, first in 9".

        Here 12 heads have the role "local", and it is the first role of 9 of them.
        """
        roles = self.result.table("roles")
        first_rows = find_first_role_rows(self.result)
        counts = Counter(roles["role"].tolist())
        first_counts = Counter(roles["role"][first_rows[first_rows >= 0]].tolist())
        entries = []
        for name, mark in choose_result_marks(self.result).items():
            # Skip a role that only the control has.
            if not counts[name]:
                continue
            legend_words = f"{label(name)} {counts[name]}"
            if first_counts[name] < counts[name]:
                legend_words += f", first in {first_counts[name]}"
            entries.append((mark, legend_words))
        n_without_role = int((first_rows < 0).sum())
        if n_without_role:
            entries.append((NO_ROLE, f"unclassified {n_without_role}"))
        return entries

    def _draw_cells(self, page: FigurePage, cells: HeadCells) -> bool:
        """Draw a cell for each head; return whether cells have room for values below their letters."""
        cell_width, cell_height = cells.size
        box_width = cell_width - _GAP_PX
        box_height = cell_height - _GAP_PX
        letter_px = page.paper.legible_px(min(box_height * 0.32, 26.0))
        value_px = page.paper.legible_px(min(box_height * 0.27, box_width * 0.27, 19.0))
        has_values = (
            box_height >= _MIN_VALUE_CELL_PX and page.lettering.width_px("0.00", value_px) <= box_width
        )
        # Distances from the top of a cell: to a letter without a value, to a letter above its value, and to the value.
        alone_y = box_height * 0.5
        letter_y = box_height * 0.32 if has_values else alone_y
        value_y = box_height * 0.72
        corners = cells.corners_of(self.result.table("heads"))
        role_rows = find_first_role_rows(self.result).tolist()
        role_values = self.result.table("roles")["value"]
        marks = self._marks_of_heads()
        letters_and_values = []
        for (left, top), role_row, mark in zip(corners, role_rows, marks, strict=True):
            center_x = left + box_width / 2
            if role_row < 0:
                letters_and_values.append(
                    CellNumber(center_x, top + alone_y, mark.glyph, letter_px, FAINT)
                )
                continue
            ink = text_color_on(mark.color)
            letters_and_values.append(
                CellNumber(center_x, top + letter_y, mark.glyph, letter_px, ink, is_bold=True)
            )
            if has_values:
                value = number(role_values[role_row])
                letters_and_values.append(CellNumber(center_x, top + value_y, value, value_px, ink))
        page.fill_boxes(
            [(left, top, box_width, box_height) for left, top in corners], [mark.color for mark in marks]
        )
        page.write_numbers(letters_and_values)
        return has_values


def _draw_letters(marks: Mapping[tuple[int, int], RoleMark], console: Console) -> Text:
    """Return a grid of letters, layers down and heads across; `marks` are by (layer, head)."""
    layers = range(max(layer for layer, _ in marks) + 1)
    n_heads = max(head for _, head in marks) + 1
    # A cell is two to four characters wide, as the terminal allows. Two hold the letter and the "+", the third is a
    # blank after them, the fourth a blank before them.
    cell_letters = max(2, min(4, find_width_for_heads(layers, console.width) // n_heads))
    blank_before = " " if cell_letters == 4 else ""
    blank_after = "" if cell_letters == 2 else " "

    def append_cell(text: Text, layer: int, head: int) -> None:
        # A head that was not measured leaves a gap.
        if (layer, head) not in marks:
            text.append(" " * cell_letters)
            return
        mark = marks[layer, head]
        style = "dim" if mark is NO_ROLE else _color_style(mark)
        text.append(f"{blank_before}{mark.glyph:<2}", style=style).append(blank_after)

    return draw_head_grid(layers, range(n_heads), cell_letters, console.width, append_cell)


def _color_style(mark: RoleMark) -> Style:
    return Style(color=text_color_on(mark.color), bgcolor=mark.color, bold=True)
