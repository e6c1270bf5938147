"""What becomes of a record: files, one JSON document, or tables in the terminal. The only writer of results.

Formats, options and folders are checked before a model runs for minutes. The files of a record appear together or not
at all, see `results.file_sets`; what took the time stays even if it cannot be drawn.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError, one_line, safe
from attnscope.options import read_names
from attnscope.questions.maps import choose_heads
from attnscope.results.file_sets import OwnFiles, replace_together, require_writable
from attnscope.results.kinds import FIGURE_FORMATS, KINDS, SIZES, WHICH, Kind, load_named
from attnscope.results.storage import PAGE_MARK, require_replaceable
from attnscope.unfinished import fail_if_not_whole, keep_data, settle

if TYPE_CHECKING:
    from attnscope.questions.heatmap import Heatmap
    from attnscope.results.record import Record
    from attnscope.views.maps.process import DrawingProcess

HOME = Path("attnscope-out")
"""Where files go that no folder is named for."""

MOST_SAVED = 1 << 26
"""Bytes of weights up to which a heatmap that is drawn is saved too, so that `show` can draw it again."""

TEXT = "text"
"""The format that is drawn in the terminal."""

_NO_FOLDER = "there is no folder to write files to"

Drawing = Callable[["Record", Path, Sequence[str]], list[Path]]
"""What draws the figures of a record into a folder, in some formats."""


@dataclass(frozen=True)
class Output:
    """What is to become of a record.

    Attributes:
        kind: What kind of record it is.
        out: The folder for files; None = none are written, unless the record has a folder of its own.
        formats: The formats of the files.
        json: Whether one JSON document is printed instead of tables.
        quiet: Whether notes are left out.
        drawn: Whether maps are drawn in the terminal.
        options: How it is shown: some of those that its kind has a use for.
        stem: How files of data are called, without their endings; None = as their kind says.
        whole: The record that some heads were picked from, among which they are ranked.
        named: Whether the formats were asked for by name.
    """

    kind: Kind
    out: Path | None = None
    formats: tuple[str, ...] = ()
    json: bool = False
    quiet: bool = False
    drawn: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    stem: str | None = None
    whole: Record | None = None
    named: bool = True

    @property
    def figures(self) -> list[str]:
        """Those of the formats that are pictures."""
        return [name for name in self.formats if name in FIGURE_FORMATS]

    def style(self, record: Record) -> Any:
        """How the figures of a record are drawn."""
        return record.style(**_of_style(self.options))

    @contextlib.contextmanager
    def draw_ahead(self) -> Iterator[DrawingAhead]:
        """A process of its own that draws figures of a text while the block lasts; only where there are any."""
        if not self.figures:
            yield DrawingAhead(self)
            return
        from attnscope.views.maps.process import DrawingProcess

        with DrawingProcess() as process:
            yield DrawingAhead(self, process)

    def deliver(
        self,
        record: Record,
        folder: Path | None = None,
        drawing: Drawing | None = None,
        also: Sequence[Path] = (),
    ) -> None:
        """Writes the files of a record, says its notes, and prints it.

        Args:
            record: The record.
            folder: Where its files go if no folder is named.
            drawing: What draws its figures; None = this process.
            also: Files or folders that were written before, and are printed with its files.

        Raises:
            AttnscopeError: A file cannot be written; or part of what was asked for could not be studied, which is
                said when everything else is done.
            KeyboardInterrupt: The study was interrupted; all that it found is printed and written.
        """
        record, out = settle(record, self.out or folder, self.stem or self.kind.stem)
        formats, unsaved = self._formats_for(record)
        paths = [] if out is None else write(record, out, formats, self.options, drawing, self.stem)
        notes = _notes_on(record, paths, self.options, unsaved)
        say(notes, self.quiet)
        self.show(record, [*paths, *also])
        fail_if_not_whole(getattr(record, "corpus", {}), getattr(record, "run", {}))

    def _formats_for(self, record: Record) -> tuple[tuple[str, ...], list[str]]:
        """Return the formats of a record's files, and why weights that nobody asked for by name are not saved."""
        if self.named or not record.record_kind().glance:
            return self.formats, []
        size = sum(array.nbytes for array in record.arrays().values())
        if size <= MOST_SAVED:
            return self.formats, []
        return tuple(self.figures), [f"the weights, {size / 2**20:,.0f} MiB, are not saved: --format png,npz does"]

    def show(self, record: Record, paths: Sequence[Path]) -> None:
        """Prints a record on stdout: one JSON document; else its tables, then the paths of its files."""
        if self.json:
            print_json(record.to_json(files=[str(path) for path in paths]))
            return
        from attnscope.report.plain_text import open_console, print_record

        kind = record.record_kind()
        options = {**self.options, "drawn": self.drawn, "among": self.whole}
        print_record(record, open_console(), **{name: options.get(name) for name in kind.shown_with})
        print_paths(paths)


