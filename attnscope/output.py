"""Turn a record, which is the result of a study, into files, one JSON document, or tables in the terminal.

A command calls `plan` before its study, to check formats, options and folders before a model runs for minutes. It gives
the finished record to `Output.deliver`, which writes files, prints, and raises an error for an incomplete study.
`attnscope show` calls `show` with a saved record. `print_document` prints what is no record.

The files of a record appear together or not at all, see `results.storage`. Data files are kept even if drawing figures
fails: they may have taken hours. An interrupted study replaces no record.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, UsageError, amount, one_line, safe
from attnscope.host import delay_interrupts
from attnscope.options import read_names
from attnscope.questions.maps import choose_heads
from attnscope.results.kinds import (
    CHOICE_OF_HEADS,
    FIGURE_FORMATS,
    KINDS,
    MAP_STYLE,
    PAPER_OPTIONS,
    TABLE_FORMATS,
    ResultKind,
    load_named,
)
from attnscope.results.result import failure_line, is_interrupted
from attnscope.results.storage import (
    PAGE_MARK,
    iterate_texts,
    replace_together,
    require_replaceable,
    require_writable,
)

if TYPE_CHECKING:
    from attnscope.results.result import Result

DEFAULT_FOLDER = Path("attnscope-out")
"""The folder for files if the user names none."""

INTERRUPTED = "interrupted"
"""The subfolder for the files of an interrupted study, if the folder holds files of the same names."""

MAX_SAVED_BYTES = 1 << 26
"""The most bytes of attention weights that are saved beside the figures of a heatmap if the user names no format."""

TERMINAL_FORMAT = "text"
"""The name, among formats, of maps drawn in the terminal instead of a file."""

_STYLE_OPTIONS = (*MAP_STYLE, *PAPER_OPTIONS)
"""Options that are fields of `drawing.style.Style`."""

_CHANGE_BY_OPTION: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "hide_special": lambda record, options: record.hide_special(keep=options.get("query")),
    "without_sinks": lambda record, options: record.without_sinks(),
    "words": lambda record, options: record.merge_words(),
    "mean": lambda record, options: record.average(options["mean"]),
}
"""The function that an option of `show` applies to a record, in this order: (record, all options) -> changed record."""


@dataclass(frozen=True)
class Output:
    """The files, figures and printed text that a record becomes."""

    kind: ResultKind
    # The folder for files; None = the user named no folder
    out: Path | None = None
    formats: tuple[str, ...] = ()
    # Whether the user named these formats; if not, they are the usual ones
    has_named_formats: bool = True
    # The name of the files, without their suffixes; None = the name of the kind of record
    stem: str | None = None
    # The columns of tables in files; empty = the usual ones
    columns: tuple[str, ...] = ()
    # Whether one JSON document is printed instead of tables
    json: bool = False
    # Whether notes on stderr are left out
    quiet: bool = False
    # Whether maps are drawn in the terminal
    draws_maps: bool = False
    # Whether the terminal shows a summary: the strongest links of maps in a few lines, and the URL of the first figure
    prints_summary: bool = False
    # Options of `attnscope show` for this kind of record, such as "query": "cat", without those that were not given
    options: Mapping[str, Any] = field(default_factory=dict)
    # The saved record before heads were picked from it: a picked head is ranked among all heads. None = a new record
    full_result: Result | None = None

    def style(self, record: Result) -> Any:
        """Return the `drawing.style.Style` of a record's figures."""
        return record.style(**_select_options(self.options, _STYLE_OPTIONS))

    def deliver(
        self, record: Result, folder: Path | None = None, other_paths: Sequence[Path] = ()
    ) -> None:
        """Write the files of a record, print its notes and the record; raise an error if its study is incomplete.

        Args:
            record: The record.
            folder: The folder of its files if the user names no folder.
            other_paths: Files or folders that the study itself wrote; their names are printed after those of the files.

        Raises:
            AttnscopeError: A file cannot be written. Or part of the study failed: its results are written and printed.
            KeyboardInterrupt: The study was interrupted: its results until then are written and printed.
        """
        record, out = choose_folder(
            record, self.out or folder, self.stem or self.kind.stem or self.kind.name
        )
        self.write_and_print(record, out, other_paths)
        _raise_if_incomplete(record.corpus, record.run)

    def write_and_print(
        self, record: Result, out: Path | None, other_paths: Sequence[Path] = ()
    ) -> None:
        """Write the files of a record into a folder (None = write no files), and print its notes and the record."""
        notes = list(record.run.get("notes", ()))
        formats = self.formats
        # Only records of attention maps have a notebook image. Large weights are saved only if the user named a format.
        if self.kind.notebook_image and not self.has_named_formats:
            size = sum(array.nbytes for array in record.arrays().values())
            if size > MAX_SAVED_BYTES:
                formats = tuple(name for name in formats if name in FIGURE_FORMATS)
                notes.append(
                    f"the weights, {size / 2**20:,.0f} MiB, are not saved: --format png,npz does"
                )
        options = {**self.options, "full_result": self.full_result}
        paths = []
        if out is not None:
            paths = write_files(record, out, formats, options, self.stem, self.columns)
        notes += note_glyphs(iterate_texts(record.describe()), map(str, paths), self.options.get("font"))
        print_notes(notes, self.quiet)
        # Stdout gets one JSON document, or tables and then the paths of files.
        paths += other_paths
        if self.json:
            print_json(record.to_json(files=list(map(str, paths))))
            return
        from attnscope.report.plain_text import open_console, print_record

        # `shown_with` names the arguments of this kind's printing function: some options, and some of these facts.
        arguments = {
            **options,
            "draws_maps": self.draws_maps,
            "prints_summary": self.prints_summary,
        }
        shown_with = {name: arguments.get(name) for name in self.kind.shown_with}
        print_record(record, open_console(), **shown_with)
        print_paths(paths, has_address=self.prints_summary and not self.draws_maps)


