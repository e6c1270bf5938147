"""What becomes of a record: files, one JSON document, or tables in the terminal. The only writer of results.

Formats, options and folders are checked before a model runs for minutes. The files of a record appear together or not
at all, see `results.storage`; what took the time stays even if it cannot be drawn.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError, one_line, safe
from attnscope.options import read_names
from attnscope.questions.maps import choose_heads
from attnscope.results.kinds import (
    CHOICE_OF_HEADS,
    FIGURE_FORMATS,
    KINDS,
    SIZES,
    TABLE_FORMATS,
    Kind,
    load_named,
)
from attnscope.results.storage import (
    PAGE_MARK,
    replace_together,
    require_replaceable,
    require_writable,
    texts_in,
)
from attnscope.unfinished import fail_if_not_whole, keep_data, settle

if TYPE_CHECKING:
    from attnscope.results.result import Result

HOME = Path("attnscope-out")
"""Where files go that no folder is named for."""

MOST_SAVED = 1 << 26
"""Bytes of weights up to which a heatmap that is drawn is saved too, so that `show` can draw it again."""

TEXT = "text"
"""The format that is drawn in the terminal."""

_STYLE = ("scale", "cmap", "colours", "smooth", "layout", *SIZES)
_CHANGES: dict[str, Callable[[Any, Any, Mapping[str, Any]], Any]] = {
    "hide_special": lambda record, _, chosen: record.hide_special(keep=chosen.get("query")),
    "without_sinks": lambda record, _, chosen: record.without_sinks(),
    "words": lambda record, _, chosen: record.merge_words(),
    "mean": lambda record, over, chosen: record.average(over),
}
"""Options of `show` that change a record: how, by the value of the option and all that is asked for."""


@dataclass(frozen=True)
class Output:
    """The files, figures and printed text that a record becomes.

    Attributes:
        kind: What kind of record it is.
        out: The folder for files; None = none are written, unless the record has a folder of its own.
        formats: The formats of the files.
        json: Whether one JSON document is printed instead of tables.
        quiet: Whether notes are left out.
        drawn: Whether maps are drawn in the terminal.
        options: How it is shown: some of those that its kind has a use for.
        stem: How files are called, without their endings; None = as their kind says.
        columns: The columns of tables in files; none = the usual ones.
        named: Whether the formats were asked for by name.
        answers: Whether maps are answered in few lines, with the address of the first figure, above the files.
        whole: The record that some heads were picked from, among which they are ranked.
    """

    kind: Kind
    out: Path | None = None
    formats: tuple[str, ...] = ()
    json: bool = False
    quiet: bool = False
    drawn: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    stem: str | None = None
    named: bool = True
    answers: bool = False
    whole: Result | None = None

    def style(self, record: Result) -> Any:
        """Return how the figures of a record are drawn."""
        return record.style(**{name: self.options[name] for name in _STYLE if name in self.options})

    def deliver(self, record: Result, folder: Path | None = None, also: Sequence[Path] = ()) -> None:
        """Write the files of a record, say its notes, and print it.

        Args:
            record: The record.
            folder: Where its files go if no folder is named.
            also: Files or folders that were written before, and are printed with its files.

        Raises:
            AttnscopeError: A file cannot be written; or part of what was asked for could not be studied, which is
                said when everything else is done.
            KeyboardInterrupt: The study was interrupted; all that it found is printed and written.
        """
        record, out = settle(record, self.out or folder, self.stem or self.kind.stem)
        self.finish(record, out, also)
        fail_if_not_whole(getattr(record, "corpus", {}), getattr(record, "run", {}))

    def finish(self, record: Result, out: Path | None, also: Sequence[Path] = ()) -> None:
        """Write the files of a record into a folder, if there is one, say its notes, and print it."""
        notes = list(getattr(record, "run", {}).get("notes", ()))
        formats = self.formats
        size = (
            sum(array.nbytes for array in record.arrays().values())
            if self.kind.glance and not self.named
            else 0
        )
        if size > MOST_SAVED:  # nobody asked for them by name
            formats = tuple(name for name in formats if name in FIGURE_FORMATS)
            notes.append(f"the weights, {size / 2**20:,.0f} MiB, are not saved: --format png,npz does")
        paths = [] if out is None else write(record, out, formats, self.options, self.stem, self.columns)
        notes += note_fonts(texts_in(record.drawn_texts()), map(str, paths), self.options.get("font"))
        say(notes, self.quiet)
        # On stdout one JSON document; else tables, then the paths of files.
        written = [*paths, *also]
        if self.json:
            print_json(record.to_json(files=[str(path) for path in written]))
            return
        from attnscope.report.plain_text import open_console, print_record

        options = {**self.options, "drawn": self.drawn, "among": self.whole, "answered": self.answers}
        print_record(
            record, open_console(), **{name: options.get(name) for name in self.kind.shown_with}
        )
        print_paths(written, has_address=self.answers and not self.drawn)


def plan(
    kind: str,
    out: Path | None = None,
    formats: str | None = None,
    *,
    columns: tuple[str, ...] = (),
    json: bool = False,
    quiet: bool = False,
    has_folder: bool = False,
    **options: Any,
) -> Output:
    """Check what is to become of a record, before it is made.

    Args:
        kind: The kind, such as "heads".
        out: The folder for files, or the name of one, such as atlas.html or map.png; None = none.
        formats: Their formats, such as "npz,csv,png"; None = the usual ones, or that of the file.
        columns: The columns of tables in files; none = the usual ones.
        json: Whether one JSON document is printed.
        quiet: Whether notes are left out.
        has_folder: Whether its files have a folder of their own where none is named.
        options: How it is shown, as `results.kinds.Kind.options` says; None = not said.

    Raises:
        UsageError: There is no such format, or no folder for files.
        AttnscopeError: The folder cannot be written.
    """
    about = KINDS[kind]
    known = (*about.formats, *([TEXT] if about.glance else []))
    output = _plan(about, out, formats, known, about.usual, options, columns, has_folder=has_folder)
    if output.drawn and json:
        raise UsageError("the terminal's drawing and --json both go to stdout", "leave out one of them")
    # Data alone, or with --quiet, is for programs: stdout has its files and nothing else.
    is_drawn = any(name in (*FIGURE_FORMATS, *about.pages) for name in output.formats)
    return replace(output, json=json, quiet=quiet, answers=has_folder and is_drawn and not quiet)


def show(
    record: Result,
    out: Path | None = None,
    formats: str | None = None,
    *,
    columns: tuple[str, ...] = (),
    json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Show a saved record again: in the terminal, or with a folder as files.

    Args:
        record: The record.
        out: The folder for files; None = none.
        formats: Formats of files, and "text"; None = "text" without a folder, else png, or of what is not drawn its
            usual data.
        columns: The columns of tables in files; none = the usual ones.
        json: Whether one JSON document is printed.
        quiet: Whether notes are left out.
        options: How it is shown: None = not said.

    Raises:
        UsageError: The kind of record has no such format, or no use for an option; or there is no folder for files.
        AttnscopeError: The folder cannot be written, or a token or head is not in the record.
    """
    kind = record.record_kind()
    # The lines of a record from elsewhere are code, of which no script is made.
    known = (*(name for name in kind.formats if name != "py"), TEXT)
    usual = tuple(
        name for name in kind.usual if name in known and ("png" not in kind.usual or name == "png")
    )
    output = _plan(kind, out, formats, known, (TEXT,) if out is None else usual, options, columns)
    # The heads and changes that are asked for.
    chosen = dict(output.options)
    shown = choose_heads(record, *(chosen.pop(name, None) for name in CHOICE_OF_HEADS))
    for name, change in _CHANGES.items():
        value = chosen.pop(name, None)
        if value and name not in shown.changes:
            shown = change(shown, value, chosen)
    if chosen.get("query") is not None:
        kind.view("query")(shown, chosen["query"])
    output = replace(output, json=json, quiet=quiet, options=chosen, whole=record, named=True)
    output.finish(shown, output.out)