@dataclass(frozen=True)
class DrawingAhead:
    """What draws the figures of a text, all of them but the weights before these are known."""

    output: Output
    process: DrawingProcess | None = None

    def expect(self, record: Heatmap) -> None:
        """Draws what does not depend on the weights, which `record` need not have yet."""
        if self.process is not None:
            query = self.output.options.get("query")
            self.process.expect(record, self.output.style(record), query, self.output.figures)

    def draw(self, record: Record, folder: Path, formats: Sequence[str]) -> list[Path]:
        """Draws the figures of a record into a folder."""
        options = self.output.options
        from attnscope.questions.heatmap import Heatmap

        if self.process is None or not isinstance(record, Heatmap) or not record.is_of_text:
            return _draw(record, folder, formats, options)
        return self.process.draw(record, folder, formats, style=self.output.style(record), query=options.get("query"))


def plan(
    kind: str,
    out: Path | None = None,
    formats: str | None = None,
    *,
    json: bool = False,
    quiet: bool = False,
    has_folder: bool = False,
    **options: Any,
) -> Output:
    """Checks what is to become of a record, before it is made.

    Args:
        kind: The kind, such as "heads".
        out: The folder for files, if any; of what is one page also the file, such as atlas.html.
        formats: Their formats, such as "npz,csv,png"; None = the usual ones, or that of the file.
        json: Whether one JSON document is printed.
        quiet: Whether notes are left out.
        has_folder: Whether its files have a folder of their own where none is named.
        options: How it is shown, as `records.kinds.Kind.options` says; None = not said.

    Raises:
        UsageError: There is no such format, or no folder for files.
        AttnscopeError: The folder cannot be written.
    """
    about = KINDS[kind]
    out, stem, formats = _split_target(about, out, formats)
    if formats is not None and not about.glance and TEXT in map(str.strip, formats.lower().split(",")):
        raise UsageError(
            f"there is no format {TEXT!r}: {about.command} prints its tables to the terminal anyway", "leave it out"
        )
    if formats is not None and out is None and not has_folder:
        raise UsageError(_NO_FOLDER, "give one with --out, or leave out --format")
    terminal = (TEXT,) if about.glance else ()
    named = about.usual if formats is None else read_names(formats, (*about.formats, *terminal), "format")
    if TEXT in named and json:
        raise UsageError("the terminal's drawing and --json both go to stdout", "leave out one of them")
    files = _files_among(named, out)
    folder = out or (HOME if has_folder else None)
    if files and folder is not None:
        require_writable(folder)
    chosen = {name: value for name, value in options.items() if value is not None}
    about.require_options(chosen)
    load_named("drawing.style:Style")(**_of_style(chosen))
    return Output(about, out, files, json, quiet, TEXT in named, chosen, stem, named=formats is not None)


def _split_target(kind: Kind, out: Path | None, formats: str | None) -> tuple[Path | None, str | None, str | None]:
    """The folder for files, the name of those of data, and the formats: of what is one page a file may be named."""
    ending = "" if out is None else _named_by(out, kind)
    if out is None or not ending:
        return out, None, formats
    # Other formats go beside the file.
    return out.parent, out.stem, ending if formats is None else ",".join(dict.fromkeys([*formats.split(","), ending]))