def _select_options(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named options, without those that are absent."""
    return {name: options[name] for name in names if name in options}


# Before a study ---------------------------------------------------------------------------------------------------


def plan(
    kind_name: str,
    out: Path | None = None,
    formats: str | None = None,
    *,
    columns: tuple[str, ...] = (),
    json: bool = False,
    quiet: bool = False,
    has_default_folder: bool = False,
    **options: Any,
) -> Output:
    """Check, before a study, how its record is to be written and shown; return the checked `Output`.

    Args:
        kind_name: The kind of record, such as "heads".
        out: The folder for files, or the path of a file such as atlas.html or map.png; None = the user names neither.
        formats: The formats of files, such as "npz,csv,png"; None = the usual formats, or the suffix of the file.
        columns: The columns of tables in files; empty = the usual columns.
        json: Whether one JSON document is printed.
        quiet: Whether notes are left out.
        has_default_folder: Whether the command has a folder for its files even if the user names no folder.
        options: Options in `results.kinds.ResultKind.options`, such as `query`; None leaves an option to its default.

    Raises:
        UsageError: A format is unknown, or there is no folder for files.
        AttnscopeError: The folder cannot be written.
    """
    kind = KINDS[kind_name]
    # Only records of attention maps, which have an image for notebooks, can be drawn in the terminal.
    known_formats = (*kind.formats, TERMINAL_FORMAT) if kind.notebook_image else kind.formats
    output = _plan_files(
        kind,
        out,
        formats,
        known_formats,
        kind.usual_formats,
        columns,
        options,
        has_default_folder=has_default_folder,
    )
    if output.draws_maps and json:
        raise UsageError("the terminal's drawing and --json both go to stdout", "leave out one of them")
    # Pictures without --quiet are for people, so print a summary. If not, a program may read stdout: print paths alone.
    has_pictures = not {*FIGURE_FORMATS, *kind.page_formats}.isdisjoint(output.formats)
    prints_summary = has_default_folder and has_pictures and not quiet
    return replace(output, json=json, quiet=quiet, prints_summary=prints_summary)


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
    """Show a saved record again: in the terminal, or as files in a folder.

    The arguments are those of `plan`, but every kind of record accepts the format "text". If `formats` is None, the
    format is "text" without a folder. With a folder it is png, or the usual formats of a kind without figures.

    Raises:
        UsageError: The kind of record lacks a format or an option, or there is no folder for files.
        AttnscopeError: The folder cannot be written, or a token or head is not in the record.
    """
    kind = record.record_kind()
    # Never write a Python script from a saved record: the file may come from anyone, and its text would become code.
    known_formats = [name for name in kind.formats if name != "py"]
    usual_formats = [TERMINAL_FORMAT]
    if out is not None and "png" in kind.usual_formats:
        usual_formats = ["png"]
    elif out is not None:
        usual_formats = [name for name in kind.usual_formats if name in known_formats]
    output = _plan_files(
        kind, out, formats, [*known_formats, TERMINAL_FORMAT], usual_formats, columns, options
    )
    # Options that choose heads or change the record are used up here. The remaining options say how it is drawn.
    remaining = dict(output.options)
    choice = [remaining.pop(name, None) for name in CHOICE_OF_HEADS]
    shown = choose_heads(record, *choice)
    for name, change in _CHANGE_BY_OPTION.items():
        # `changes` names the changes that were made before the record was saved: do not apply these twice.
        if remaining.pop(name, None) and name not in shown.changes:
            shown = change(shown, output.options)
    query = remaining.get("query")
    if query is not None:
        # Call the kind's `require_query`: it raises an error if the query names no token of the record.
        kind.resolve("query")(shown, query)
    # A saved record is written however large its weights are, as if the user had named a format.
    output = replace(
        output, json=json, quiet=quiet, options=remaining, full_result=record, has_named_formats=True
    )
    output.write_and_print(shown, output.out)


def _plan_files(
    kind: ResultKind,
    out: Path | None,
    formats: str | None,
    known_formats: Sequence[str],
    usual_formats: Sequence[str],
    columns: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    has_default_folder: bool = False,
) -> Output:
    """Check the folder, the formats and the options that a user asks for, and return them as an `Output`.

    The user may name formats in `known_formats`. If the user names no format, the formats are those in `usual_formats`.
    """
    options = {name: value for name, value in options.items() if value is not None}
    kind.require_options(options)
    # Make a style only to check its options: it raises an error if one of them has no meaning.
    load_named("drawing.style:Style")(**_select_options(options, _STYLE_OPTIONS))
    # If `out` names a file such as map.png, write to its folder under its stem, and add its suffix to the formats.
    stem = None
    if out is not None:
        ending = out.suffix.removeprefix(".")
        if ending in kind.formats and not out.is_dir():
            # `mark` is in each file of this format that attnscope writes. A file without it is not replaced.
            require_replaceable(out, mark=PAGE_MARK if ending in kind.page_formats else b"attnscope")
            formats = ending if formats is None else f"{formats},{ending}"
            stem = out.stem
            out = out.parent
    # Refuse files without a folder, a folder without files, and columns without a table.
    names = tuple(usual_formats) if formats is None else read_names(formats, known_formats, "format")
    files = tuple(name for name in names if name != TERMINAL_FORMAT)
    # The Python script of a trace reads the npz file beside it, so write both.
    if "py" in files and "npz" not in files:
        files = ("npz", *files)
    if files and formats is not None and out is None and not has_default_folder:
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
    if files and (out is not None or has_default_folder):
        require_writable(out or DEFAULT_FOLDER)
    return Output(
        kind,
        out,
        files,
        draws_maps=TERMINAL_FORMAT in names,
        options=options,
        columns=columns,
        stem=stem,
        has_named_formats=formats is not None,
    )


# Files ------------------------------------------------------------------------------------------------------------


def write_files(
    record: Result,
    out: Path,
    formats: Sequence[str],
    options: Mapping[str, Any] = {},
    stem: str | None = None,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Write the files of a record into a folder, all or none. If drawing figures fails, the data files are kept.

    The arguments are fields of `Output`. The options say how figures are drawn.

    Returns:
        The files: figures come first if the usual formats of the kind begin with a figure format, otherwise last.
    """
    kind = record.record_kind()
    if stem is not None:
        kind = replace(kind, stem=stem)
    figures = [name for name in formats if name in FIGURE_FORMATS and not record.is_empty]
    pages = [name for name in formats if name in kind.page_formats]
    data = [name for name in formats if name in kind.data_formats]
    if not (figures or pages or data):
        return []
    paths = []
    drawings = []
    with replace_together(out) as staged:
        shown_with = _select_options(options, kind.shown_with)
        for name in data:
            paths.append(record.save(staged / kind.file_name(name), columns=columns, **shown_with))
        for name in pages:
            paths.append(kind.resolve("page")(record).save(staged / kind.file_name(name)))
        try:
            if figures:
                # `draw` takes the options of this kind, without those for the terminal alone.
                names = {*kind.options} & {*_STYLE_OPTIONS, *kind.drawn_with}
                drawings = record.draw(staged, figures, **_select_options(options, names))
                if stem is not None:
                    drawings = _rename_figures(drawings, stem)
        except BaseException:
            _keep_data(staged, out)
            raise
    paths = [*drawings, *paths] if kind.usual_formats[0] in FIGURE_FORMATS else [*paths, *drawings]
    return [out / path.relative_to(staged) for path in paths]


def _rename_figures(files: Sequence[Path], stem: str) -> list[Path]:
    """Rename figures to the stem that the user named; several figures get names that begin with it, "map-L3H1.png"."""
    is_single = len({file.stem for file in files}) == 1
    renamed = []
    for file in files:
        name = f"{stem}{file.suffix}" if is_single else f"{stem}-{file.name}"
        renamed.append(file.rename(file.with_name(name)))
    return renamed


def _keep_data(staged: Path, out: Path) -> None:
    """Move the data files from the temporary folder `staged` to `out`, or to its subfolder if `out` has other files."""
    names = [path.name for path in staged.iterdir() if path.suffix[1:] not in FIGURE_FORMATS]
    if not names:
        return
    has_other_files = any(path != staged for path in out.iterdir())
    target = out / INTERRUPTED if has_other_files else out
    with contextlib.suppress(AttnscopeError), delay_interrupts():
        with replace_together(target) as folder:
            for name in names:
                (staged / name).replace(folder / name)
        if target != out:
            print_notes(
                [f"not all figures were drawn, so none is kept: the data are in {target}"], quiet=False
            )


def note_glyphs(texts: Iterable[str], files: Iterable[str], font: str | None) -> list[str]:
    """Return a note in a list if the files have figures, and some characters of the texts are in no font; else []."""
    if not any(name.endswith(FIGURE_FORMATS) for name in files):
        return []
    note = load_named("drawing.lettering:describe_missing")(texts, font)
    return [note] if note else []


# After a study ----------------------------------------------------------------------------------------------------


def choose_folder(record: Any, out: Path | None, stem: str) -> tuple[Any, Path | None]:
    """Choose the folder of a study: a subfolder if the study was interrupted and the folder holds a record already.

    Args:
        record: The record of the study.
        out: The folder that was named; None = no files are written.
        stem: The name of the record's files, without suffix.

    Returns:
        The record, with a note if its folder is the subfolder; and the folder, or None as `out`.

    Raises:
        KeyboardInterrupt: The study was interrupted before it finished a text.
    """
    if not is_interrupted(record.corpus):
        return record, out
    if not record.corpus.get("n_texts"):
        raise KeyboardInterrupt
    # A page or a figure holds no record, and may be replaced.
    if out is None or not any((out / f"{stem}.{ending}").exists() for ending in ("npz", "json", "csv")):
        return record, out
    note = f"Interrupted, and {out} holds a record, which stays: see its folder {INTERRUPTED}."
    notes = [*record.run.get("notes", ()), note]
    return replace(record, run={**record.run, "notes": notes}), out / INTERRUPTED


def _raise_if_incomplete(corpus: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Print the skipped parts of a study on stderr, and raise an error if it is incomplete.

    The arguments are facts of the record, on its texts and on its run. The caller has written and printed the results.

    Raises:
        AttnscopeError: A text or a checkpoint could not be read or studied, or a later step failed.
        KeyboardInterrupt: The study was interrupted.
    """
    failures = run.get("failures", ())
    problems = corpus.get("problems", ())
    # Checkpoints of a training that could not be measured.
    skipped = run.get("skipped", ())
    for problem in (*skipped, *problems):
        source = str(problem["source"])
        if problem["line"] is not None:
            source += f", line {problem['line']}"
        print("skipped: " + one_line(f"{source}: {problem['reason']}"), file=sys.stderr)
    # The first word of `corpus["of"]` says what was studied, such as "pictures"; for texts the entry is missing.
    plural = str(corpus.get("of") or "").partition(" ")[0]
    if is_interrupted(corpus):
        # Completes "this is what 12 texts say".
        n_checkpoints = corpus.get("n_checkpoints")
        done = f"{corpus['n_texts']:,} {plural or 'texts'} say"
        if isinstance(n_checkpoints, int):
            done = amount(n_checkpoints, "checkpoint says", "checkpoints say")
        print_notes([f"incomplete: this is what {done}"], quiet=False)
        if not failures:
            raise KeyboardInterrupt
    # Raise one error, for the gravest failure.
    if failures:
        hints = [failures[0]["hint"], "what was measured before is in the result"]
        raise AttnscopeError(failure_line(failures[0]), "; ".join(filter(None, hints)))
    if skipped:
        raise AttnscopeError(
            f"{amount(len(skipped), 'checkpoint')} could not be measured",
            "all the rest was, and is in the result",
        )
    if problems:
        n_problems = amount(len(problems), "part of the texts", "parts of the texts")
        if plural:
            n_problems = amount(len(problems), plural.removesuffix("s"))
        # `studies` writes "not studied" into the reason if a text was read. It changes only the wording of the error.
        is_lost = any("not studied" in problem["reason"] for problem in problems)
        failed = "read or studied" if is_lost else "read"
        raise AttnscopeError(
            f"{n_problems} could not be {failed}", "all the rest was studied, and is in the result"
        )


# Printing ---------------------------------------------------------------------------------------------------------

_CONTROL_CHARACTERS = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that json.dumps keeps though a terminal may obey them: controls, text direction, line separators."""


def print_notes(notes: Iterable[str], quiet: bool) -> None:
    """Print notes for people on stderr, unless `quiet`."""
    if not quiet:
        for note in notes:
            print(f"note: {one_line(note)}", file=sys.stderr)


def print_paths(paths: Sequence[str | Path], *, has_address: bool = False) -> None:
    """Print the files that were written, one per line; on a terminal, control characters in their names are escaped.

    On a terminal the file:// URL of each HTML page follows its name, for a browser. With `has_address`, the URL of the
    first file is printed above all files instead, on a terminal or not.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if has_address and paths:
        print(f"open {Path(paths[0]).resolve().as_uri()}")
    for path in paths:
        print(safe(str(path)) if is_terminal else path)
        if is_terminal and not has_address and str(path).endswith(".html"):
            print(f"open {Path(path).resolve().as_uri()}")


def print_json(document: str | Mapping[str, Any]) -> None:
    """Print a JSON document, in UTF-8 whatever the terminal's encoding. Nothing is printed without a stdout."""
    text = document if isinstance(document, str) else dumps(document, ensure_ascii=False)
    if sys.stdout is not None:
        sys.stdout.flush()
        # Escape control characters, and surrogates: these stand for bytes of file names that are not UTF-8.
        escaped = _CONTROL_CHARACTERS.sub(lambda match: dumps(match[0])[1:-1], text)
        sys.stdout.buffer.write(escaped.encode() + b"\n")


def print_document(
    document: Callable[[], Mapping[str, Any]], paths: Sequence[Path], json: bool, answer: str = ""
) -> None:
    """Print the files of a page or a batch, which are no records, or the JSON document that describes them.

    Args:
        document: Returns the JSON document.
        paths: The files.
        json: Whether the document is printed, with the files in it; if not, the files are printed, one per line.
        answer: A line to print above the files, followed by the URL of the first file; "" = print neither.
    """
    if json:
        print_json({**document(), "files": list(map(str, paths))})
        return
    if answer:
        print(safe(answer))
    print_paths(paths, has_address=bool(answer))
