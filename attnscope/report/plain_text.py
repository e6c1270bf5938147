"""Print text safely: no control character reaches the terminal, and characters that it cannot show become ASCII.

Also the small pieces that tables and reports are made of: labels cut to a width, headings, dim lines, shades.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from attnscope.drawing.inks import blend_colors, text_color_on
from attnscope.errors import one_line, safe

if TYPE_CHECKING:
    from attnscope.results.result import Result

_ASCII = str.maketrans(
    {
        "√": "sqrt ",
        "·": "*",
        "×": "x",
        "Σ": "sum",
        "…": "..",
        "−": "-",
        "–": "-",
        "²": "^2",
        "³": "^3",
        "≈": "~",
        "≤": "<=",
        "≥": ">=",
        "ᵀ": "^T",
        "‖": "||",
        "Δ": "D",
        "→": "->",
    }
)
"""What is printed instead of attnscope's own symbols if the encoding of the terminal lacks them."""

_USUAL_WIDTH = 80
"""Characters in a line of a terminal of unknown width."""


class _PlainConsole(Console):
    """A console that prints every text through `safe`, so that no control character reaches the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        replaced = {} if has_unicode(self) else _ASCII
        for segment in super().render(renderable, options):
            text = segment.text.translate(replaced)
            # Line breaks are no printable characters, and stay.
            if not segment.control and not text.isprintable():
                text = "\n".join(map(safe, text.split("\n")))
            yield Segment(text, segment.style, segment.control)


def open_console(**options: Any) -> Console:
    """Return the `rich` console of every command. It prints [bold], :smile: and control characters as plain text."""
    console = _PlainConsole(markup=False, emoji=False, **options)
    # A terminal that does not know its size says 0.
    if console.width < 1:
        console.width = _USUAL_WIDTH
    return console


def print_record(record: Result, console: Console, **options: Any) -> None:
    """Print a record by the function that `results.kinds` names as its `show`, and below it what failed in the study.

    `options` are parameters of that function, as `Kind.shown_with` lists them.
    """
    view = record.record_kind().resolve("show")(record, console, **options)
    if view is not None:
        console.print(view)
    for line in record.failed:
        console.print(Text(one_line(line), style="bold"))


_NOTEBOOK_WIDTH = 110
"""Characters in a line of a notebook, which scrolls what is wider."""

_PAGE = '<pre style="font-family: monospace; line-height: 1.2; overflow-x: auto">{code}</pre>'


def to_html(record: Result) -> str:
    """Return what the terminal prints of a result, with its colours, as HTML for a notebook."""
    console = open_console(record=True, file=io.StringIO(), width=_NOTEBOOK_WIDTH, force_jupyter=False)
    print_record(record, console)
    return console.export_html(inline_styles=True, code_format=_PAGE)


def cut(label: str, cells: int, *, at_word: bool = False) -> str:
    """Return a label that is at most `cells` wide in a terminal; a longer one is cut and ends in "…".

    With `at_word` it is cut between words.
    """
    if cell_len(label) <= cells:
        return label
    if cells < 1:
        return ""
    begin = set_cell_size(label, cells - 1)
    # A word that the cut goes through is left out as a whole.
    if at_word and " " in begin and not label[len(begin)].isspace():
        begin = begin.rpartition(" ")[0]
    return begin.rstrip(" ,;:(") + "…"


def has_unicode(console: Console) -> bool:
    """Return whether the encoding of the terminal is UTF-8 or another of Unicode."""
    return console.encoding.lower().startswith("utf")


def heading(title: str) -> Text:
    """Return a bold title above a table or some lines, with an empty line before it."""
    return Text(f"\n{title}", style="bold")


def list_numbers(entries: Iterable[tuple[str, str]], gap: str = "   ") -> Text:
    """Return entries, (name, number), such as "cat 0.31   mat 0.12", with `gap` between them."""
    return Text(gap).join(Text(f"{name} ").append(number, style="cyan") for name, number in entries)


def dim_lines(lines: Iterable[str]) -> list[RenderableType]:
    """Return lines in a dim colour, such as notes below a table; empty ones are left out."""
    return [Text(line, style="dim") for line in lines if line]


def shade(share: float, pale: str, dark: str) -> Style:
    """Return a style whose background is a mixture of two colours, "#rrggbb", and whose letters stand out on it.

    A share of 0 is `pale`, 1 is `dark`.
    """
    color = blend_colors(share, pale, dark)
    return Style(color=text_color_on(color), bgcolor=color)