def _files_among(named: Sequence[str], out: Path | None) -> tuple[str, ...]:
    """Those of some formats that are files; refuses a folder without any."""
    files = tuple(name for name in named if name != TEXT)
    if out is not None and not files:
        raise UsageError("there is no file to write: text is drawn in the terminal", "add formats, or leave out --out")
    return files


def _named_by(out: Path, kind: Kind) -> str:
    """The format of a file that is named instead of a folder; empty = it is a folder."""
    ending = out.suffix.removeprefix(".")
    if not {*kind.pages} & {*kind.usual} or ending in kind.figures or ending not in kind.formats or out.is_dir():
        return ""
    if ending in kind.pages:
        require_replaceable(out, holds=PAGE_MARK)
    return ending


def show(
    record: Record, out: Path | None = None, formats: str | None = None, *, json: bool, quiet: bool, **options: Any
) -> None:
    """Shows a saved record again: in the terminal, or with a folder as files.

    Args:
        record: The record.
        out: The folder for files; None = none.
        formats: Formats of files, and "text"; None = "text" without a folder, else png, or of what is not drawn its
            usual data.
        json: Whether one JSON document is printed.
        quiet: Whether notes are left out.
        options: How it is shown: None = not said.

    Raises:
        UsageError: The kind of record has no such format, or no use for an option; or there is no folder for files.
        AttnscopeError: The folder cannot be written, or a token or head is not in the record.
    """
    kind = record.record_kind()
    chosen = {name: value for name, value in options.items() if value is not None}
    kind.require_options(chosen)
    # The lines of a record from elsewhere are code, of which no script is made.
    known = (*(name for name in kind.formats if name != "py"), TEXT)
    out, stem, formats = _split_target(kind, out, formats)
    usual = ("png",) if "png" in kind.usual else tuple(name for name in kind.usual if name in known)
    named = read_names(formats, known, "format") if formats is not None else (TEXT,) if out is None else usual
    files = _files_among(named, out)
    if files and out is None:
        raise UsageError(_NO_FOLDER, "give one with --out, or leave out --format")
    record.style(**_of_style(chosen))  # what is none is said before anything is written
    whole = record
    record = choose_heads(record, *(chosen.pop(name, None) for name in WHICH))
    for change in ("hide_special", "words"):
        if chosen.pop(change, False) and change not in record.changes:  # type: ignore[attr-defined]  # its kind has it
            record = getattr(record, {"words": "merge_words"}.get(change, change))()
    if chosen.get("query") is not None:
        kind.view("query")(record, chosen["query"])
    if out is not None:
        require_writable(out)
    wanted = Output(kind, out, files, json, quiet, TEXT in named, options=chosen, whole=whole)
    paths = [] if out is None else write(record, out, files, chosen, stem=stem)
    say(_notes_on(record, paths, chosen), quiet)
    wanted.show(record, paths)


def write(
    record: Record,
    out: Path,
    formats: Sequence[str],
    options: Mapping[str, Any] = {},
    drawing: Drawing | None = None,
    stem: str | None = None,
) -> list[Path]:
    """Writes the files of a record into a folder: all of them, or none.

    Only where drawing fails, or is interrupted, the other files stay: they may have taken hours.

    Args:
        record: The record.
        out: The folder.
        formats: Some of its kind's formats.
        options: How figures are drawn: "scale", "cmap", "query", "measures" and `records.kinds.SIZES`.
        drawing: What draws them; None = this process.
        stem: How files of data are called, without their endings; None = as its kind says.

    Returns:
        The files: figures first where they are what its kind is usually written as, else last.
    """
    kind = record.record_kind()
    kind = kind if stem is None else kind.rename(stem)
    figures = [name for name in formats if name in FIGURE_FORMATS and not record.is_empty]
    pages = [name for name in formats if name in kind.pages]
    saved = [name for name in formats if name in kind.data]
    if not (figures or pages or saved):
        return []
    own = OwnFiles(kind.named_files, bool(kind.figures))
    with replace_together(out, own) as staged:
        data = [record.save(staged / kind.file(name), every=bool(options.get("every"))) for name in saved]
        data += [kind.view("page")(record).save(staged / kind.file(name)) for name in pages]
        drawn: list[Path] = []
        try:
            if figures:
                drawn = drawing(record, staged, figures) if drawing else _draw(record, staged, figures, options)
        except BaseException:
            keep_data(staged, out, own)
            raise
    paths = [*drawn, *data] if kind.usual[0] in FIGURE_FORMATS else [*data, *drawn]
    return [out / path.relative_to(staged) for path in paths]


