"""Print text safely: no control character reaches the terminal, and symbols that it cannot encode become ASCII.

The module also makes small parts of tables and reports: labels cut to a width, headings, dim lines, shaded cells.
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

_ASCII_REPLACEMENTS = str.maketrans(
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

_FALLBACK_WIDTH = 80
"""The width of lines, in characters, if the width of the terminal is unknown."""


class _PlainConsole(Console):
    """A console that prints every text through `safe`, so that no control character reaches the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        replacements = {} if has_unicode(self) else _ASCII_REPLACEMENTS
        for segment in super().render(renderable, options):
            text = segment.text.translate(replacements)
            # `isprintable` is also False for line breaks, which must stay: each line is made safe on its own.
            if not segment.control and not text.isprintable():
                text = "\n".join(map(safe, text.split("\n")))
            yield Segment(text, segment.style, segment.control)


def open_console(**options: Any) -> Console:
    """Return the `rich` console of every command. It prints [bold], :smile: and control characters as plain text."""
    console = _PlainConsole(markup=False, emoji=False, **options)
    # A terminal that does not know its size says 0.
    if console.width < 1:
        console.width = _FALLBACK_WIDTH
    return console


def print_record(record: Result, console: Console, **options: Any) -> None:
    """Print a record by the `show` function of its kind in `results.kinds`, then a line for each failure of the study.

    `options` are keyword arguments of that function, which `ResultKind.shown_with` lists.
    """
    renderable = record.record_kind().resolve("show")(record, console, **options)
    # None = with these options there is nothing to print.
    if renderable is not None:
        console.print(renderable)
    for failure in record.failed:
        console.print(Text(one_line(failure), style="bold"))


_NOTEBOOK_WIDTH = 110
"""The width of lines in a notebook, in characters."""

_HTML_TEMPLATE = '<pre style="font-family: monospace; line-height: 1.2; overflow-x: auto">{code}</pre>'


def to_html(record: Result) -> str:
    """Return what the terminal prints of a result, with its colours, as HTML for a notebook."""
    console = open_console(record=True, file=io.StringIO(), width=_NOTEBOOK_WIDTH, force_jupyter=False)
    print_record(record, console)
    return console.export_html(inline_styles=True, code_format=_HTML_TEMPLATE)


def cut(label: str, cells: int, *, at_word: bool = False) -> str:
    """Return a label that is at most `cells` wide in a terminal; a longer label is cut and ends in "…".

    With `at_word` it is cut between words.
    """
    if cell_len(label) <= cells:
        return label
    if cells < 1:
        return ""
    start = set_cell_size(label, cells - 1)
    # Without a blank right after the cut, the cut goes through a word: the word is left out.
    if at_word and " " in start and not label[len(start)].isspace():
        start = start.rpartition(" ")[0]
    return start.rstrip(" ,;:(") + "…"


def has_unicode(console: Console) -> bool:
    """Return whether the encoding of the terminal is UTF-8, UTF-16 or UTF-32."""
    return console.encoding.lower().startswith("utf")


def heading(title: str) -> Text:
    """Return a bold title above a table or some lines, with an empty line before it."""
    return Text(f"\n{title}", style="bold")


def list_numbers(entries: Iterable[tuple[str, str]], gap: str = "   ") -> Text:
    """Return entries, (name, number), such as "cat 0.31   mat 0.12", with `gap` between them."""
    return Text(gap).join(Text(f"{name} ").append(number, style="cyan") for name, number in entries)


def dim_lines(lines: Iterable[str]) -> list[RenderableType]:
    """Return lines in a dim colour, such as notes below a table; empty lines are left out."""
    return [Text(line, style="dim") for line in lines if line]


def shade(share: float, pale: str, dark: str) -> Style:
    """Return a style whose background is a mixture of two colours, "#rrggbb": `pale` at a share of 0, `dark` at 1.

    The letters are black or white, whichever is more legible.
    """
    color = blend_colors(share, pale, dark)
    return Style(color=text_color_on(color), bgcolor=color)