def _plan(
    kind: Kind,
    out: Path | None,
    formats: str | None,
    known: Sequence[str],
    usual: Sequence[str],
    options: Mapping[str, Any],
    columns: tuple[str, ...],
    *,
    has_folder: bool = False,
) -> Output:
    """Return the folder, the files and the options that are asked for, all of which are checked."""
    chosen = {name: value for name, value in options.items() if value is not None}
    kind.require_options(chosen)
    load_named("drawing.style:Style")(**{name: chosen[name] for name in _STYLE if name in chosen})
    # A file may be named instead of a folder.
    stem = None
    if out is not None and (ending := _named_by(out, kind)):
        # Other formats go beside the file.
        formats = ending if formats is None else f"{formats},{ending}"
        out, stem = out.parent, out.stem
    # Which files, and whether there is a place for them.
    names = tuple(usual) if formats is None else read_names(formats, known, "format")
    files = tuple(name for name in names if name != TEXT)
    if files and formats is not None and out is None and not has_folder:
        raise UsageError(
            "there is no folder to write files to", "give one with --out, or leave out --format"
        )
    if out is not None and not files:
        raise UsageError(
            "there is no file to write: text is drawn in the terminal", "add formats, or leave out --out"
        )
    if columns and not {*files} & {*TABLE_FORMATS}:
        raise UsageError(
            "--columns are of tables, and none is written", "such as --format latex --out folder"
        )
    if files and (out is not None or has_folder):
        require_writable(HOME if out is None else out)
    return Output(
        kind,
        out,
        files,
        drawn=TEXT in names,
        options=chosen,
        columns=columns,
        stem=stem,
        named=formats is not None,
    )