def _draw(record: Record, out: Path, figures: Sequence[str], options: Mapping[str, Any]) -> list[Path]:
    kind = record.record_kind()
    known = {*kind.options} & {*_STYLE, *kind.drawn_with}
    return record.draw(out, figures, **{name: value for name, value in options.items() if name in known})


_STYLE = ("scale", "cmap", *SIZES)


def _of_style(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that say how figures are drawn."""
    return {name: options[name] for name in _STYLE if name in options}


def _note_repeated(record: Record, query: str | None) -> list[str]:
    """Notes where a query names tokens of several places, which are all shown."""
    if query is None or any(getattr(record, name, None) for name in ("picture", "pictures")):
        return []
    sides = [one.queries for one in getattr(record, "maps", ())] or [getattr(record, "tokens", None)]
    repeated = {name: at for tokens in sides if tokens is not None for name, at in tokens.find_repeated(query).items()}
    return [
        f"{name!r} stands at {', '.join(f'@{place}' for place in at)}: all are shown; --query @{at[0]} shows one"
        for name, at in repeated.items()
    ]


def note_fonts(texts: Iterable[str], files: Iterable[str], font: str | None) -> list[str]:
    """A note where figures among some files show code points in the place of characters that no font has."""
    if not any(name.endswith(FIGURE_FORMATS) for name in files):
        return []
    note = load_named("drawing.lettering:note_missing")(texts, font)
    return [note] if note else []


def _texts_in(value: object) -> Iterator[str]:
    """All texts in what describes a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)


# What is printed

_OBEYED = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Controls, marks of direction and separators of lines, which json.dumps leaves as they are beyond ASCII."""


def _notes_on(
    record: Record, paths: Sequence[Path], options: Mapping[str, Any], unsaved: Sequence[str] = ()
) -> list[str]:
    """What a record says of its run, and what its files do not show as asked."""
    notes = [*getattr(record, "run", {}).get("notes", ()), *unsaved]
    notes += _note_repeated(record, options.get("query"))
    return notes + note_fonts(_texts_in(record.drawn_texts()), map(str, paths), options.get("font"))


def say(notes: Iterable[str], quiet: bool) -> None:
    """Notes for people, on stderr."""
    if not quiet:
        for note in notes:
            print(f"note: {one_line(note)}", file=sys.stderr)


def print_paths(paths: Iterable[str | Path]) -> None:
    """Print the files that were written, one per line: as they are for programs, and as is safe on a terminal.

    On a terminal a page also has its address, which a browser opens.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    for path in paths:
        print(safe(str(path)) if is_terminal else path)
        if is_terminal and str(path).endswith(".html"):
            print(f"open {Path(path).resolve().as_uri()}")


def print_json(document: str | Mapping[str, Any]) -> None:
    """Prints a JSON document, which is UTF-8 whatever the terminal's encoding."""
    if not isinstance(document, str):
        from json import dumps

        document = dumps(document, ensure_ascii=False)
    if sys.stdout is not None:
        sys.stdout.flush()
        # As JSON's own \u202e what terminals and JavaScript obey, and the bytes of file names that are no text.
        sys.stdout.buffer.write(_OBEYED.sub(_escape, document).encode() + b"\n")


def print_document(document: Callable[[], Mapping[str, Any]], paths: Sequence[Path], json: bool) -> None:
    """Prints files, one per line; or with `json` the document of what is no record, with the files in it."""
    if json:
        print_json({**document(), "files": [str(path) for path in paths]})
    else:
        print_paths(paths)


def _escape(found: re.Match[str]) -> str:
    # Two of them for what is beyond U+FFFF, as JSON has it.
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