def _named_by(out: Path, kind: Kind) -> str:
    """Return the format of a file that is named instead of a folder; empty = it is a folder."""
    ending = out.suffix.removeprefix(".")
    if ending not in kind.formats or out.is_dir():
        return ""
    require_replaceable(out, holds=PAGE_MARK if ending in kind.pages else b"attnscope")
    return ending


def write(
    record: Result,
    out: Path,
    formats: Sequence[str],
    options: Mapping[str, Any] = {},
    stem: str | None = None,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Write the files of a record into a folder: all of them, or none.

    Only where drawing fails, or is interrupted, the other files stay: they may have taken hours.

    Args:
        record: The record.
        out: The folder.
        formats: Some of its kind's formats.
        options: How figures are drawn: "scale", "cmap", "query", "measures" and `results.kinds.SIZES`.
        stem: How files are called, without their endings; None = as its kind says.
        columns: The columns of tables in files; none = the usual ones.

    Returns:
        The files: figures first where they are what its kind is usually written as, else last.
    """
    # Figures, pages and data among the formats.
    kind = record.record_kind()
    kind = kind if stem is None else replace(kind, stem=stem)
    figures = [name for name in formats if name in FIGURE_FORMATS and not record.is_empty]
    pages = [name for name in formats if name in kind.pages]
    saved = [name for name in formats if name in kind.data]
    if not (figures or pages or saved):
        return []
    drawn: list[Path] = []
    with replace_together(out) as staged:
        every = bool(options.get("every"))
        data = [record.save(staged / kind.file(name), every=every, columns=columns) for name in saved]
        data += [kind.view("page")(record).save(staged / kind.file(name)) for name in pages]
        try:
            if figures:
                names = {*kind.options} & {*_STYLE, *kind.drawn_with} & {*options}
                drawn = record.draw(staged, figures, **{name: options[name] for name in names})
                drawn = drawn if stem is None else _rename_figures(drawn, stem)
        except BaseException:
            keep_data(staged, out)
            raise
    paths = [*drawn, *data] if kind.usual[0] in FIGURE_FORMATS else [*data, *drawn]
    return [out / path.relative_to(staged) for path in paths]


def _rename_figures(files: Sequence[Path], stem: str) -> list[Path]:
    """Rename figures to what the user called the file: a single one as that, several by names that begin with it."""
    is_single = len({file.stem for file in files}) == 1
    names = [f"{stem}{file.suffix}" if is_single else f"{stem}-{file.name}" for file in files]
    return [file.rename(file.with_name(name)) for file, name in zip(files, names, strict=True)]


def note_fonts(texts: Iterable[str], files: Iterable[str], font: str | None) -> list[str]:
    """Return a note where figures among some files show code points in place of characters that no font has."""
    if not any(name.endswith(FIGURE_FORMATS) for name in files):
        return []
    note = load_named("drawing.lettering:note_missing")(texts, font)
    return [note] if note else []


# What is printed

_OBEYED = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Controls, marks of direction and separators of lines, which json.dumps leaves as they are beyond ASCII."""


def say(notes: Iterable[str], quiet: bool) -> None:
    """Print notes for people on stderr."""
    for note in () if quiet else notes:
        print(f"note: {one_line(note)}", file=sys.stderr)


def print_paths(paths: Sequence[str | Path], *, has_address: bool = False) -> None:
    """Print the files that were written, one per line: as they are for programs, and as is safe on a terminal.

    On a terminal a page also has its address, which a browser opens; with `has_address` the first file has, above all.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if has_address and paths:
        print(f"open {Path(paths[0]).resolve().as_uri()}")
    for path in paths:
        print(safe(str(path)) if is_terminal else path)
        if is_terminal and not has_address and str(path).endswith(".html"):
            print(f"open {Path(path).resolve().as_uri()}")


def print_json(document: str | Mapping[str, Any]) -> None:
    """Print a JSON document, which is UTF-8 whatever the terminal's encoding."""
    text = document if isinstance(document, str) else dumps(document, ensure_ascii=False)
    if sys.stdout is not None:
        sys.stdout.flush()
        # As JSON's own \u202e what terminals and JavaScript obey, and the bytes of file names that are no text.
        sys.stdout.buffer.write(_OBEYED.sub(lambda match: dumps(match[0])[1:-1], text).encode() + b"\n")


def print_document(
    document: Callable[[], Mapping[str, Any]], paths: Sequence[Path], json: bool, answer: str = ""
) -> None:
    """Print files, one per line, below an answer and the first one's address; with `json` the document and the files.

    The document is that of what is no record.
    """
    if json:
        print_json({**document(), "files": [str(path) for path in paths]})
        return
    if answer:
        print(safe(answer))
    print_paths(paths, has_address=bool(answer))
